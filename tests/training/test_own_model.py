"""`gh.train(run, model=...)`: a model built or edited in Python in place of the one of the settings."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import glasshouse as gh
from glasshouse.errors import InputError

TEXT = "to be or not to be, that is the question. " * 50


@pytest.fixture
def tok() -> gh.Tokenizer:
    return gh.Tokenizer.train(texts=[TEXT], vocab_size=270)


@pytest.fixture
def table(tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "a.txt").write_text(TEXT)
    train = {"steps": 3, "batch_tokens": 64, "out": str(tmp_path / "run")}
    return {"model": {"preset": "gpt2"}, "data": {"path": str(tmp_path / "a.txt"), "seq_len": 16}, "train": train}


def make_model(tok: gh.Tokenizer) -> gh.models.Decoder:
    torch.manual_seed(3)
    model = gh.build(gh.preset("tiny-decoder", vocab_size=len(tok), max_len=16))
    assert isinstance(model, gh.models.Decoder)
    return model


def with_another_module(model: gh.models.Decoder) -> gh.models.Decoder:
    feedforward = model.stack.blocks[0].feedforward.layer
    feedforward.down = nn.Sequential(feedforward.down, nn.Linear(64, 64))
    return model


def train(table: dict[str, Any], **given: Any) -> gh.training.Result:  # noqa: ANN401
    return gh.train(gh.Run.from_dict(table), progress=False, **given)


def test_it_is_trained_as_the_same_model_from_a_folder(
    tmp_path: Path, table: dict[str, Any], tok: gh.Tokenizer
) -> None:
    model = make_model(tok)
    gh.save(model, tok, tmp_path / "model")
    result = train(table, model=(model, tok))
    table["model"] = {"from": str(tmp_path / "model")}
    table["train"]["out"] = str(tmp_path / "other")
    expected = train(table)
    for name, weight in expected.model.state_dict().items():
        assert torch.equal(result.model.state_dict()[name], weight), name
    kept = gh.Run.load(tmp_path / "run")
    assert kept.model.to_dict()["d_model"] == model.spec.d_model  # run.toml says what was trained


def test_edited_weights_are_what_training_starts_from(table: dict[str, Any], tok: gh.Tokenizer) -> None:
    model = make_model(tok)
    with torch.no_grad():
        model.stack.blocks[1].attention.layer.out.weight.zero_()
    table["train"] |= {"freeze": ["stack.blocks.1.attention"], "steps": 1}
    result = train(table, model=(model, tok))
    assert isinstance(result.model, gh.models.Decoder)
    assert not result.model.stack.blocks[1].attention.layer.out.weight.any()
    assert result.model.stack.blocks[0].attention.layer.out.weight.any()


def test_it_is_resumed(table: dict[str, Any], tok: gh.Tokenizer) -> None:
    first = train(table, model=(make_model(tok), tok))
    again = train(table, model=(make_model(tok), tok))
    for name, weight in first.model.state_dict().items():
        assert torch.equal(again.model.state_dict()[name], weight), name
    with pytest.raises(gh.GlasshouseError, match="other settings"):
        train(table)


def test_data_of_ids_need_no_tokenizer(table: dict[str, Any], tok: gh.Tokenizer) -> None:
    ids = [torch.arange(number, number + 12) for number in range(20)]
    assert train(table, model=make_model(tok), dataset=ids).model.spec.vocab_size == len(tok)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda tok: make_model(tok), "has no tokenizer"),
        (lambda tok: nn.Linear(2, 2), "model is a Linear"),
        (lambda tok: (with_another_module(make_model(tok)), tok), "feedforward.layer.down"),
        (lambda tok: (make_model(tok), gh.Tokenizer.train(texts=["a rose"], vocab_size=264)), "tokenizer"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_written(
    make: Callable[[gh.Tokenizer], Any], message: str, table: dict[str, Any], tok: gh.Tokenizer, tmp_path: Path
) -> None:
    made = make(tok)
    if isinstance(made, tuple):
        made[0].tokenizer_fingerprint = tok.fingerprint
    with pytest.raises(InputError, match=message):
        train(table, model=made)
    assert not (tmp_path / "run").exists()


def test_minutes_choose_a_model_of_their_own(table: dict[str, Any], tok: gh.Tokenizer, tmp_path: Path) -> None:
    run = gh.Run.load("stdlib", "train.minutes=1", f"train.out={tmp_path}/run")
    with pytest.raises(InputError, match="minutes"):
        gh.train(run, progress=False, model=(make_model(tok), tok))
