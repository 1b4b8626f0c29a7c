"""GGUF files: tensors by gguf's own table of names, settings and tokenizer as transformers reads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers as hf
from hub.hf_models import make
from torch import Tensor
from typer.testing import CliRunner

import glasshouse as gh
from glasshouse.cli import app
from glasshouse.errors import ConfigError, InputError

CASES = {
    "gpt2": "GPT2",
    "gpt_neox": "GPTNEOX",
    "gpt_neox-in-turn": "GPTNEOX",
    "llama": "LLAMA",
    "llama-tied-biased": "LLAMA",
    "llama-multi-query-wide-heads": "LLAMA",
    "llama-linear": "LLAMA",
    "llama-llama3": "LLAMA",
    "mistral-no-window": "LLAMA",
    "qwen2": "QWEN2",
    "qwen3": "QWEN3",
    "gemma2": "GEMMA2",
    "gemma3-seven-layers-capped": "GEMMA3",
    "olmo2": "OLMO2",
    "phi3-part-of-heads": "PHI3",
}


def export(theirs: Any, folder: Path, dtype: str = "f32") -> tuple[gh.models.Model, gguf.GGUFReader]:  # noqa: ANN401
    theirs.save_pretrained(folder / "theirs")
    model, _ = gh.load(folder / "theirs")
    gh.hub.export_gguf(model, None, folder / "model.gguf", dtype=dtype)
    return model, gguf.GGUFReader(folder / "model.gguf")


def values(reader: gguf.GGUFReader) -> dict[str, Tensor]:
    return {
        one.name: torch.tensor(np.asarray(gguf.quants.dequantize(one.data, one.tensor_type)))
        for one in reader.tensors
    }


def expected(name: str, theirs: Any) -> dict[str, Tensor]:  # noqa: ANN401
    """Return transformers' tensors as llama.cpp wants them, under the names that gguf gives them."""
    config = theirs.config
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[CASES[name]], config.num_hidden_layers)
    heads = config.num_attention_heads
    found = {}
    for key, tensor in theirs.state_dict().items():
        whole = tensor.float()
        if key.endswith((".attn.bias", ".masked_bias", "inv_freq")) or ("gemma" in name and key == "lm_head.weight"):
            continue
        if name == "gpt2" and tensor.dim() == 2 and ".h." in key:  # Conv1D
            whole = whole.T
        if "query_key_value" in key:  # by head
            split = whole.unflatten(0, (heads, 3, -1))
            whole = torch.cat([split[:, part].flatten(0, 1) for part in range(3)])
        if "qkv_proj" in key:
            sizes = [count * config.hidden_size // heads for count in (heads, *2 * [config.num_key_value_heads])]
            for part, rows in zip("qkv", whole.split(sizes), strict=True):
                found[f"blk.{key.split('.')[2]}.attn_{part}.weight"] = rows
            continue
        if CASES[name] == "LLAMA" and ("q_proj" in key or "k_proj" in key):
            count = heads if "q_proj" in key else config.num_key_value_heads
            shape = whole.shape
            whole = whole.reshape(count, 2, shape[0] // count // 2, *shape[1:]).swapaxes(1, 2).reshape(shape)
        if "gemma" in name and key.endswith("norm.weight"):
            whole = whole + 1
        stored = names.get_name(key, try_suffixes=(".weight", ".bias"))
        assert stored is not None, key
        found[stored] = whole
    return found


@pytest.mark.parametrize("name", CASES)
def test_tensors_have_the_names_and_values_that_llama_cpp_expects(name: str, tmp_path: Path) -> None:
    theirs = make(name) if name != "gemma2" else gemma2()
    _, reader = export(theirs, tmp_path)
    found, wanted = values(reader), expected(name, theirs)
    if theirs.config.tie_word_embeddings and CASES[name] not in ("GPTNEOX", "OLMO2"):
        wanted.pop("output.weight", None)
    assert found.keys() - {"rope_freqs.weight"} == wanted.keys()
    for key, tensor in wanted.items():
        torch.testing.assert_close(found[key], tensor, rtol=0, atol=0, msg=key)


def gemma2(**settings: object) -> Any:  # noqa: ANN401
    """Return a model with a window in every second layer and the usual scale of scores, as llama.cpp has them."""
    sizes = {"vocab_size": 61, "hidden_size": 48, "intermediate_size": 72, "num_hidden_layers": 3, "head_dim": 256}
    heads = {"num_attention_heads": 6, "num_key_value_heads": 2, "query_pre_attn_scalar": 256, "sliding_window": 4}
    torch.manual_seed(0)
    model = hf.Gemma2ForCausalLM(hf.Gemma2Config(**{**sizes, **heads, **settings})).eval()
    for tensor in model.state_dict().values():
        tensor.normal_(0.0, 0.2 if tensor.dim() == 1 else 0.7 / tensor.shape[-1] ** 0.5)
    return model


@pytest.mark.parametrize("name", ["gpt2", "llama", "mistral-no-window", "qwen2", "gemma2"])
def test_transformers_reads_a_file_as_the_same_model(name: str, tmp_path: Path) -> None:
    model, _ = export(make(name) if name != "gemma2" else gemma2(), tmp_path)
    theirs = hf.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf", dtype=torch.float32).eval()
    ids = torch.randint(3, 60, (2, 11))
    with torch.no_grad():
        torch.testing.assert_close(theirs(ids).logits, model(ids), rtol=1e-4, atol=1e-4)


def test_frequencies_of_llama_3_are_scaled_by_factors(tmp_path: Path) -> None:
    theirs = make("llama-llama3")
    _, reader = export(theirs, tmp_path)
    factors = values(reader)["rope_freqs.weight"]
    theta, width = 10_000.0, theirs.config.hidden_size // theirs.config.num_attention_heads
    theta = theirs.config.rope_parameters["rope_theta"]
    plain = theta ** -(torch.arange(0, width, 2) / width)
    torch.testing.assert_close(plain / factors, theirs.model.rotary_emb.inv_freq)
    assert factors.unique().numel() > 1


@pytest.mark.parametrize(("dtype", "steps"), [("f16", None), ("bf16", None), ("q8_0", 127), ("q4_0", 8)])
def test_values_are_within_the_rounding_of_the_type(dtype: str, steps: int | None, tmp_path: Path) -> None:
    model, tok = gh.load("python-3m")
    gh.hub.export_gguf(model, tok, tmp_path / "model.gguf", dtype=dtype)
    reader = gguf.GGUFReader(tmp_path / "model.gguf")
    found = values(reader)
    kinds = {one.name: one.tensor_type.name.lower() for one in reader.tensors}
    assert {kind for name, kind in kinds.items() if "norm" in name} == {"f32"}
    assert kinds["blk.0.ffn_up.weight"] == dtype
    assert kinds["token_embd.weight"] == ("q8_0" if dtype == "q4_0" else dtype)
    ours = model.stack.blocks[0].feedforward.layer.up.weight.detach()
    error = (found["blk.0.ffn_up.weight"] - ours).abs()
    if steps is None:
        precision = {"f16": torch.float16, "bf16": torch.bfloat16}[dtype]
        assert error.le(ours.abs() * torch.finfo(precision).eps).all()
        return
    # A block of 32 has one scale in float16. Of 8 steps the largest value is -8, and 7 is the last on the other side.
    scale = ours.unflatten(1, (-1, 32)).abs().amax(-1) / steps
    bound = scale * ((1.0 if steps == 8 else 0.5) + steps * 2**-10)
    assert error.unflatten(1, (-1, 32)).le(bound[..., None]).all()


def test_settings_and_tokens_of_a_bundled_model(tmp_path: Path) -> None:
    model, tok = gh.load("python-3m")
    assert gh.hub.export_gguf(model, tok, tmp_path / "model.gguf") == "qwen3"
    fields = {name: field.contents() for name, field in gguf.GGUFReader(tmp_path / "model.gguf").fields.items()}
    s = model.spec
    assert fields["general.architecture"] == "qwen3"
    assert fields["qwen3.context_length"] == s.max_len
    assert fields["qwen3.attention.key_length"] == s.d_head
    assert fields["qwen3.rope.freq_base"] == s.position.theta
    assert fields["tokenizer.ggml.pre"] == "gpt-2"
    assert fields["tokenizer.ggml.eos_token_id"] == s.end_ids[0]
    assert fields["tokenizer.ggml.add_bos_token"] is False
    tokens, kinds = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    assert [tok.token_to_id(text) for text in tokens] == list(range(len(tok)))
    assert {number for number, kind in enumerate(kinds) if kind == gguf.TokenType.CONTROL} == set(tok.special_ids)


@pytest.mark.parametrize("pattern", ["gpt2", "gpt4"])
def test_transformers_reads_the_tokenizer_of_a_file(pattern: str, tmp_path: Path) -> None:
    texts = ["It's 12345 o'clock;  DON'T\n\n\twait 日本 ́é"] * 3
    tok = gh.Tokenizer.train(texts=texts, vocab_size=290, pattern=pattern)
    spec = gh.preset("gpt2", vocab_size=300, d_model=32, n_heads=2, n_layers=1, d_ff=64, max_len=32, end_ids=(0,))
    gh.hub.export_gguf(gh.build(spec), tok, tmp_path / "model.gguf")
    fields = gguf.GGUFReader(tmp_path / "model.gguf").fields
    assert fields["tokenizer.ggml.tokens"].contents()[-1] == "[PAD299]"
    assert fields["tokenizer.ggml.pre"].contents() == {"gpt2": "gpt-2", "gpt4": "dbrx"}[pattern]
    if pattern == "gpt2":  # transformers splits as GPT-2 whatever the file says
        theirs = hf.AutoTokenizer.from_pretrained(tmp_path, gguf_file="model.gguf")
        assert theirs(texts[0]).input_ids == tok.encode(texts[0])


def spec_of(**settings: object) -> gh.spec.Spec:
    return gh.preset("tiny-decoder", vocab_size=300, end_ids=(0,), **settings)


@pytest.mark.parametrize(
    ("make_model", "message"),
    [
        (lambda: gh.build(gh.preset("tiny-encoder")), "only decoders"),
        (lambda: gh.build(spec_of(windows=(4,))), "windows"),
        (lambda: gh.build(spec_of(qkv_bias=True, out_bias=True)), "qkv_bias"),
        (lambda: gh.build(spec_of(position="none")), "no transformers family"),
    ],
)
def test_what_llama_cpp_lacks_is_named(make_model: Any, message: str, tmp_path: Path) -> None:  # noqa: ANN401
    with pytest.raises(ConfigError, match=message):
        gh.hub.export_gguf(make_model(), None, tmp_path / "model.gguf")
    assert not list(tmp_path.iterdir())


BYTE_LEVEL = {"type": "ByteLevel", "trim_offsets": True}


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [("attn_logit_softcapping", "attention_softcap"), ("final_logit_softcapping", "logit_softcap")],
)
def test_gemma_2_without_a_cap_is_refused(theirs: str, ours: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"no such {ours}"):
        export(gemma2(**{theirs: None}), tmp_path)


def test_as_many_layers_as_the_27b_are_refused(tmp_path: Path) -> None:
    """llama.cpp takes them for it, and scales scores by d_model / n_heads instead of the width of a head."""
    with pytest.raises(ConfigError, match="no such n_layers"):
        export(gemma2(num_hidden_layers=46), tmp_path)


def changed(tok: gh.Tokenizer, **changes: object) -> gh.Tokenizer:
    return gh.Tokenizer.from_json(json.dumps(json.loads(tok.to_json()) | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pre_tokenizer": {**BYTE_LEVEL, "add_prefix_space": True, "use_regex": True}}, "ByteLevel"),
        (
            {
                "pre_tokenizer": {
                    "type": "Sequence",
                    "pretokenizers": [
                        {"type": "Split", "pattern": {"Regex": "[a-z]+"}, "behavior": "Isolated", "invert": False},
                        {**BYTE_LEVEL, "add_prefix_space": False, "use_regex": False},
                    ],
                }
            },
            r"splits at '\[a-z\]\+'",
        ),
        ({"normalizer": {"type": "Lowercase"}}, "Lowercase"),
    ],
)
def test_tokenizers_that_llama_cpp_lacks_are_named(changes: dict[str, object], message: str, tmp_path: Path) -> None:
    tok = gh.Tokenizer.train(texts=["a rose is a rose"], vocab_size=266)
    with pytest.raises(ConfigError, match=message):
        gh.hub.export_gguf(gh.build(spec_of()), changed(tok, **changes), tmp_path / "model.gguf")


def test_a_model_without_an_end_is_refused_with_a_tokenizer(tmp_path: Path) -> None:
    tok = gh.Tokenizer.train(texts=["a rose is a rose"], vocab_size=266, special_tokens={})
    model = gh.build(gh.preset("tiny-decoder", vocab_size=300, end_ids=()))
    with pytest.raises(ConfigError, match="end_ids"):
        gh.hub.export_gguf(model, tok, tmp_path / "model.gguf")


def test_numbers_beyond_float16_are_refused_and_the_old_file_stays(tmp_path: Path) -> None:
    model = gh.build(spec_of())
    gh.hub.export_gguf(model, None, tmp_path / "model.gguf")
    before = (tmp_path / "model.gguf").read_bytes()
    with torch.no_grad():
        model.stack.blocks[0].feedforward.layer.up.weight[0, 0] = 1e5
    with pytest.raises(InputError, match=r"blk\.0\.ffn_up\.weight .* choose bf16"):
        gh.hub.export_gguf(model, None, tmp_path / "model.gguf")
    assert [path.name for path in tmp_path.iterdir()] == ["model.gguf"]
    assert (tmp_path / "model.gguf").read_bytes() == before


def test_the_command_writes_a_file_by_its_name_or_by_option(tmp_path: Path) -> None:
    run = CliRunner().invoke
    assert "a model of type qwen3, with a tokenizer" in run(app, ["export", "python-3m", f"{tmp_path}/a.gguf"]).output
    result = run(app, ["export", "python-3m", f"{tmp_path}/b", "--to", "gguf", "--type", "q8_0"])
    assert result.exit_code == 0
    sizes = [(tmp_path / name).stat().st_size for name in ("a.gguf", "b")]
    assert sizes[0] > 1.7 * sizes[1]
    assert run(app, ["export", "python-3m", f"{tmp_path}/c.gguf", "--to", "hf"]).exit_code == 0
    assert (tmp_path / "c.gguf" / "config.json").exists()
