"""Contrastive pairs: the loss by hand and by a slow reference, recall at 1, and training an encoder end to end."""

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
from torch import Tensor

import glasshouse as gh
from glasshouse import ConfigError, InputError
from glasshouse.data import ContrastiveDataset, PairBatch
from glasshouse.objectives import Contrastive, find_objective
from glasshouse.objectives.contrastive import PairSums, contrastive_loss

NAMES = ("ash", "birch", "cedar", "elm", "fir", "gum", "hazel", "ivy", "jade", "kelp")


def slow_loss(pairs: list[list[list[float]]], numbers: list[list[int]], temperature: float) -> float:
    """Sum over pairs of the mean of the two cross-entropies, one candidate at a time."""

    def cosine(a: list[float], b: list[float]) -> float:
        return math.fsum(x * y for x, y in zip(a, b, strict=True)) / math.hypot(*a) / math.hypot(*b)

    total = 0.0
    for i, (text, match) in enumerate(pairs):
        candidates = [j for j in range(len(pairs)) if j == i or not {*numbers[i]} & {*numbers[j]}]
        own = cosine(text, match) / temperature
        to_matches = [math.exp(cosine(text, pairs[j][1]) / temperature - own) for j in candidates]
        to_texts = [math.exp(cosine(pairs[j][0], match) / temperature - own) for j in candidates]
        total += (math.log(math.fsum(to_matches)) + math.log(math.fsum(to_texts))) / 2
    return total


@given(
    seed=st.integers(0, 2**31),
    n=st.integers(1, 12),
    width=st.integers(2, 9),
    temperature=st.sampled_from([0.05, 0.5, 1.0]),
    n_texts=st.integers(1, 24),
)
def test_loss_equals_the_slow_reference(seed: int, n: int, width: int, temperature: float, n_texts: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    pairs = torch.randn(n, 2, width, generator=rng, dtype=torch.float64)
    numbers = torch.randint(n_texts, (n, 2), generator=rng)  # few texts: many pairs share one
    loss = contrastive_loss(pairs, numbers, torch.ones(n, dtype=torch.bool), temperature)
    expected = slow_loss(pairs.tolist(), numbers.tolist(), temperature)
    # A sum of n terms of at most 2 / temperature + log n.
    assert float(loss) == pytest.approx(expected, abs=1e-12 * n * (2 / temperature + 3))


def test_pairs_that_share_a_text_are_no_negatives() -> None:
    """The second pair has the match of the first; the third has the first's text as its match; the fourth neither."""
    rng = torch.Generator().manual_seed(0)
    pairs = torch.randn(4, 2, 5, generator=rng, dtype=torch.float64)
    counted = torch.tensor([True, False, False, False])
    numbers = torch.tensor([[1, 2], [3, 2], [4, 1], [5, 6]])
    loss = contrastive_loss(pairs, numbers, counted, 0.5)
    alone = contrastive_loss(pairs[[0, 3]], numbers[[0, 3]], counted[[0, 1]], 0.5)
    assert torch.equal(loss, alone)
    distinct = contrastive_loss(pairs, torch.arange(8).view(4, 2), counted, 0.5)
    assert distinct > loss


def test_gradient_of_the_loss() -> None:
    pairs = torch.randn(5, 2, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64, requires_grad=True)
    numbers = torch.tensor([[1, 2], [3, 2], [4, 1], [5, 6], [7, 8]])

    def loss(pairs: Tensor) -> Tensor:
        return contrastive_loss(pairs, numbers, torch.ones(5, dtype=torch.bool), 0.3)

    assert torch.autograd.gradcheck(loss, (pairs,))


def test_recall_is_among_all_batches_and_a_copy_of_the_match_counts() -> None:
    """Texts 0 and 1 find their match, 2 a copy of its match, 3 that of another; lengths of vectors do not matter."""
    e = torch.eye(4)
    texts, matches = torch.stack([e[0] + e[1] / 5, e[1], e[2], e[0]]), torch.stack([e[0] / 10, e[1], e[3], e[2]])
    pairs, numbers = torch.stack([texts, matches], 1), torch.tensor([[1, 10], [2, 11], [3, 12], [4, 12]])
    parts = [PairSums(1.0, n_targets=2, pairs=(pairs[at],), numbers=(numbers[at],)) for at in ([0, 1], [2, 3])]
    total = parts[0] + parts[1]
    assert isinstance(total, PairSums)
    assert total.nearest().tolist() == [0, 1, 3, 0]
    assert total.metrics() == {"loss": 0.5, "recall_at_1": 0.75}


@pytest.mark.parametrize("temperature", [0.0, -1.0, math.inf, math.nan])
def test_a_temperature_that_is_not_one(temperature: float) -> None:
    with pytest.raises(ConfigError, match=r"contrastive\.temperature is .*, but it must be above 0\."):
        Contrastive(temperature)


# The samples.


def write_pairs(path: Path, pairs: list[tuple[str, str]]) -> Path:
    path.write_text("source\ttarget\n" + "".join(f"{text}\t{match}\n" for text, match in pairs))
    return path


@pytest.fixture
def tok() -> gh.Tokenizer:
    return gh.Tokenizer.train(texts=["x"], vocab_size=263)


@pytest.fixture
def corpus(tmp_path: Path, tok: gh.Tokenizer) -> gh.data.Corpus:
    pairs = [("one", "1"), ("uno", "1"), ("three", "3"), ("3", "III"), ("a longer text", "5")]
    return gh.data.prepare(write_pairs(tmp_path / "a.tsv", pairs), tok, tmp_path / "ids", kind="pairs")


def test_texts_are_encoded_as_embed_does(corpus: gh.data.Corpus, tok: gh.Tokenizer) -> None:
    samples = ContrastiveDataset(corpus, 5, max_len=16)
    batch = samples.batch(range(5))
    assert isinstance(batch, PairBatch)
    assert batch.lengths is not None
    model = gh.build(gh.preset("tiny-encoder", vocab_size=263, head="pooled")).eval()
    model.tokenizer_fingerprint = tok.fingerprint
    texts = [tok.decode(ids[:length]) for ids, length in zip(batch.ids, batch.lengths, strict=True)]
    assert {*zip(texts[::2], texts[1::2], strict=True)} == {
        *(("one", "1"), ("uno", "1"), ("three", "3"), ("3", "III"), ("a longer text", "5"))
    }
    with torch.no_grad():
        torch.testing.assert_close(batch.forward(model), gh.embed(model, tok, texts))


def test_equal_texts_have_equal_numbers_in_any_batch(corpus: gh.data.Corpus, tok: gh.Tokenizer) -> None:
    samples = ContrastiveDataset(corpus, 1, max_len=16)
    numbers: dict[str, set[int]] = {}
    for index in range(5):
        batch = samples.batch([index])
        assert batch.lengths is not None
        for ids, length, number in zip(batch.ids, batch.lengths, batch.targets.flatten().tolist(), strict=True):
            numbers.setdefault(tok.decode(ids[:length]), set()).add(number)
    assert all(len(one) == 1 for one in numbers.values())
    assert len(numbers) == len({*map(min, numbers.values())}) == 8  # "1" and "3" are there twice


def test_long_pairs_are_dropped_and_empty_texts_are_refused(
    corpus: gh.data.Corpus, tok: gh.Tokenizer, tmp_path: Path
) -> None:
    assert ContrastiveDataset(corpus, 1, max_len=5).n_too_long == 1
    pairs = write_pairs(tmp_path / "b.tsv", [("one", "1"), ("two", "")])
    empty = gh.data.prepare(pairs, tok, tmp_path / "empty", kind="pairs")
    with pytest.raises(InputError, match=r"item 1 of .*b\.tsv has an empty text, which has nothing to embed; remove"):
        ContrastiveDataset(empty, 1, max_len=16)


# Runs.


def settings(folder: Path, out: str = "run", **train: Any) -> dict[str, Any]:  # noqa: ANN401
    if not (path := folder / "pairs.tsv").exists():  # a changed file is other data
        write_pairs(path, [(f"{a} and {b}", f"{b}, {a}") for a in NAMES for b in NAMES])
    return {
        "model": {"preset": "tiny-encoder", "n_layers": 1, "dropout": 0.1},
        "data": {"path": str(path), "seq_len": 24, "vocab_size": 270},
        "train": {
            "objective": {"kind": "contrastive", "temperature": 0.1},
            **{"steps": 6, "batch_tokens": 200, "eval_every": 2, "save_every": 2, "lr": 0.003},
            "out": str(folder / out),
            **train,
        },
    }


def test_a_run_trains_an_encoder_that_embeds_once_loaded(tmp_path: Path) -> None:
    """The data need no kind: the objective has one. The head of the preset is replaced by its pooling."""
    result = gh.train(gh.Run.from_dict(settings(tmp_path, steps=16)), progress=False)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["validation_recall_at_1"] == pytest.approx(result.report.metrics["recall_at_1"])
    assert lines[-1]["n_targets"] == lines[0]["n_targets"] > 1  # pairs
    assert lines[-1]["validation_loss"] < lines[1]["validation_loss"]
    assert result.report.metrics.keys() == {"loss", "recall_at_1"}
    model, tok = gh.load(tmp_path / "run")
    assert isinstance(model, gh.models.Encoder)
    assert tok is not None
    assert model.spec.head == gh.spec.Pooled("mean")
    corpus = result.datasets.validation
    pairs = [[tok.decode(part) for part in corpus.item(item)] for item in range(len(corpus))]
    texts, matches = (gh.embed(model, tok, side) for side in zip(*pairs, strict=True))
    found = torch.nn.functional.cosine_similarity(texts[:, None], matches[None], dim=-1).argmax(1)
    recall = (found == torch.arange(len(pairs))).double().mean()
    assert float(recall) == result.report.metrics["recall_at_1"]
    for example in result.report.examples:
        at = [text for text, _ in pairs].index(example.input)
        assert [example.input, example.reference] == pairs[at]
        assert example.prediction == pairs[int(found[at])][1]
    # The model and the data alone decide the same objective.
    assert find_objective(model.spec, corpus) == Contrastive()
    assert gh.evaluate(model, tok, corpus).metrics["recall_at_1"] == float(recall)


def test_a_resumed_run_is_bit_equal(tmp_path: Path) -> None:
    class Stop(gh.training.Callback):
        def on_step_end(self, trainer: Any, step: int, metrics: dict[str, Any]) -> None:  # noqa: ANN401
            if step == 3:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        gh.train(gh.Run.from_dict(settings(tmp_path, "stopped")), progress=False, callbacks=[Stop()])
    assert not (tmp_path / "stopped" / "model").exists()
    gh.train(gh.Run.from_dict(settings(tmp_path, "stopped")), progress=False)
    gh.train(gh.Run.from_dict(settings(tmp_path, "whole")), progress=False)
    one, other = (gh.load(tmp_path / name)[0].state_dict() for name in ("stopped", "whole"))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    logs = [(tmp_path / name / "metrics.jsonl").read_text().splitlines() for name in ("stopped", "whole")]
    for left, right in zip(*logs, strict=True):
        drop = {"tokens_per_second"}
        assert {k: v for k, v in json.loads(left).items() if k not in drop} == {
            k: v for k, v in json.loads(right).items() if k not in drop
        }


def test_a_pretrained_encoder_keeps_its_pooling_and_its_weights(tmp_path: Path, tok: gh.Tokenizer) -> None:
    """One step at a learning rate of almost 0: the weights are those of the base, whose head is dropped."""
    for head, pooling in (("masked_token", "mean"), ({"kind": "pooled", "pooling": "first"}, "first")):
        base = gh.build(gh.preset("tiny-encoder", vocab_size=263, head=head))
        gh.save(base, tok, tmp_path / pooling)
        table = settings(tmp_path, f"run-{pooling}", steps=1, lr=1e-12)
        gh.train(gh.Run.from_dict(table | {"model": {"from": str(tmp_path / pooling)}}), progress=False)
        model, _ = gh.load(tmp_path / f"run-{pooling}")
        assert model.spec.head == gh.spec.Pooled(pooling)
        known = base.state_dict()
        for name, weight in model.state_dict().items():
            torch.testing.assert_close(weight, known[name], atol=1e-9, rtol=0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"grad_accum": 2},
            "train.grad_accum is 2, but the objective contrastive compares all samples of a step with each other; "
            "leave it out, and lower train.batch_tokens if memory runs out.",
        ),
        (
            {"label_smoothing": 0.1},
            "train.label_smoothing is 0.1, but contrastive pairs have no labels to smooth; leave it out.",
        ),
        ({"objective": {"kind": "contrastiv"}}, "train.objective.kind is 'contrastiv', but it must be one of"),
    ],
)
def test_settings_that_do_not_go_with_it(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(gh.GlasshouseError, match=re.escape(message)):
        gh.train(gh.Run.from_dict(settings(tmp_path, **changes)), progress=False)


def test_another_model_is_refused(tmp_path: Path) -> None:
    table = settings(tmp_path) | {"model": {"preset": "tiny-decoder"}}
    with pytest.raises(InputError, match="which trains text encoders, but the model is of kind decoder"):
        gh.train(gh.Run.from_dict(table), progress=False)


def test_a_step_that_does_not_fit_is_not_split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def loss(self: Contrastive, model: Any, batch: Any, smoothing: float = 0.0) -> Tensor:  # noqa: ANN401
        raise MemoryError

    monkeypatch.setattr(Contrastive, "loss", loss)
    with pytest.raises(InputError, match=r"out of memory with \d+ samples of up to 24 tokens, which the objective"):
        gh.train(gh.Run.from_dict(settings(tmp_path)), progress=False)
