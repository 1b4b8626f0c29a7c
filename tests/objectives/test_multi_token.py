"""Multi-token prediction: the loss by a slow reference, accepted drafts, and what a run saves."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import glasshouse as gh
from glasshouse import ConfigError, InputError, config
from glasshouse.data import Batch
from glasshouse.generation import DraftHeads
from glasshouse.models.surgery import with_draft_heads
from glasshouse.objectives import CausalLM, MultiToken
from glasshouse.objectives.multi_token import accepted_drafts, shifted

SAYING = "to be or not to be, that is the question whether it is nobler. "


def make_batch(seed: int, rows: int, length: int, vocab_size: int, documents: bool) -> Batch:
    rng = torch.Generator().manual_seed(seed)
    ids = torch.randint(vocab_size, (rows, length + 1), generator=rng)
    starts = torch.rand(rows, length, generator=rng) < 0.3
    mask = torch.rand(rows, length, generator=rng) < 0.8
    return Batch(ids[:, :-1], ids[:, 1:], mask, starts.cumsum(1) if documents else None)


def further(batch: Batch, row: int, position: int, distance: int) -> int | None:
    """Return the target `distance` tokens after the next one; None if it does not count."""
    at = position + distance
    if at >= batch.ids.shape[1] or not batch.loss_mask[row, at]:
        return None
    if batch.documents is not None and batch.documents[row, at] != batch.documents[row, position]:
        return None
    return int(batch.targets[row, at])


def slow_loss(model: gh.models.Decoder, batch: Batch, weight: float) -> float:
    """One position, one head and one logit after the other."""
    hidden: list[Tensor] = []
    handle = model.head.register_forward_pre_hook(lambda _, inputs: hidden.append(inputs[0]))
    batch.forward(model)
    handle.remove()
    unembedding = model.get_parameter("head.weight")
    maps = [lambda x: x, *model.head.drafts]  # type: ignore[misc]
    total = 0.0
    for distance, change in enumerate(maps):
        sums = 0.0
        for row in range(len(batch.ids)):
            for position in range(batch.ids.shape[1]):
                if (target := further(batch, row, position, distance)) is not None:
                    logits = (unembedding @ change(hidden[0][row, position])).tolist()
                    top = max(logits)
                    sums += top + math.log(math.fsum(math.exp(one - top) for one in logits)) - logits[target]
        total += sums if distance == 0 else weight / (len(maps) - 1) * sums
    return total


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("n", [2, 4])
def test_loss_equals_the_slow_reference(n: int, documents: bool) -> None:
    torch.manual_seed(n)
    # With default weights, attention adds nothing yet.
    plain = gh.build(gh.preset("tiny-decoder", vocab_size=17, n_layers=1, init="normal")).double().eval()
    model = with_draft_heads(plain, n - 1)
    batch = make_batch(n, rows=2, length=7, vocab_size=17, documents=documents)
    with torch.no_grad():
        loss = float(MultiToken(n=n, weight=0.7).loss(model, batch))
        expected = slow_loss(model, batch, 0.7)
        next_token = float(CausalLM().loss(model, batch))
        light = float(MultiToken(n=n, weight=1e-300).loss(model, batch))
    assert loss == pytest.approx(expected, rel=1e-12)
    assert loss > next_token == pytest.approx(light, rel=1e-12)


def test_the_loss_trains_trunk_and_heads() -> None:
    model = with_draft_heads(gh.build(gh.preset("tiny-decoder", vocab_size=17, init="normal")), 2)
    MultiToken(n=3).loss(model, make_batch(0, 2, 7, 17, documents=True)).backward()
    for name, weight in model.named_parameters():
        assert weight.grad is not None, name
        assert weight.grad.abs().sum() > 0, name


@given(seed=st.integers(0, 2**31), length=st.integers(1, 9), n_drafts=st.integers(1, 4), documents=st.booleans())
def test_accepted_drafts_equal_the_slow_reference(seed: int, length: int, n_drafts: int, documents: bool) -> None:
    batch = make_batch(seed, 2, length, vocab_size=3, documents=documents)
    rng = torch.Generator().manual_seed(seed)
    own = torch.randint(2, (2, length), generator=rng)
    drafts = torch.randint(2, (n_drafts, 2, length), generator=rng)
    accepted = counted = 0
    for row in range(2):
        for position in range(length):
            going = True
            for distance in range(1, n_drafts + 1):
                there = position + distance
                going = going and there < length and bool(drafts[distance - 1, row, position] == own[row, there])
                if further(batch, row, position, distance) is not None:
                    counted += 1
                    accepted += going
    assert [int(one) for one in accepted_drafts(own, drafts, batch)] == [accepted, counted]


def test_a_distance_beyond_the_sequence_has_no_targets() -> None:
    assert not shifted(make_batch(0, 2, 3, 5, documents=True), 5).loss_mask.any()


def test_metrics_are_those_of_the_next_token_and_the_acceptance_rate() -> None:
    """Heads that repeat the hidden state draft what the model predicts already one position earlier."""
    torch.manual_seed(0)
    model = with_draft_heads(gh.build(gh.preset("tiny-decoder", vocab_size=5, n_layers=1)).eval(), 1)
    assert isinstance(model.head, gh.models.heads.LMHead)
    assert model.head.drafts is not None
    nn.init.zeros_(model.head.drafts[0].project.weight)
    batch = make_batch(1, 4, 20, 5, documents=True)
    sums = MultiToken(n=2).evaluate_batch(model, batch)
    plain = CausalLM().evaluate_batch(model, batch)
    assert sums.metrics() == {**plain.metrics(), "acceptance_rate": sums.metrics()["acceptance_rate"]}
    own = batch.forward(model).argmax(-1)
    mask = shifted(batch, 1).loss_mask[:, :-1]
    assert sums.others["acceptance_rate"] == (int((own[:, :-1] == own[:, 1:])[mask].sum()), int(mask.sum()))
    assert MultiToken().evaluate_batch(with_draft_heads(model, 0), batch).metrics() == plain.metrics()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"n": 1}, "multi_token.n is 1, but it must be at least 2."),
        ({"weight": 0.0}, "multi_token.weight is 0.0, but it must be above 0."),
        ({"weight": math.inf}, "multi_token.weight is inf, but it must be above 0."),
    ],
)
def test_mistakes_are_one_sentence(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        MultiToken(**settings)


def test_draft_heads_need_a_decoder_that_predicts_tokens() -> None:
    with pytest.raises(InputError, match="the model is a encoder with the head masked_token, but draft heads need"):
        with_draft_heads(gh.build(gh.preset("tiny-encoder")), 2)
    with pytest.raises(ConfigError, match=r"next_token\.n_draft_heads is -1, but it must be 0 or more"):
        gh.preset("tiny-decoder", head={"kind": "next_token", "n_draft_heads": -1})


# What a plain model is, does not change.


def test_a_plain_model_has_no_trace_of_draft_heads() -> None:
    plain = gh.build(gh.preset("tiny-decoder"))
    assert not [name for name, _ in plain.named_modules() if "draft" in name]
    assert "n_draft_heads" not in config.dump(plain.spec)["head"]
    drafting = with_draft_heads(plain, 3)
    new = drafting.state_dict().keys() - plain.state_dict().keys()
    assert new == {f"head.drafts.{n}.project.{part}" for n in range(3) for part in ("weight", "bias")}
    assert gh.count_parameters(drafting.spec) == sum(one.numel() for one in drafting.parameters())
    back = with_draft_heads(drafting, 0)
    assert back.spec == plain.spec
    for name, weight in plain.state_dict().items():
        assert torch.equal(back.state_dict()[name], weight)
    ids = torch.tensor([[1, 2, 3]])
    assert torch.equal(drafting(ids), plain(ids))


def test_a_folder_keeps_draft_heads_and_an_export_leaves_them_out(tmp_path: Path) -> None:
    drafting = with_draft_heads(
        gh.build(gh.preset("llama-small", n_layers=1, d_model=64, n_heads=4, n_kv_heads=2)), 2
    )
    gh.save(drafting, None, tmp_path / "model")
    loaded, _ = gh.load(tmp_path / "model")
    assert loaded.spec == drafting.spec
    assert all(torch.equal(loaded.state_dict()[name], weight) for name, weight in drafting.state_dict().items())
    assert gh.hub.export(drafting, None, tmp_path / "exported") == "llama"
    plain, _ = gh.load(tmp_path / "exported")
    assert plain.spec.head == gh.spec.NextToken(tied=plain.spec.head.tied)
    ids = torch.tensor([[1, 2, 3]])
    assert torch.equal(plain(ids), drafting.eval()(ids))


# Runs.


def settings(folder: Path, out: str = "run", **objective: Any) -> dict[str, Any]:  # noqa: ANN401
    if not (path := folder / "a.txt").exists():
        path.write_text(SAYING * 60)
    return {
        "model": {"preset": "tiny-decoder", "n_layers": 1, "dropout": 0.1},
        "data": {"path": str(path), "seq_len": 16, "vocab_size": 270},
        "train": {
            "objective": {"kind": "multi_token", "n": 3, **objective},
            **{"steps": 6, "batch_tokens": 128, "eval_every": 2, "save_every": 2, "grad_accum": 2, "lr": 0.01},
            "out": str(folder / out),
        },
    }


def test_a_run_keeps_its_heads_as_drafts(tmp_path: Path) -> None:
    table = settings(tmp_path)
    table["train"] |= {"steps": 30, "eval_every": 30, "save_every": 30}
    result = gh.train(gh.Run.from_dict(table), progress=False)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert 0 < lines[-1]["validation_acceptance_rate"] <= 1
    assert result.report.metrics["acceptance_rate"] > 0
    model, tok = gh.load(tmp_path / "run")
    assert isinstance(model, gh.models.Decoder)
    assert model.spec.head == gh.spec.NextToken(tied=False, n_draft_heads=2)  # untied, as that of the preset
    drafted = gh.generate(model, tok, "to be", 12, speculator=DraftHeads(model))[0]
    assert drafted.ids == gh.generate(model, tok, "to be", 12)[0].ids


@pytest.mark.long
def test_a_run_may_drop_its_heads(tmp_path: Path) -> None:
    """The model is one without them: by its spec, its tensors and what it predicts; checkpoints keep them."""
    gh.train(gh.Run.from_dict(settings(tmp_path, "kept")), progress=False)
    result = gh.train(gh.Run.from_dict(settings(tmp_path, "dropped", keep=False)), progress=False)
    assert "acceptance_rate" not in result.report.metrics
    kept, dropped = (gh.load(tmp_path / name)[0] for name in ("kept", "dropped"))
    assert dropped.spec.head == gh.spec.NextToken(tied=False)
    expected = {name: weight for name, weight in kept.state_dict().items() if "draft" not in name}
    assert expected.keys() == dropped.state_dict().keys()
    assert all(torch.equal(dropped.state_dict()[name], weight) for name, weight in expected.items())


@pytest.mark.long
def test_a_resumed_run_is_bit_equal(tmp_path: Path) -> None:
    class Stop(gh.training.Callback):
        def on_step_end(self, trainer: Any, step: int, metrics: dict[str, Any]) -> None:  # noqa: ANN401
            if step == 3:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        gh.train(gh.Run.from_dict(settings(tmp_path, "stopped")), progress=False, callbacks=[Stop()])
    gh.train(gh.Run.from_dict(settings(tmp_path, "stopped")), progress=False)
    gh.train(gh.Run.from_dict(settings(tmp_path, "whole")), progress=False)
    one, other = (gh.load(tmp_path / name)[0].state_dict() for name in ("stopped", "whole"))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_pretrained_decoder_gets_heads(tmp_path: Path) -> None:
    plain = settings(tmp_path, "plain")
    del plain["train"]["objective"]
    gh.train(gh.Run.from_dict(plain), progress=False)
    table = settings(tmp_path, "finetuned", n=2) | {"model": {"from": str(tmp_path / "plain")}}
    gh.train(gh.Run.from_dict(table), progress=False)
    assert gh.load(tmp_path / "finetuned")[0].spec.head == gh.spec.NextToken(tied=False, n_draft_heads=1)
