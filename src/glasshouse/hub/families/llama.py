"""Llama, Mistral (sliding window), Qwen2 (QKV biases) and Qwen3 (norms on queries and keys).

SmolLM, TinyLlama and many others have model_type llama.
"""

from __future__ import annotations

import functools

from glasshouse import config
from glasshouse.errors import StoreError
from glasshouse.hub.families.config_reader import ConfigReader
from glasshouse.hub.families.family import GATED, LAST_TOKEN, ConfigDict, Family, KeyMapping
from glasshouse.spec import Rotary, Spec, TransformerSpec

KEY_MAPPINGS = (
    KeyMapping("vocab_size", "vocab_size", 32_000),
    KeyMapping("hidden_size", "d_model", 4096),
    KeyMapping("intermediate_size", "d_ff", 11_008),
    KeyMapping("num_hidden_layers", "n_layers", 32),
    KeyMapping("num_attention_heads", "n_heads", 32),
    KeyMapping("num_key_value_heads", "n_kv_heads", 0),
    KeyMapping("head_dim", "d_head", 0),
    KeyMapping("max_position_embeddings", "max_len", 2048),
    KeyMapping("hidden_act", "feedforward", "silu", GATED),
    KeyMapping("rms_norm_eps", "norm.eps", 1e-6),
    KeyMapping("attention_dropout", "attention_dropout", 0.0),
)
BASE: ConfigDict = {
    "kind": "decoder",
    "position": {"kind": "rotary"},
    "norm": {"kind": "rms"},
    "qkv_bias": False,
    "out_bias": False,
    "ffn_bias": False,
    "init": "normal",
}
NAMES = {
    "token_embedding.table": "model.embed_tokens",
    "stack.blocks.*.attention.norm": "model.layers.*.input_layernorm",
    "stack.blocks.*.attention.layer.query": "model.layers.*.self_attn.q_proj",
    "stack.blocks.*.attention.layer.key": "model.layers.*.self_attn.k_proj",
    "stack.blocks.*.attention.layer.value": "model.layers.*.self_attn.v_proj",
    "stack.blocks.*.attention.layer.q_norm": "model.layers.*.self_attn.q_norm",
    "stack.blocks.*.attention.layer.k_norm": "model.layers.*.self_attn.k_norm",
    "stack.blocks.*.attention.layer.out": "model.layers.*.self_attn.o_proj",
    "stack.blocks.*.feedforward.norm": "model.layers.*.post_attention_layernorm",
    "stack.blocks.*.feedforward.layer.gate": "model.layers.*.mlp.gate_proj",
    "stack.blocks.*.feedforward.layer.up": "model.layers.*.mlp.up_proj",
    "stack.blocks.*.feedforward.layer.down": "model.layers.*.mlp.down_proj",
    "stack.norm": "model.norm",
    "head.weight": "lm_head.weight",
    "head.classifier": "score",
}

# RoPE scaling: their keys and our fields.
SCALINGS = {
    "default": {},
    "linear": {"factor": "factor"},
    "llama3": {
        "factor": "factor",
        "low_freq_factor": "low_freq_factor",
        "high_freq_factor": "high_freq_factor",
        "original_max_position_embeddings": "original_max_len",
    },
    "yarn": {
        "factor": "factor",
        "original_max_position_embeddings": "original_max_len",
        "beta_fast": "beta_fast",
        "beta_slow": "beta_slow",
        "attention_factor": "attention_factor",
    },
}


def read_rotary(
    keys: ConfigReader, table: ConfigDict, *, theta: float = 10_000.0, fraction: float | None = None
) -> None:
    """Read the RoPE settings: `rope_parameters`, or in older configs `rope_theta` and `rope_scaling`.

    `theta` and `fraction` are the defaults; without a fraction, the family rotates whole heads.
    """
    theta = keys.get_typed("rope_theta", theta)
    new, old = keys.get("rope_parameters"), keys.get("rope_scaling")
    given = new or old or {}
    if not isinstance(given, dict):
        raise StoreError(f"{keys.source!r} has rope_parameters = {given!r}, but it must be a JSON object.")
    if old and (not isinstance(old, dict) or not old.items() <= given.items()):
        raise StoreError(f"{keys.source!r} has a rope_scaling that contradicts its rope_parameters; remove one.")
    rope = ConfigReader(given, keys.source, keys.ignore)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if not isinstance(kind, str) or kind not in SCALINGS:
        why = (
            "its frequencies depend on the sequence length, which invalidates a KV cache"
            if kind in ("dynamic", "longrope")
            else ""
        )
        raise StoreError(
            f"{keys.source!r} has rope_type = {kind!r}, which is not supported{': ' * bool(why)}{why}; "
            f"{', '.join(SCALINGS)} are."
        )
    table["position"]["theta"] = rope.get_typed("rope_theta", theta)
    if fraction is None:
        rope.expect("partial_rotary_factor", 1.0, 1, None)
    else:
        table["position"]["fraction"] = rope.get_typed("partial_rotary_factor", fraction)
    rope.expect("truncate", True, None)  # YaRN's ramp with rounded bounds, as published
    values = {ours: rope.get(theirs) for theirs, ours in SCALINGS[kind].items()}
    if kind != "default":
        given = {ours: value for ours, value in values.items() if value is not None}
        if kind == "yarn":
            given.setdefault("original_max_len", table["max_len"])
        table["position"]["scaling"] = {"kind": kind, **given}
    # Keys of other kinds have no effect; transformers may leave them in.
    rope.reject_unused({name for fields in SCALINGS.values() for name in fields})


def write_rotary(spec: Spec) -> ConfigDict:
    """Return the RoPE settings, also under the keys of older versions of transformers."""
    if not isinstance(spec.position, Rotary):
        return {}
    scaling = config.dump(spec.position.scaling)
    kind = "default" if scaling["kind"] == "none" else scaling["kind"]
    values = {theirs: scaling[ours] for theirs, ours in SCALINGS[kind].items() if ours in scaling}
    theta = spec.position.theta
    rope = {"rope_type": kind, **values}
    return {
        "rope_parameters": {"rope_theta": theta, **rope},
        "rope_theta": theta,
        "rope_scaling": None if kind == "default" else rope,
    }


def adjust_llama(keys: ConfigReader, table: ConfigDict) -> None:
    """Read biases; one key sets those of all attention projections."""
    table["qkv_bias"] = table["out_bias"] = keys.get_typed("attention_bias", False)
    table["ffn_bias"] = keys.get_typed("mlp_bias", False)
    keys.expect("rope_interleaved", False)
    read_rotary(keys, table)


def extra_llama(spec: Spec) -> ConfigDict:
    """Return biases and RoPE settings."""
    return {"attention_bias": spec.qkv_bias, "mlp_bias": spec.ffn_bias, **write_rotary(spec)}


def adjust_mistral(keys: ConfigReader, table: ConfigDict) -> None:
    """Read the sliding window, the same in every layer."""
    window = keys.get("sliding_window", 4096)
    table["windows"] = [window or 0]
    read_rotary(keys, table)


def extra_mistral(spec: Spec) -> ConfigDict:
    """Return the sliding window and RoPE settings."""
    return {"sliding_window": spec.windows[0] or None, **write_rotary(spec)}


def adjust_qwen(keys: ConfigReader, table: ConfigDict, biased: bool) -> None:
    """Read the sliding window of each layer; Qwen2 has QKV biases, Qwen3 norms on queries and keys."""
    if biased:
        table["qkv_bias"] = True
    else:
        table["qk_norm"] = True
        table["qkv_bias"] = table["out_bias"] = keys.get_typed("attention_bias", False)
    table["windows"] = _read_windows(keys, table["n_layers"])
    keys.expect("use_mrope", False)
    read_rotary(keys, table)


def _read_windows(keys: ConfigReader, n_layers: int) -> list[int]:
    used, window = keys.get_typed("use_sliding_window", False), keys.get("sliding_window", 4096)
    full = keys.get_int("max_window_layers", 28)
    types = keys.get("layer_types")
    if not used or window is None:
        return [0]
    if types is None:
        if full < 0:
            raise StoreError(f"{keys.source!r} has max_window_layers = {full}, but it must be at least 0.")
        types = ["full_attention"] * min(full, n_layers) + ["sliding_attention"] * max(n_layers - full, 0)
    windows = windows_of(keys, types, window, n_layers)
    return windows[:1] if len(set(windows)) == 1 else windows


def windows_of(keys: ConfigReader, types: object, window: int, n_layers: int) -> list[int]:
    """Return the sliding window of each layer, 0 for full attention, from the type of each."""
    sizes = {"full_attention": 0, "sliding_attention": window}
    if not isinstance(types, list) or len(types) != n_layers or any(name not in list(sizes) for name in types):
        raise StoreError(
            f"{keys.source!r} has layer_types other than 'full_attention' or 'sliding_attention' for each of "
            f"{n_layers} layers."
        )
    return [sizes[name] for name in types]


def extra_qwen(spec: TransformerSpec, biased: bool) -> ConfigDict:
    """Return sliding windows, biases and RoPE settings."""
    windows = [spec.window(i) for i in range(spec.n_layers)]
    types = ["sliding_attention" if window else "full_attention" for window in windows]
    widest = max(windows)
    result: ConfigDict = {"use_sliding_window": widest > 0, "sliding_window": widest or None}
    if widest:
        result |= {"layer_types": types, "max_window_layers": windows.count(0)}
    if not biased:
        result["attention_bias"] = spec.qkv_bias
    return result | write_rotary(spec)  # type: ignore[arg-type]


llama = functools.partial(
    Family,
    base=BASE,
    key_mappings=KEY_MAPPINGS,
    names=NAMES,
    prefix="model.",
    tied_tensors={"model.embed_tokens.weight": ("lm_head.weight",)},
    ignored_tensors=r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",
    ignored_keys=("initializer_range", "is_llama_config", "pretraining_tp"),
    tied=False,
)


def with_defaults(**defaults: int) -> tuple[KeyMapping, ...]:
    """Return the key mappings with other defaults."""
    return tuple(mapping._replace(default=defaults.get(mapping.hf_key, mapping.default)) for mapping in KEY_MAPPINGS)


def heads(name: str) -> ConfigDict:
    """Return the architectures of a family."""
    return {
        f"{name}ForCausalLM": {"kind": "next_token"},
        f"{name}Model": {"kind": "none"},
        f"{name}ForSequenceClassification": LAST_TOKEN,
    }


LLAMA = llama(model_type="llama", heads=heads("Llama"), adjust=adjust_llama, extra=extra_llama)
MISTRAL = llama(
    model_type="mistral",
    key_mappings=with_defaults(intermediate_size=14_336, num_key_value_heads=8, max_position_embeddings=131_072),
    heads=heads("Mistral"),
    adjust=adjust_mistral,
    extra=extra_mistral,
)
QWEN = {
    "vocab_size": 151_936,
    "intermediate_size": 22_016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32_768,
}
QWEN2 = llama(
    model_type="qwen2",
    key_mappings=with_defaults(**QWEN),
    heads=heads("Qwen2"),
    adjust=functools.partial(adjust_qwen, biased=True),
    extra=functools.partial(extra_qwen, biased=True),
)
QWEN3 = llama(
    model_type="qwen3",
    key_mappings=with_defaults(**QWEN, head_dim=128),
    heads=heads("Qwen3"),
    adjust=functools.partial(adjust_qwen, biased=False),
    extra=functools.partial(extra_qwen, biased=False),
)
