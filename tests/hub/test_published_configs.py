"""The published config.json of popular models: every key is supported, and the parameter count is the known one."""

from __future__ import annotations

import pytest

import glasshouse as gh
from glasshouse import hub
from glasshouse.hub.families.family import differing_fields
from glasshouse.hub.published import published_configs

CONFIGS = published_configs()
GPT2, T5, MARIAN, LLAMA = (CONFIGS[name] for name in ("gpt2", "t5-small", "opus-mt-en-de", "Llama-3.2-1B"))


@pytest.mark.parametrize(
    ("name", "held", "parameters"),
    [
        ("gpt2", "", 124_439_808),
        ("bert-base-uncased", "cls.predictions.decoder.bias", 109_514_298),
        ("roberta-base", "lm_head.decoder.bias", 124_697_433),
        ("distilbert-base-uncased", "vocab_projector.bias", 66_985_530),
        ("t5-small", "", 60_506_624),
        ("flan-t5-base", "lm_head.weight", 247_577_856),
        ("bart-base", "", 139_420_416),
        ("Llama-3.2-1B", "", 1_235_814_400),
        ("SmolLM2-135M", "", 134_515_008),
        ("Mistral-7B-v0.1", "lm_head.weight", 7_241_732_096),
        ("Qwen2.5-0.5B", "", 494_032_768),
        ("Qwen3-0.6B", "", 596_049_920),
        ("pythia-70m", "embed_out.weight", 70_426_624),
        ("OLMo-2-0425-1B", "lm_head.weight", 1_484_916_736),
        ("gemma-2-2b", "", 2_614_341_888),
        ("gemma-3-1b-pt", "", 999_885_952),
        ("phi-4", "lm_head.weight", 14_659_507_200),
        ("xlm-roberta-base", "lm_head.decoder.bias", 278_295_186),
        ("ModernBERT-base", "decoder.bias", 149_655_232),
    ],
)
def test_published_configs_give_models_of_the_published_size(name: str, held: str, parameters: int) -> None:
    table = CONFIGS[name]
    names = [held, *map(str, range(40))]  # as many tensors as layers, at least
    spec = hub.FAMILIES[table["model_type"]].spec_from_config(table, names)
    assert gh.count_parameters(spec) == parameters


@pytest.mark.parametrize(
    ("name", "held", "sizes", "parameters"),
    [
        ("pythia-70m", "embed_out.weight", (768, 12, 12, 3072), 162_322_944),
        ("pythia-70m", "embed_out.weight", (1024, 24, 16, 4096), 405_334_016),
        ("pythia-70m", "embed_out.weight", (2048, 16, 8, 8192), 1_011_781_632),
        ("OLMo-2-0425-1B", "lm_head.weight", (4096, 32, 32, 11_008), 7_298_617_344),
        ("xlm-roberta-base", "lm_head.decoder.bias", (1024, 24, 16, 4096), 560_142_482),
        ("ModernBERT-base", "decoder.bias", (1024, 28, 16, 2624), 395_881_664),
    ],
    ids=["pythia-160m", "pythia-410m", "pythia-1b", "OLMo-2-7B", "xlm-roberta-large", "ModernBERT-large"],
)
def test_other_sizes_of_a_family(name: str, held: str, sizes: tuple[int, ...], parameters: int) -> None:
    keys = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
    table = CONFIGS[name] | dict(zip(keys, sizes, strict=True))
    if "num_key_value_heads" in table:
        table["num_key_value_heads"] = table["num_attention_heads"]
    names = [held, *map(str, range(40))]
    spec = hub.FAMILIES[table["model_type"]].spec_from_config(table, names)
    assert gh.count_parameters(spec) == parameters
    assert sum(one.numel() for one in gh.build(spec, device="meta").parameters()) == parameters


def test_a_marian_config_is_read() -> None:
    spec = hub.FAMILIES["marian"].spec_from_config(MARIAN, ["final_logits_bias", *map(str, range(40))])
    assert (spec.start_id, spec.pad_id, spec.end_ids) == (58100, 58100, (0,))
    assert (spec.embed_scale, spec.embed_norm, spec.max_len) == (True, False, 512)


def test_presets_are_what_was_published() -> None:
    many = [str(i) for i in range(40)]
    assert hub.FAMILIES["gpt2"].spec_from_config(GPT2, many) == gh.preset("gpt2")
    assert hub.FAMILIES["t5"].spec_from_config(T5, many) == gh.preset("t5-small")
    llama = hub.FAMILIES["llama"].spec_from_config(LLAMA, many)
    assert differing_fields(llama, gh.preset("llama-1b")) == []
