"""What published models are made of, read from their configurations: statement A17."""

from __future__ import annotations

import pytest
import torch
import transformers as hf
from torch import nn

from glasshouse.hub.published import published_configs, published_specs
from glasshouse.page.views.notes.families import attention_kind


def has_module(model: nn.Module, part: str) -> bool:
    """Say whether the name of a module, or of its class, contains a part."""
    return any(part in name or part in type(one).__name__ for name, one in model.named_modules())


def transformers_choices(name: str) -> tuple[int, str, str]:
    """Return the key-value heads, positions and norm of transformers' model of a configuration, from its modules."""
    table = {
        key: value for key, value in published_configs()[name].items() if key not in ("architectures", "torch_dtype")
    }
    config = hf.AutoConfig.for_model(**table)
    for size in ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers"):
        if size in table:
            setattr(config, size, 1)
    with torch.device("meta"):
        model = hf.AutoModel.from_config(config)

    def first_of(*keys: str) -> int:
        return next(int(table[key]) for key in keys if key in table)

    heads = first_of("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads")
    d_head = (
        table.get("head_dim") or table.get("d_kv") or first_of("hidden_size", "n_embd", "dim", "d_model") // heads
    )
    named = {name.rpartition(".")[2]: one for name, one in model.named_modules()}
    if "c_attn" in named:  # of GPT-2, with queries and values
        width = named["c_attn"].nf // 3
    elif "query_key_value" in named:  # of GPT-NeoX, likewise
        width = named["query_key_value"].out_features // 3
    elif "Wqkv" in named:  # of ModernBERT, likewise
        width = named["Wqkv"].out_features // 3
    elif "qkv_proj" in named:  # of Phi-3, with all queries first
        width = (named["qkv_proj"].out_features - heads * d_head) // 2
    else:
        width = next(named[one].out_features for one in ("k_proj", "k_lin", "key", "k") if one in named)
    kinds = {"RotaryEmbedding": "rotary", "relative_attention_bias": "relative", "Sinusoidal": "sinusoidal"}
    positions = next((kind for part, kind in kinds.items() if has_module(model, part)), "learned")
    norms = {type(one).__name__ for one in model.modules() if "Norm" in type(one).__name__}
    no_mean = {one for one in norms if "RMS" in one or one in ("T5LayerNorm", "FusedRMSNorm")}
    assert no_mean in (norms, set())
    return width // d_head, positions, "rms" if no_mean else "layer"


@pytest.mark.parametrize("name", published_configs())
def test_a17_published_models_are_as_transformers_builds_them(name: str) -> None:
    s = published_specs()[name]
    assert (s.n_kv_heads, s.position.kind, s.norm.kind) == transformers_choices(name)


def test_a17_attention_is_read_from_the_configurations() -> None:
    """By the keys of config.json alone: heads that share keys and values have fewer of these."""
    found = {"multi-head": 0, "grouped-query": 0, "multi-query": 0}
    for name, table in published_configs().items():
        shared, s = table.get("num_key_value_heads"), published_specs()[name]
        kind = "multi-head" if shared in (None, table.get("num_attention_heads")) else "grouped-query"
        kind = "multi-query" if shared == 1 else kind
        assert attention_kind(s) == kind, name
        found[kind] += 1
        # Those that share keys also have rotary positions, an RMS norm before each sublayer and a gated feed-forward.
        choices = (s.position.kind, s.norm.kind, s.norm_placement, s.feedforward.kind)
        those = [("rotary", "rms", "pre", "swiglu"), ("rotary", "rms", "sandwich", "geglu")]
        assert (choices in those) == (kind != "multi-head"), name
    print(f"\nA17 published models by attention: {found}")
