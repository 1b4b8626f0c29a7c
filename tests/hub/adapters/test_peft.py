"""Adapters against PEFT on the transformers model: saved by either, loaded by the other, merged by both."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers as hf
from hub.hf_models import CASES, make
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import glasshouse as gh
from glasshouse import hub
from glasshouse.layers import lora
from glasshouse.layers.lora import LoRA
from glasshouse.models import Model, Seq2Seq

ATTENTION = ("query", "value")

# Each family with maps apart, with and without a head, and GPT-2, which keeps three as one; names that others end
# with as well (BERT's dense, GPT-2's c_proj), and names that depend on a choice (the two maps up of T5 1.1).
OUT = [
    ("llama", ATTENTION),
    ("llama", ("*",)),
    ("llama-bare", ("out", "gate")),
    ("llama-labels", ATTENTION),
    ("mistral-window", ("key",)),
    ("qwen3", ATTENTION),
    ("bert-masked", ATTENTION),
    ("bert-masked", ("out", "up", "down")),
    ("bert-bare", ("out", "up", "down")),
    ("bert-labels", ("value", "out")),
    ("roberta-masked", ("query", "out")),
    ("distilbert-masked", ("*",)),
    ("modernbert-masked", ("*",)),
    ("modernbert-labels", ("query", "gate")),
    ("t5", ATTENTION),
    ("t5-1.1", ("up", "out")),
    ("bart", ("*",)),
    ("marian", ATTENTION),
    ("gpt2", ATTENTION),
    ("gpt2", ("key",)),
    ("gpt2", ("value", "query", "out")),
    ("gpt2", ("*",)),
    ("gpt2-bare", ("query", "key", "value", "down")),
    ("gpt_neox", ATTENTION),
    ("gpt_neox", ("key",)),
    ("gpt_neox", ("*",)),
    ("gpt_neox-bare", ("value", "query", "out")),
    ("olmo2", ("*",)),
    ("gemma2", ("*",)),
    ("gemma3", ("*",)),
    ("phi3", ("*",)),
    ("phi3", ("key", "up")),
]
IN: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"target_modules": ["q_proj", "v_proj"]}),
    ("llama", {"target_modules": "all-linear", "task_type": "CAUSAL_LM"}),
    ("llama", {"target_modules": ["q_proj"], "use_rslora": True, "init_lora_weights": "gaussian"}),
    ("llama", {"target_modules": r"model\.layers\.1\..*\.(k|o)_proj"}),
    ("llama", {"target_modules": ["down_proj"], "layers_to_transform": [0, 2]}),
    ("llama-bare", {"target_modules": ["gate_proj"]}),
    ("llama-labels", {"target_modules": ["q_proj"], "task_type": "SEQ_CLS"}),
    (
        "qwen3",
        {"target_modules": ["k_proj", "up_proj"], "rank_pattern": {"k_proj": 2}, "alpha_pattern": {"k_proj": 5}},
    ),
    ("bert-masked", {"target_modules": ["query", "layer.1.output.dense"]}),
    ("bert-bare", {"target_modules": ["query", "value"]}),
    ("roberta-masked", {"target_modules": ["key", "intermediate.dense"]}),
    ("distilbert-masked", {"target_modules": ["q_lin", "lin2"]}),
    ("xlm-roberta-labels", {"target_modules": ["query"], "task_type": "SEQ_CLS"}),
    ("modernbert-masked", {"target_modules": ["Wqkv", "Wi", "mlp.Wo"]}),
    ("t5", {"target_modules": ["q", "v"]}),
    ("t5-1.1", {"target_modules": ["wi_0", "wi_1", "wo"]}),
    ("bart", {"target_modules": ["q_proj", "fc1"], "task_type": "SEQ_2_SEQ_LM"}),
    ("marian", {"target_modules": ["encoder_attn.out_proj"]}),
    ("gpt2", {"target_modules": ["c_attn"], "fan_in_fan_out": True, "trainable_token_indices": [3, 10]}),
    ("llama", {"target_modules": ["q_proj"], "trainable_token_indices": [3, 10], "modules_to_save": ["norm"]}),
    ("llama", {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "mlp"]}),
    ("gpt_neox", {"target_modules": ["query_key_value", "dense_4h_to_h"]}),
    ("gpt_neox-bare", {"target_modules": ["query_key_value"], "trainable_token_indices": [3, 10]}),
    ("olmo2", {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "q_norm"]}),
    ("gemma3", {"target_modules": ["v_proj"], "modules_to_save": ["k_norm"]}),
    ("phi3", {"target_modules": ["qkv_proj", "gate_up_proj"]}),
    ("gemma2", {"target_modules": ["q_proj"], "modules_to_save": ["pre_feedforward_layernorm"]}),
    ("gpt2", {"target_modules": ["c_attn", "mlp.c_proj"], "fan_in_fan_out": True, "rank_pattern": {"c_attn": 6}}),
]


def ident(value: object) -> str | None:
    return "+".join(value) if isinstance(value, tuple) else None


def tolerance(name: str) -> float:
    """In float64; looser where a norm of transformers computes in float32."""
    return 1e-6 if CASES[name].drops else 1e-10


ROWS = (".rows", "trainable_tokens_delta.default")


def randomise(tensors: dict[str, Tensor]) -> None:
    """Move the B matrices away from zero, as training does."""
    torch.manual_seed(11)
    for name, tensor in tensors.items():
        if name.endswith((".lora_b", "lora_B.default.weight", *ROWS)) or ".modules_to_save." in name:
            tensor.normal_(std=0.2)


@torch.no_grad()
def run_ours(model: Model, ids: Tensor) -> Tensor:
    return model(ids, ids[:, :5]) if isinstance(model, Seq2Seq) else model(ids)


@torch.no_grad()
def run_theirs(model: nn.Module, ids: Tensor, ours: Model) -> Tensor:
    kwargs = {"decoder_input_ids": ids[:, :5]} if isinstance(ours, Seq2Seq) else {}
    out = model(input_ids=ids, attention_mask=torch.ones_like(ids), **kwargs)
    return out.logits if hasattr(out, "logits") else out.last_hidden_state


IDS = torch.arange(3, 19).view(2, 8) * 7 % 55 + 3


def assert_close(a: Tensor, b: Tensor, limit: float) -> None:
    assert a.dtype == b.dtype == torch.float64
    assert a.shape == b.shape
    assert (a - b).abs().max() <= limit * b.abs().max()


def adapted(name: str, targets: tuple[str, ...], tmp_path: Path, **more: Any) -> tuple[Model, LoRA]:  # noqa: ANN401
    """Return a model with LoRA attached, with its base and its adapter saved."""
    make(name).save_pretrained(tmp_path / "theirs")
    model, _ = gh.load(tmp_path / "theirs", dtype=torch.float64)
    gh.save(model, None, tmp_path / "base")
    choice = LoRA(rank=3, alpha=4.0, dropout=0.1, targets=targets, **more)
    torch.manual_seed(1)
    lora.attach(model, choice)
    randomise(lora.adapter_state_dict(model))
    for weight in lora.saved_weights(model, choice).values():
        weight.data.normal_(std=0.2)
    hub.save_adapter(model, choice, tmp_path / "adapter", base=str(tmp_path / "base"))
    return model, choice


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama model and its adapter, saved once."""
    place = tmp_path_factory.mktemp("saved")
    adapted("llama", ATTENTION, place)
    return place


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    """A copy of that adapter, to be damaged by a test."""
    return Path(shutil.copytree(saved / "adapter", tmp_path / "adapter"))


@pytest.mark.few(4)
@pytest.mark.slow
@pytest.mark.parametrize(("name", "targets"), OUT, ids=ident)
def test_ours_in_peft(name: str, targets: tuple[str, ...], tmp_path: Path) -> None:
    check_in_peft(name, targets, tmp_path)


# Some of these tokens are in IDS, and one is the last of a row, so that the head's rows count, too.
NEW = (3, 10, 17)
MORE = [
    ("llama", {"token_ids": NEW}),
    ("gpt2", {"token_ids": NEW, "modules_to_save": ("stack.norm", "stack.blocks.1.*.norm")}),
    ("gpt2", {"modules_to_save": ("stack.blocks.0.feedforward.layer.down", "stack.position.table")}),
    ("bart", {"token_ids": NEW, "modules_to_save": ("*.norm",)}),
]


@pytest.mark.parametrize(("name", "more"), MORE, ids=["untied", "tied", "transposed", "seq2seq"])
def test_what_is_trained_beside_lora_in_peft(name: str, more: dict[str, Any], tmp_path: Path) -> None:
    check_in_peft(name, ATTENTION, tmp_path, **more)


@pytest.mark.parametrize(
    ("name", "more", "message"),
    [
        ("t5-1.1", {"token_ids": NEW}, "PEFT takes the head of an encoder-decoder for tied"),
        ("gpt2", {"modules_to_save": ("token_embedding",)}, r"token_embedding\.table\.weight is tied to the head"),
        ("gpt2", {"modules_to_save": ("stack.blocks.0.attention.layer.key",)}, "only a part of it was trained whole"),
    ],
    ids=["untied-seq2seq", "tied-embedding", "chunk"],
)
def test_what_peft_would_load_as_something_else_is_refused(
    name: str, more: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(gh.ConfigError, match=message):
        adapted(name, ATTENTION, tmp_path, **more)


@pytest.mark.parametrize(
    ("tensors", "table", "message"),
    [
        (
            {"base_model.model.model.norm2.weight": torch.ones(40)},
            {},
            r"norm2\.weight, which this model has no",
        ),
        ({"base_model.model.model.norm.weight": torch.ones(3)}, {}, r"with shape \[3\], but the model needs \[\d+\]"),
        ({}, {"trainable_token_indices": {"a": [1], "b": [2]}}, "trains rows of other tokens in other modules"),
        ({}, {"trainable_token_indices": ["x"]}, "trainable_token_indices = .* but they must be lists of ids"),
        ({}, {"trainable_token_indices": [1]}, "but .* has no weights of them"),
    ],
)
def test_damaged_adapters_are_one_sentence(
    tensors: dict[str, Tensor], table: dict[str, Any], message: str, saved: Path, folder: Path
) -> None:
    path = folder / "adapter_model.safetensors"
    save_file(load_file(path) | tensors, path)
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(config | table))
    model, _ = gh.load(saved / "base")
    with pytest.raises(gh.StoreError, match=message):
        hub.load_adapter(model, folder)


def check_in_peft(name: str, targets: tuple[str, ...], tmp_path: Path, **more: Any) -> None:  # noqa: ANN401
    ours, choice = adapted(name, targets, tmp_path, **more)
    architecture = json.loads((tmp_path / "base" / "config.json").read_text())["architectures"][0]
    base = getattr(hf, architecture).from_pretrained(tmp_path / "base", dtype=torch.float64).eval()
    without = run_theirs(base, IDS, ours)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # PEFT warns of keys that it misses or does not expect
        theirs = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    written = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert written.keys() == peft.get_peft_model_state_dict(theirs, save_embedding_layers=False).keys()
    assert theirs.peft_config["default"].lora_dropout == 0.1
    assert theirs.peft_config["default"].base_model_name_or_path == str(tmp_path / "base")

    expected = run_theirs(theirs, IDS, ours)
    assert (expected - without).abs().max() > 1e-3 * without.abs().max()
    assert_close(run_ours(ours, IDS), expected, tolerance(name))
    own = lora.adapter_state_dict(ours)
    lora.merge(ours)
    assert_close(run_ours(ours, IDS), run_theirs(theirs.merge_and_unload(), IDS, ours), tolerance(name))

    back, _ = gh.load(tmp_path / "base")
    found = hub.load_adapter(back, tmp_path / "adapter")
    assert (found.rank, found.alpha, found.dropout) == (choice.rank, choice.alpha, choice.dropout)
    assert targets == ("*",) or set(found.targets) == set(targets)
    assert found.token_ids == choice.token_ids
    assert lora.adapter_state_dict(back).keys() == own.keys()
    assert all(tensor.equal(own[name]) for name, tensor in lora.adapter_state_dict(back).items())
    hub.save_adapter(back, found, tmp_path / "again", base=str(tmp_path / "base"))
    for file in ("adapter_config.json", "adapter_model.safetensors"):
        assert (tmp_path / "again" / file).read_bytes() == (tmp_path / "adapter" / file).read_bytes()


@pytest.mark.few(8)
@pytest.mark.parametrize(("name", "settings"), IN, ids=ident)
def test_peft_adapters_in_ours(name: str, settings: dict[str, Any], tmp_path: Path) -> None:
    base = make(name).double()
    base.save_pretrained(tmp_path / "base")
    theirs = peft.get_peft_model(base, peft.LoraConfig(**{"r": 4, "lora_alpha": 6, **settings})).eval()
    with torch.no_grad():
        randomise(theirs.state_dict())
    theirs.save_pretrained(tmp_path / "adapter")
    ours, _ = gh.load(tmp_path / "base")
    without = run_ours(ours, IDS)
    choice = hub.load_adapter(ours, tmp_path / "adapter")

    expected = run_theirs(theirs, IDS, ours)
    assert (expected - without).abs().max() > 1e-3 * without.abs().max()
    assert_close(run_ours(ours, IDS), expected, tolerance(name))
    assert {layer.config for layer in lora.lora_layers(ours).values()} == {choice}
    lora.merge(ours)
    assert_close(run_ours(ours, IDS), run_theirs(theirs.merge_and_unload(), IDS, ours), tolerance(name))


def test_a_fused_matrix_by_hand(tmp_path: Path) -> None:
    """GPT-2's queries and values: A matrices concatenated, B matrices block-diagonal."""
    ours, _ = adapted("gpt2", ATTENTION, tmp_path)
    tensors, own = load_file(tmp_path / "adapter" / "adapter_model.safetensors"), lora.adapter_state_dict(ours)
    query, value = (f"stack.blocks.1.attention.layer.{name}" for name in ATTENTION)
    stem = "base_model.model.transformer.h.1.attn.c_attn"
    assert tensors[f"{stem}.lora_A.weight"].equal(torch.cat([own[f"{query}.lora_a"], own[f"{value}.lora_a"]]))
    up = tensors[f"{stem}.lora_B.weight"]
    assert up[:40, :3].equal(own[f"{query}.lora_b"])
    assert up[80:, 3:].equal(own[f"{value}.lora_b"])
    assert not up[40:80].any()
    assert not up[:40, 3:].any()
    assert not up[80:, :3].any()
    table = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (table["r"], table["lora_alpha"], table["target_modules"]) == (6, 8, ["c_attn"])  # 8 / 6 is 4 / 3
    assert table["fan_in_fan_out"] is True
    assert table["rank_pattern"] == table["alpha_pattern"] == {}


def test_a_fused_matrix_that_was_never_trained(tmp_path: Path) -> None:
    """With B all zero the chunks cannot be told apart: each of the three gets the whole A matrix."""
    base = make("gpt2")
    base.save_pretrained(tmp_path / "base")
    theirs = peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True))
    theirs.save_pretrained(tmp_path / "adapter")
    ours, _ = gh.load(tmp_path / "base")
    before = run_ours(ours, IDS)
    assert hub.load_adapter(ours, tmp_path / "adapter") == LoRA(4, 8.0, 0.0, ("query", "key", "value"))
    assert run_ours(ours, IDS).equal(before)
    down = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    expected = down["base_model.model.transformer.h.2.attn.c_attn.lora_A.weight"]
    for name in ("query", "key", "value"):
        assert lora.adapter_state_dict(ours)[f"stack.blocks.2.attention.layer.{name}.lora_a"].equal(expected)


def test_module_names_are_short_if_unambiguous(tmp_path: Path) -> None:
    def targets(name: str, *ours: str) -> object:
        place = tmp_path / "-".join((name, *ours))
        adapted(name, ours, place)
        return json.loads((place / "adapter" / "adapter_config.json").read_text())["target_modules"]

    assert targets("llama", "query", "out") == ["o_proj", "q_proj"]
    assert targets("gpt2", "out", "down") == ["c_proj"]
    assert targets("gpt2", "down") == [f"transformer.h.{i}.mlp.c_proj" for i in range(3)]
    assert targets("bert-bare", "up") == [f"encoder.layer.{i}.intermediate.dense" for i in range(3)]
    # Every dense of the blocks, but the head and the pooler have one, too.
    assert len(targets("bert-masked", "out", "up", "down")) == 9  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"peft_type": "IA3"}, "peft_type = 'IA3'"),
        ({"use_dora": True}, "use_dora = True, which is not supported"),
        ({"bias": "all"}, "bias = 'all'"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights = 'pissa'"),
        ({"strange": 3}, "strange = 3"),
        ({"r": 5}, r"a rank of 5 need \[5, 48\] and \[48, 5\]"),
        ({"r": "many"}, "r = 'many', but it must be an integer"),
        ({"rank_pattern": {"(a+)+": 3}}, "rank_pattern whose keys are not all module names"),
        ({"lora_alpha": -1.0}, "is not a valid LoRA config: lora.alpha is -1.0"),
        ({"lora_dropout": 1.5}, "is not a valid LoRA config: lora.dropout is 1.5"),
    ],
    ids=str,
)
def test_a_config_that_is_not_plain_lora(changes: dict[str, Any], sentence: str, saved: Path, folder: Path) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    refused(saved, folder, sentence)


STEM = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({f"{STEM}.lora_B.weight": None}, f"lacks {STEM}.lora_B.weight"),
        ({f"{STEM}.lora_A.weight": torch.ones(3, 7)}, r"shapes \[3, 7\] and \[48, 3\]"),
        ({f"{STEM}.lora_A.weight": torch.ones(3, 48, dtype=torch.int8)}, "not a floating-point matrix"),
        ({f"{STEM}.lora_magnitude_vector": torch.ones(48)}, "lora_magnitude_vector, which is not a LoRA weight"),
        (
            {f"base_model.model.lm_head.lora_{end}.weight": torch.ones(3, 3) for end in "AB"},
            "LoRA weights of lm_head, which is not a linear layer in this model's blocks",
        ),
    ],
    ids=["half", "shape", "type", "dora", "head"],
)
def test_tensors_that_do_not_fit(changes: dict[str, Tensor | None], sentence: str, saved: Path, folder: Path) -> None:
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path) | changes
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, path)
    refused(saved, folder, sentence)


@pytest.mark.parametrize("file", ["adapter_config.json", "adapter_model.safetensors"])
def test_a_file_that_is_missing_or_cut_short(file: str, saved: Path, folder: Path) -> None:
    path = folder / file
    path.write_bytes(path.read_bytes()[:-9])
    refused(saved, folder, file)
    path.unlink()
    refused(saved, folder, f"there is no .*{file}")


def refused(saved: Path, folder: Path, sentence: str) -> None:
    """Load an adapter that must be refused, into a model that must not change."""
    model, _ = gh.load(saved / "base")
    before = run_ours(model, IDS)
    with pytest.raises(gh.StoreError, match=sentence):
        hub.load_adapter(model, folder)
    assert not lora.lora_layers(model)
    assert all(weight.requires_grad for weight in model.parameters())
    assert run_ours(model, IDS).equal(before)


def test_what_cannot_be_saved(tmp_path: Path) -> None:
    model = gh.build(gh.preset("tiny-decoder"))
    with pytest.raises(gh.InputError, match="no LoRA to save"):
        hub.save_adapter(model, LoRA(), tmp_path / "adapter", base="b")
    lora.attach(model, LoRA())
    with pytest.raises(gh.InputError, match=r"config is LoRA\(rank=4.* but LoRA\(rank=8.* is attached"):
        hub.save_adapter(model, LoRA(rank=4), tmp_path / "adapter", base="b")
    with pytest.raises(gh.InputError, match="merge it first"):
        hub.load_adapter(model, tmp_path / "adapter")
    strange = gh.build(gh.preset("tiny-decoder", norm_placement="sandwich"))
    lora.attach(strange, LoRA())
    with pytest.raises(gh.ConfigError, match="no transformers family"):
        hub.save_adapter(strange, LoRA(), tmp_path / "adapter", base="b")
    assert not list(tmp_path.iterdir())


def test_a_folder_is_replaced_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, choice = adapted("llama", ATTENTION, tmp_path)
    before = (tmp_path / "adapter" / "adapter_model.safetensors").read_bytes()
    with pytest.raises(gh.StoreError, match="which would be lost"):
        hub.save_adapter(model, choice, tmp_path / "base", base="b")

    def fail(*_: object) -> None:
        raise OSError("no space left on the device")

    monkeypatch.setattr(gh.store, "write_tensors", fail)
    with pytest.raises(OSError, match="no space"):
        hub.save_adapter(model, choice, tmp_path / "adapter", base="b")
    assert (tmp_path / "adapter" / "adapter_model.safetensors").read_bytes() == before


def test_a_model_with_lora_attached_is_not_saved_as_a_whole_one(tmp_path: Path) -> None:
    model = gh.build(gh.preset("tiny-decoder"))
    gh.save(model, None, tmp_path / "model")
    lora.attach(model, LoRA(rank=2))
    with pytest.raises(gh.InputError, match="LoRA attached"):
        gh.save(model, None, tmp_path / "model")
    gh.load(tmp_path / "model")
