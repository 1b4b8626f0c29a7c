"""Malicious config.json: refused in one sentence, with no code run and nothing read outside."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
from hub.audit import refuse
from hub.damage import (
    CONFIG,
    DIGITS,
    EITHER,
    ENDLESS,
    LONG,
    UGLY,
    Case,
    RefuseCase,
    config,
    cut,
    directory,
    edit,
    fifo,
    gone,
    link,
    nested,
    on,
    rope,
    spec,
    write,
)

import glasshouse as gh

JSON = {
    "empty": (write(CONFIG, ""), "not valid JSON"),
    "half": (write(CONFIG, '{"model_type": "gpt2",'), "not valid JSON"),
    "not-utf-8": (write(CONFIG, b'{"model_type": "\xff"}'), "not valid JSON"),
    "many-digits": (write(CONFIG, f'{{"n_layer": {"9" * 5000}}}'), "not valid JSON"),
    "deep-lists": (write(CONFIG, "[" * 100_000), "not valid JSON"),
    "deep-tables": (write(CONFIG, '{"a":' * 100_000), "not valid JSON"),
    "list": (write(CONFIG, []), "not contain a JSON object"),
    "number": (write(CONFIG, 5), "not contain a JSON object"),
    "null": (write(CONFIG, None), "not contain a JSON object"),
    "forty-megabytes": (cut(CONFIG, 40_000_000), "40000000 bytes"),
    "missing": (gone(CONFIG), "there is no"),
    "directory": (directory(CONFIG), "not a file"),
    "fifo": (fifo(CONFIG), "not a file"),
    "link-out": (link(CONFIG, "OUTSIDE/config.json"), "outside its folder"),
    "link-to-itself": (link(CONFIG, CONFIG), "link|not a file"),
}
SETTINGS = {
    "no-model-type": (edit(CONFIG, lambda t: t.pop("model_type")), "model_type"),
    "unknown-model-type": (config(model_type="mamba"), "mamba.*not supported; gpt2"),
    "model-type-list": (config(model_type=["gpt2"]), "model_type"),
    "model-type-table": (config(model_type={}), "model_type"),
    "model-type-long": (config(model_type=LONG), "model_type"),
    "unknown-architecture": (config(architectures=["GPT2ForQuestionAnswering"]), "GPT2ForQuestionAnswering"),
    "architecture-list": (config(architectures=[["GPT2LMHeadModel"]]), "architecture"),
    "architecture-number": (config(architectures=[5]), "architecture"),
    "architecture-long": (config(architectures=[LONG]), "architecture"),
    "architectures-number": (config(architectures=5), "architecture"),
    "unknown-key": (config(colour="green"), "colour = 'green'"),
    "unknown-key-long": (config(**{LONG: 1}), "xxx"),
    "unknown-key-ugly": (config(**{UGLY: 1}), "red"),
    "unknown-key-with-a-long-value": (config(colour=[LONG] * 9), "colour"),
    "quantised": (config(quantization_config={"bits": 4, "quant_method": "gptq"}), "quantization_config"),
    "kernel-from-the-hub": (config(_attn_implementation="someone/kernel"), "_attn_implementation"),
    "cross-attention": (config(add_cross_attention=True), "add_cross_attention"),
    "size-string": (config(n_embd="16"), "n_embd = '16'.*an integer"),
    "size-fraction": (config(n_embd=16.5), "n_embd = 16.5.*an integer"),
    "size-true": (config(n_embd=True), "n_embd = True.*an integer"),
    "size-nan": (config(n_embd=float("nan")), "n_embd = nan.*an integer"),
    "size-infinite": (write(CONFIG, '{"model_type": "gpt2", "n_embd": 1e400}'), "n_embd = inf.*an integer"),
    "size-zero": (config(n_embd=0), "d_model is 0"),
    "size-negative": (config(n_embd=-1), "d_model is -1"),
    "heads-zero": (config(n_head=0), "n_heads is 0"),
    "heads-that-do-not-divide": (config(n_head=3), "d_model is 16"),
    "layers-10^9": (config(n_layer=10**9), "1000000000 layers"),
    "layers-digits": (config(n_layer=DIGITS), "layers|digits"),
    "layers-zero": (config(n_layer=0), "n_layers is 0"),
    "layers-negative": (config(n_layer=-3), "n_layers is -3"),
    "eps-nan": (config(layer_norm_epsilon=float("nan")), "eps is nan"),
    "eps-infinite": (config(layer_norm_epsilon=float("inf")), "eps is inf"),
    "eps-zero": (config(layer_norm_epsilon=0), "eps is 0"),
    "eps-beyond-floats": (config(layer_norm_epsilon=ENDLESS), "layer_norm_epsilon|digits"),
    "dropout-nan": (config(resid_pdrop=float("nan")), "dropout is nan"),
    "switch-number": (config(scale_attn_weights=1), "scale_attn_weights = 1.*true or false"),
    "activation-unknown": (config(activation_function="snake"), "activation_function = 'snake'"),
    "activation-list": (config(activation_function=["gelu"]), "activation_function"),
    "activation-megabytes": (config(activation_function="x" * 2_000_000), "activation_function"),
    "start-string": (config(bos_token_id="1"), "bos_token_id"),
    "end-string": (config(eos_token_id="1"), "eos_token_id"),
    "end-table": (config(eos_token_id={"1": 1}), "eos_token_id"),
}
TOO_LARGE = {
    "width-null": (config(n_embd=None), "parameters"),
    "width-10^18": (config(n_embd=10**18), "parameters"),
    "width-digits": (config(n_embd=DIGITS), ""),
    "vocabulary-10^12": (config(vocab_size=10**12), "parameters"),
    "vocabulary-digits": (config(vocab_size=DIGITS), ""),
    "positions-10^12": (config(n_positions=10**12), "parameters"),
    "a-layer-more": (config(n_layer=3), "parameters"),
}
ROPE = {
    "rope-dynamic": (rope(rope_type="dynamic", factor=2.0), "dynamic.*KV cache"),
    "rope-dynamic-of-old": (config(rope_parameters=None, rope_scaling={"type": "dynamic", "factor": 2.0}), "dynamic"),
    # transformers uses the second if both are given
    "rope-two-that-disagree": (config(rope_scaling={"rope_type": "linear", "factor": 2.0}), "rope_scaling"),
    "rope-longrope": (rope(rope_type="longrope", factor=2.0), "longrope"),
    "rope-list": (config(rope_parameters=[1]), "rope_parameters = .1.*JSON object"),
    "rope-list-long": (config(rope_parameters=[LONG]), "rope_parameters.*JSON object"),
    "rope-type-list": (rope(rope_type=["linear"]), "rope_type"),
    "rope-type-long": (rope(rope_type=LONG), "rope_type"),
    "rope-unknown-key": (rope(rope_type="default", colour=1), "colour = 1"),
    "rope-factor-missing": (rope(rope_type="linear"), "lacks factor"),
    "rope-factor-nan": (rope(rope_type="linear", factor=float("nan")), "factor is nan"),
    "rope-factor-string": (rope(rope_type="linear", factor="2"), "factor is '2'"),
    "rope-factor-beyond-floats": (rope(rope_type="linear", factor=ENDLESS), "factor|digits"),
    "rope-theta-string": (config(rope_theta="1e4", rope_parameters=None), "rope_theta = '1e4'.*number"),
    "rope-theta-one": (rope(rope_theta=1), "theta is 1"),
    "rope-theta-beyond-floats": (rope(rope_theta=ENDLESS), "rope_theta|digits"),
    "rope-yarn-without-turns": (
        rope(rope_type="yarn", factor=2.0, original_max_position_embeddings=16, beta_fast=1e308),
        "beta_fast",
    ),
    "rope-yarn-with-endless-turns": (
        rope(rope_type="yarn", factor=2.0, original_max_position_embeddings=16, beta_slow=5e-324),
        "beta_slow",
    ),
    "rope-yarn-beyond-floats": (
        rope(rope_type="yarn", factor=2.0, original_max_position_embeddings=ENDLESS),
        "original_max|digits",
    ),
    "grouped-heads-negative": (config(num_key_value_heads=-1), "n_kv_heads is -1"),
    "width-of-heads-negative": (config(head_dim=-2), "d_head is -2"),
    "width-of-heads-odd": (config(head_dim=3), "d_head is 3"),
}
WINDOWS = {
    "window-string": (config(sliding_window="x"), "'x'"),
    "window-types-number": (config(layer_types=5), "layer_types"),
    "window-types-lists": (config(layer_types=[[], []]), "layer_types"),
    "window-types-unknown": (config(layer_types=["chunked_attention"] * 2), "layer_types"),
    "window-types-too-few": (config(layer_types=["full_attention"]), "layer_types"),
    "window-layers-10^9": (config(num_hidden_layers=10**9, layer_types=None), "1000000000 layers"),
    "window-layers-negative": (config(layer_types=None, max_window_layers=-(10**15)), "max_window_layers"),
}
NEOX = {
    "neox-fraction-string": (config(rotary_pct="0.5"), "rotary_pct = '0.5'.*number"),
    "neox-fraction-string-of-new": (rope(partial_rotary_factor="0.5"), "partial_rotary_factor = '0.5'.*number"),
    "neox-fraction-zero": (rope(partial_rotary_factor=0), "fraction is 0"),
    "neox-fraction-negative": (rope(partial_rotary_factor=-0.5), "fraction is -0.5"),
    "neox-fraction-above-1": (rope(partial_rotary_factor=2), "fraction is 2"),
    "neox-fraction-nan": (rope(partial_rotary_factor=float("nan")), "fraction is nan"),
    "neox-fraction-beyond-floats": (rope(partial_rotary_factor=ENDLESS), "partial_rotary_factor|digits"),
    "neox-fraction-of-one-coordinate": (rope(partial_rotary_factor=0.25), "fraction is 0.25.*even"),
    "neox-theta-string": (config(rotary_emb_base="1e4"), "rotary_emb_base = '1e4'.*number"),
    "neox-two-bases": (config(rope_theta=5.0, rotary_emb_base=7.0), "rope_theta = 5.0 and rotary_emb_base = 7.0"),
    "neox-parallel-number": (config(use_parallel_residual=1), "use_parallel_residual = 1.*true or false"),
    "neox-bias-string": (config(attention_bias="yes"), "attention_bias = 'yes'.*true or false"),
    "neox-heads-that-do-not-divide": (config(num_attention_heads=3), "d_model is 16"),
    "neox-heads-zero": (config(num_attention_heads=0), "n_heads is 0"),
    "neox-layers-10^9": (config(num_hidden_layers=10**9), "1000000000 layers"),
    "neox-grouped-heads": (config(num_key_value_heads=2), "num_key_value_heads = 2.*unknown"),
}
OLMO2 = {
    "olmo2-width-of-heads": (config(head_dim=8), "head_dim = 8.*unknown"),
    "olmo2-grouped-heads-that-do-not-divide": (config(num_key_value_heads=3), "n_kv_heads is 3"),
    "olmo2-partial-rotation": (rope(partial_rotary_factor=0.5), "partial_rotary_factor = 0.5"),
    "olmo2-bias-string": (config(attention_bias="yes"), "attention_bias = 'yes'.*true or false"),
    "olmo2-windows": (config(sliding_window=5), "sliding_window = 5.*unknown"),
    "olmo2-mlp-bias": (config(mlp_bias=True), "mlp_bias = True.*unknown"),
    "olmo2-layers-10^9": (config(num_hidden_layers=10**9), "1000000000 layers"),
}
GEMMA2 = {
    "gemma2-cap-string": (config(final_logit_softcapping="30"), "final_logit_softcapping = '30'.*number"),
    "gemma2-cap-zero": (config(attn_logit_softcapping=0), "attention_softcap is 0"),
    "gemma2-cap-negative": (config(final_logit_softcapping=-1.0), "logit_softcap is -1.0"),
    "gemma2-cap-nan": (config(final_logit_softcapping=float("nan")), "logit_softcap is nan"),
    "gemma2-scalar-zero": (config(query_pre_attn_scalar=0), "query_pre_attn_scalar = 0.*at least 1"),
    "gemma2-scalar-digits": (config(query_pre_attn_scalar=DIGITS), "query_pre_attn_scalar|digits"),
    "gemma2-scalar-half": (config(query_pre_attn_scalar=0.5), "query_pre_attn_scalar = 0.5.*integer"),
    "gemma2-types-too-few": (config(layer_types=["full_attention"]), "layer_types other than"),
    "gemma2-types-unknown": (config(layer_types=["chunked_attention"] * 3), "layer_types other than"),
    "gemma2-types-number": (config(layer_types=3), "layer_types other than"),
    "gemma2-window-string": (config(sliding_window="4"), "sliding_window = '4'.*integer"),
    "gemma2-window-negative": (config(sliding_window=-4), "windows is"),
    "gemma2-both-ways": (config(use_bidirectional_attention=True), "use_bidirectional_attention = True"),
    "gemma2-layers-10^9": (config(num_hidden_layers=10**9), "1000000000 layers"),
}
LABELS = {
    "labels-list": (config(id2label=["a", "b", "c"]), "id2label"),
    "labels-numbers": (config(id2label={"0": 0, "1": 1}), "id2label"),
    "labels-with-a-gap": (config(id2label={"0": "a", "2": "b"}), "id2label"),
    "labels-twice-the-same": (config(id2label={"0": "a", "1": "a", "2": "b"}), "different names"),
    "labels-twice-the-same-long": (config(id2label={"0": LONG, "1": LONG}), "different names"),
    "labels-none": (config(id2label={}, num_labels=0), "labels is 0"),
}
OWN = {
    "own-no-table": (edit(CONFIG, lambda t: t.pop("glasshouse")), "no spec"),
    "own-no-spec": (edit(CONFIG, lambda t: t["glasshouse"].pop("spec")), "no spec"),
    "own-table-list": (config(glasshouse=[]), "no spec"),
    "own-of-the-future": (edit(CONFIG, lambda t: t["glasshouse"].update(format=3)), "format 3.*reads format 2"),
    "own-format-long": (edit(CONFIG, lambda t: t["glasshouse"].update(format=LONG)), "format"),
    "own-spec-list": (edit(CONFIG, lambda t: t["glasshouse"].update(spec=[])), "kind|table"),
    "own-kind-list": (spec(kind=[]), "kind"),
    "own-choice-list": (spec(position=[]), "position"),
    "own-choice-of-a-table": (spec(head={"kind": {}}), "head"),
    "own-setting-unknown": (spec(colour=1), "colour is not a setting"),
    "own-setting-unknown-long": (spec(**{LONG: 1}), "not a setting"),
    "own-setting-unknown-ugly": (spec(**{UGLY: 1}), "not a setting"),
    "own-value-long": (spec(norm_placement=LONG), "norm_placement"),
    "own-eps-beyond-floats": (spec(norm={"kind": "layer", "eps": ENDLESS}), "eps|digits"),
    "own-key-unknown": (config(colour="green"), "colour"),
}
OURS = {
    "ours-another-depth": (config(n_layer=1), "n_layers"),
    "ours-another-spec": (spec(attention_scale=0.5), "attention_scale"),
    "ours-of-the-future": (edit(CONFIG, lambda t: t["glasshouse"].update(format=3)), "format 3"),
    "ours-key-unknown": (config(colour="green"), "colour = 'green'"),
}
CASES = {
    **{f"config-{name}": case for name, case in on("gpt2", CONFIG, JSON | SETTINGS).items()},
    **{f"config-{name}": case for name, case in on("gpt2", EITHER, TOO_LARGE).items()},
    **on("llama", CONFIG, ROPE),
    **on("qwen2", CONFIG, WINDOWS),
    **on("gpt_neox", CONFIG, NEOX),
    **on("olmo2", CONFIG, OLMO2),
    **on("gemma2", CONFIG, GEMMA2),
    **on("bert-labels", CONFIG, LABELS),
    **on("own", CONFIG, OWN),
    **on("ours", CONFIG, OURS),
    "labels-10^9": Case("bert-labels", config(id2label=None, num_labels=10**9), EITHER, "labels|parameters"),
    "own-layers-10^9": Case("own", spec(n_layers=10**9), EITHER, ""),
    "distance-beyond-floats": Case(
        "t5", config(relative_attention_max_distance=ENDLESS), CONFIG, "max_distance|digits"
    ),
    "window-negative": Case("mistral", config(sliding_window=-3), CONFIG, "windows is"),
    "window-digits": Case("mistral", config(sliding_window=DIGITS), CONFIG, "window|digits"),
}


@pytest.mark.parametrize("name", CASES)
def test_refused_in_one_sentence(refuse_case: RefuseCase, name: str) -> None:
    refuse_case(CASES[name])


@pytest.mark.long
def test_json_as_deep_as_the_parser_allows_is_refused_in_one_sentence(model: Path) -> None:
    limit = sys.getrecursionlimit()
    for depth in range(limit - 250, limit):
        write(CONFIG, f'{{"model_type": "gpt2", "n_layer": 2, "colour": {nested(depth)}}}')(model)
        with pytest.raises(gh.GlasshouseError, match=r"config\.json"):
            gh.load(model)


def test_a_key_of_the_rope_settings_can_be_ignored_as_the_error_says(valid_checkpoints: Path, tmp_path: Path) -> None:
    shutil.copytree(valid_checkpoints / "llama", tmp_path / "model")
    rope(rope_type="default", colour=1)(tmp_path / "model")
    refuse(tmp_path / "model", CONFIG, r"ignore=\['colour'\]")
    gh.load(tmp_path / "model", ignore=["colour"])
