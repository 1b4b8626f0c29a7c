"""Parity with transformers for every family and variant: load, export, KV cache, round trip."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from hub.hf_models import CASES, Float64Softmax, make
from torch import Tensor
from transformers.models.gemma2 import modeling_gemma2

import glasshouse as gh
from glasshouse import hub
from glasshouse.models import Encoder, Model, Seq2Seq

LENGTHS = torch.tensor([13, 8, 1])
TARGET_LENGTHS = torch.tensor([9, 4, 2])


@pytest.fixture(params=CASES)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def theirs(name: str, monkeypatch: pytest.MonkeyPatch) -> hf.PreTrainedModel:
    monkeypatch.setattr(modeling_gemma2, "torch", Float64Softmax())
    return make(name)


@pytest.fixture
def folder(theirs: hf.PreTrainedModel, tmp_path: Path) -> Path:
    theirs.save_pretrained(tmp_path / "theirs")
    return tmp_path / "theirs"


def draw(model: Model, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Draw ids, padded with the model's pad_id if it has one, and return which are not padding."""
    size = model.spec.vocab_size
    ids = torch.randint(3, size - 1, (len(lengths), int(lengths.max())))
    real = torch.arange(ids.shape[1]) < lengths[:, None]
    pad = 0 if model.spec.pad_id is None else model.spec.pad_id
    return torch.where(real, ids, pad), real


@torch.no_grad()
def run_theirs(theirs: hf.PreTrainedModel, ours: Model, ids: Tensor, real: Tensor, *target: Tensor) -> list[Tensor]:
    """Return the output, then the hidden states before every block and after the last, of all stacks."""
    kwargs: dict[str, Any] = {"input_ids": ids, "attention_mask": real.long(), "output_hidden_states": True}
    if target:
        kwargs |= {"decoder_input_ids": target[0], "decoder_attention_mask": target[1].long()}
    elif isinstance(ours, Encoder) and ours.spec.n_segments > 1:
        kwargs["token_type_ids"] = (torch.arange(ids.shape[1]) > 4).long().expand_as(ids)
    out = theirs(**kwargs)
    result = out.logits if hasattr(out, "logits") else out.last_hidden_state
    if target:
        return [result, *out.encoder_hidden_states, *out.decoder_hidden_states]
    return [result, *out.hidden_states]


@torch.no_grad()
def run_ours(ours: Model, ids: Tensor, real: Tensor, *target: Tensor) -> list[Tensor]:
    seen: list[Tensor] = []
    stacks = [ours.encoder, ours.decoder] if isinstance(ours, Seq2Seq) else [ours.stack]
    hooks = []
    for stack in stacks:
        hooks += [b.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0])) for b in stack.blocks]
        hooks += [stack.register_forward_hook(lambda _, inputs, output: seen.append(output))]
    kwargs: dict[str, Tensor] = {"lengths": real.sum(1)}
    if target:
        kwargs["target_lengths"] = target[1].sum(1)
    elif isinstance(ours, Encoder) and ours.spec.n_segments > 1:
        kwargs["segments"] = (torch.arange(ids.shape[1]) > 4).long().expand_as(ids)
    result = ours(ids, *target[:1], **kwargs)
    for hook in hooks:
        hook.remove()
    return [result, *seen]


def assert_equal(theirs: list[Tensor], ours: list[Tensor], tolerance: float, source: Tensor, target: Tensor) -> None:
    """Compare tokens that are not padding, relative to the largest entry."""
    assert len(theirs) == len(ours)
    for a, b in zip(theirs, ours, strict=True):
        assert a.dtype == b.dtype
        assert a.shape == b.shape
        if a.dim() == 3:
            real = source if a.shape[1] == source.shape[1] else target
            a, b = a[real], b[real]
        assert (a - b).abs().max() <= tolerance * a.abs().max()


@pytest.mark.few(39)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
def test_logits_and_hidden_states_equal(
    name: str, theirs: hf.PreTrainedModel, folder: Path, dtype: torch.dtype
) -> None:
    ours, tok = gh.load(folder, dtype=dtype)
    assert tok is None
    assert not ours.training
    inputs = draw(ours, LENGTHS)
    if isinstance(ours, Seq2Seq):
        inputs += draw(ours, TARGET_LENGTHS)
    expected = run_theirs(theirs.to(dtype), ours, *inputs)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-6 if CASES[name].drops else 1e-10
    assert_equal(expected, run_ours(ours, *inputs), tolerance, inputs[1], inputs[-1])


@pytest.mark.few(12)
@torch.no_grad()
@pytest.mark.parametrize("name", [name for name in CASES if "bert" not in name and "labels" not in name])
def test_cached_token_by_token(theirs: hf.PreTrainedModel, folder: Path) -> None:
    ours, _ = gh.load(folder)
    ids, _ = draw(ours, torch.tensor([12, 12]))
    if isinstance(ours, Seq2Seq):
        target, real = draw(ours, torch.tensor([9, 9]))
        expected = run_theirs(theirs, ours, ids, torch.ones_like(ids), target, real)[0]
        cache = ours.make_cache(2, 9, 12)
        steps = [ours(ids if t == 0 else None, target[:, t : t + 1], cache=cache) for t in range(9)]
    else:
        expected = run_theirs(theirs, ours, ids, torch.ones_like(ids))[0]
        cache = ours.make_cache(2, 12)
        steps = [ours(ids[:, t : t + 1], cache=cache) for t in range(12)]
    assert (torch.cat(steps, 1) - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.slow
def test_exported_models_load_in_transformers(folder: Path, tmp_path: Path) -> None:
    ours, _ = gh.load(folder)
    hub.export(ours, None, tmp_path / "exported")
    table = json.loads((tmp_path / "exported" / "config.json").read_text())
    back, info = getattr(hf, table["architectures"][0]).from_pretrained(
        tmp_path / "exported", output_loading_info=True
    )
    assert not info["unexpected_keys"]
    assert not info["mismatched_keys"]
    unread = ("pooler.dense.weight", "pooler.dense.bias", "cls.predictions.bias", "lm_head.bias")
    assert all(
        key.endswith(unread) for key in info["missing_keys"]
    )  # BERT's and RoBERTa's, unused in the forward pass
    inputs = draw(ours, LENGTHS)
    if isinstance(ours, Seq2Seq):
        inputs += draw(ours, TARGET_LENGTHS)
    expected = run_theirs(back.eval(), ours, *inputs)
    assert_equal(expected, run_ours(ours, *inputs), 1e-5, inputs[1], inputs[-1])


@pytest.mark.few(8)
@pytest.mark.slow
def test_saved_models_come_back_bit_for_bit(folder: Path, tmp_path: Path) -> None:
    ours, _ = gh.load(folder)
    gh.save(ours, None, tmp_path / "saved")
    back, _ = gh.load(tmp_path / "saved")
    assert back.spec == ours.spec
    assert back.state_dict().keys() == ours.state_dict().keys()
    for key, tensor in ours.state_dict().items():
        assert tensor.equal(back.state_dict()[key])
