"""Direct preference optimisation: its loss by hand and against a slow reference, its data, metrics and runs."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import glasshouse as gh
from glasshouse import ConfigError, InputError
from glasshouse.data import Corpus, PreferenceBatch, PreferenceDataset
from glasshouse.errors import StoreError
from glasshouse.objectives import DPO, find_objective
from glasshouse.training import Callback, Run, Trainer

PAIRS = [
    {"prompt": f"{a} plus {b} is", "chosen": f" {a + b}", "rejected": f"or {a + b + 1}"}  # no token in common
    for a in range(8)
    for b in range(8)
]


def write(path: Path, records: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    folder = tmp_path_factory.mktemp("preferences")
    tok = gh.Tokenizer.train(texts=["plus is or so"], vocab_size=266)
    return gh.data.prepare(write(folder / "a.jsonl", PAIRS), tok, folder / "ids")


def decoder(seed: int, vocab_size: int = 266) -> Any:  # noqa: ANN401 - a Model
    torch.manual_seed(seed)
    return gh.build(gh.preset("tiny-decoder", n_layers=1, vocab_size=vocab_size)).double()


def prepared(choice: DPO, reference: nn.Module, corpus: Corpus) -> DPO:
    return choice.prepare(reference, corpus, 64)  # type: ignore[arg-type]


def slow_margins(
    model: nn.Module, reference: nn.Module | None, corpus: Corpus, items: list[int], beta: float
) -> Tensor:
    """The margins of items of a corpus, one token at a time, without padding."""
    margins = []
    for item in items:
        prompt, chosen, rejected = (part.tolist() for part in corpus.item(item))
        rewards = []
        for answer in (chosen, rejected):
            reward = torch.zeros((), dtype=torch.float64)
            for at, token in enumerate(answer):
                context = torch.tensor([prompt + answer[:at]])
                reward = reward + model(context)[0, -1].log_softmax(-1)[token]
                if reference is not None:
                    reward = reward - reference(context)[0, -1].log_softmax(-1)[token].detach()
            rewards.append(beta * reward)
        margins.append(rewards[0] - rewards[1])
    return torch.stack(margins)


def test_loss_of_a_pair_worked_by_hand() -> None:
    # One prompt id 0, answers [1] and [2]; logits are log p of (1/2, 3/8, 1/8) and, of the reference, a third each.
    class Fixed(nn.Module):
        def __init__(self, probabilities: list[float]) -> None:
            super().__init__()
            self.row = nn.Parameter(torch.tensor(probabilities, dtype=torch.float64).log())

        def forward(self, ids: Tensor, **_: object) -> Tensor:
            return self.row.expand(*ids.shape, 3)

    zeros = torch.zeros(2, 1, dtype=torch.long)
    pair = torch.zeros(1, dtype=torch.long)
    batch = PreferenceBatch(zeros, pair, pair == 0, answers=torch.tensor([[1], [2]]), answer_mask=zeros == 0)
    objective = DPO(beta=2.0)
    object.__setattr__(objective, "reference", Fixed([1 / 3, 1 / 3, 1 / 3]))
    # margin = 2 (log 3/8 - log 1/8) = 2 log 3, sigmoid = 9/10
    model = Fixed([1 / 2, 3 / 8, 1 / 8])
    assert objective.loss(model, batch).item() == pytest.approx(-math.log(0.9), abs=1e-12)
    smoothed = -0.75 * math.log(0.9) - 0.25 * math.log(0.1)
    assert objective.loss(model, batch, 0.25).item() == pytest.approx(smoothed, abs=1e-12)
    sums = objective.evaluate_batch(model, batch)
    assert sums.metrics() == pytest.approx(
        {
            "loss": -math.log(0.9),
            "accuracy": 1.0,
            "margin": 2 * math.log(3),
            "chosen_loss": math.log(8 / 3),
            "rejected_loss": math.log(8),
        }
    )


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_loss_and_gradient_equal_those_of_a_slow_reference(corpus: Corpus, smoothing: float) -> None:
    model, reference = decoder(0), decoder(1)
    objective, items = prepared(DPO(beta=0.3), reference, corpus), [3, 40, 17]
    batch = PreferenceDataset(corpus, 1, max_len=64)._batch(items)
    loss = objective.loss(model, batch, smoothing)
    margins = slow_margins(model, reference, corpus, items, 0.3)
    expected = -(1 - smoothing) * margins.sigmoid().log() - smoothing * (-margins).sigmoid().log()
    assert loss.item() == pytest.approx(expected.sum().item(), abs=1e-12)
    weights = list(model.parameters())
    for ours, theirs in zip(
        torch.autograd.grad(loss, weights), torch.autograd.grad(expected.sum(), weights), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
    sums = objective.evaluate_batch(model, batch)
    assert sums.n_correct == int((margins > 0).sum())
    assert sums.metrics()["margin"] == pytest.approx(margins.mean().item(), abs=1e-12)


def test_micro_batches_keep_pairs_together(corpus: Corpus) -> None:
    model = decoder(0)
    objective = prepared(DPO(), decoder(1), corpus)
    batch = PreferenceDataset(corpus, 5, max_len=64).batch(range(5))
    for count in (2, 3, 5):
        micro_batches = batch.microbatches(count)
        assert sum(map(len, micro_batches)) == 5
        parts = sum(objective.loss(model, one).item() for one in micro_batches)
        assert parts == pytest.approx(objective.loss(model, batch).item(), abs=1e-12)


def test_a_pair_that_does_not_count_changes_nothing(corpus: Corpus) -> None:
    model, objective = decoder(0), prepared(DPO(), decoder(1), corpus)
    batch = PreferenceDataset(corpus, 2, max_len=64).batch([0, 1])
    first = batch.microbatches(2)[0]
    masked = replace(batch, loss_mask=torch.tensor([True, False]))
    assert objective.loss(model, masked).item() == pytest.approx(objective.loss(model, first).item(), abs=1e-12)
    some, alone = (objective.evaluate_batch(model, one).metrics() for one in (masked, first))
    assert some == pytest.approx(alone, abs=1e-12)


def test_the_untrained_model_is_at_chance(corpus: Corpus) -> None:
    model = decoder(0)
    batch = PreferenceDataset(corpus, 4, max_len=64).batch(range(4))
    metrics = prepared(DPO(), model, corpus).evaluate_batch(model, batch).metrics()
    assert (metrics["loss"], metrics["accuracy"], metrics["margin"]) == (pytest.approx(math.log(2)), 0.5, 0.0)
    # Without a reference, log-probabilities themselves are compared.
    dataset = PreferenceDataset(corpus, 4, max_len=64)
    margins = slow_margins(model, None, corpus, dataset.items(range(4)), 0.1)
    alone = DPO().evaluate_batch(model, batch).metrics()
    assert alone["margin"] == pytest.approx(margins.mean().item(), abs=1e-12)


def test_smoothing_of_one_half_is_refused(corpus: Corpus) -> None:
    batch = PreferenceDataset(corpus, 1, max_len=64).batch([0])
    with pytest.raises(ConfigError, match=r"train\.label_smoothing is 0\.5, but with dpo .* must be below 0\.5"):
        DPO().loss(decoder(0), batch, 0.5)


# Data


def encoded(tmp_path: Path, *records: dict[str, Any], template: bool = True) -> list[list[str]]:
    chosen = {} if template else {"special_tokens": {"eos": "<|endoftext|>"}}
    tok = gh.Tokenizer.train(texts=["plus"], vocab_size=263, **chosen)
    path = write(tmp_path / "b.jsonl", list(records))
    corpus = gh.data.prepare(path, tok, tmp_path / "out", kind="preferences")
    return [[tok.decode(part) for part in corpus.item(number)] for number in range(len(corpus))]


def test_texts_and_messages_are_encoded_alike(tmp_path: Path) -> None:
    user, good, bad = ({"role": role, "content": text} for role, text in (("user", "a"), *[("assistant", "b")] * 2))
    bad = {"role": "assistant", "content": "c"}
    found = encoded(
        tmp_path,
        {"prompt": "a", "chosen": "b", "rejected": "c"},
        {"prompt": [user], "chosen": [good], "rejected": [bad]},
        {"prompt": "a", "chosen": [user, good], "rejected": [user, bad]},
        {"prompt": [user], "chosen": "b", "rejected": "c"},
    )
    assert found == [["<|user|>a<|end|><|assistant|>", "b<|end|>", "c<|end|>"]] * 4


def test_texts_follow_each_other_without_a_chat_template(tmp_path: Path) -> None:
    record = {"prompt": "a ", "chosen": "b", "rejected": "c"}
    assert encoded(tmp_path, record, template=False) == [["a ", "b<|endoftext|>", "c<|endoftext|>"]]


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"prompt": "a", "chosen": "b"}, "has no column 'rejected'"),
        ({"prompt": "a", "chosen": "", "rejected": "c"}, "record 2 of .*: its chosen answer is empty"),
        ({"prompt": "a", "chosen": "b", "rejected": " \n"}, "record 2 of .*: its rejected answer is empty"),
        ({"prompt": "a", "chosen": "b", "rejected": []}, "record 2 of .*: its rejected answer is empty"),
        ({"prompt": "a", "chosen": "b", "rejected": None}, "record 2 of .*: its rejected answer is empty"),
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, "record 2 of .*: .* are the same; remove the record"),
        ({"prompt": 3, "chosen": "b", "rejected": "c"}, "record 2 of .*3"),
        (
            {
                "prompt": "a",
                "chosen": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
                "rejected": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "c"}],
            },
            "record 2 of .*: .* have different prompts",
        ),
    ],
)
def test_a_record_that_is_no_preference_is_refused(tmp_path: Path, record: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message) as raised:
        encoded(tmp_path, PAIRS[0], record)
    assert str(raised.value).count(".") < 5  # one sentence, beside names of files
    assert not (tmp_path / "out" / "manifest.json").exists()


def test_an_empty_prompt_is_refused_without_a_template(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="its prompt is empty"):
        encoded(tmp_path, {"prompt": "", "chosen": "b", "rejected": "c"}, template=False)


def test_pairs_that_are_too_long_are_dropped_and_counted(corpus: Corpus) -> None:
    longest = (corpus.lengths[:, :1] + corpus.lengths[:, 1:]).max(1) - 1
    limit = int(np.median(longest))
    dataset = PreferenceDataset(corpus, 1, max_len=limit)
    assert len(dataset) == int((longest <= limit).sum())
    assert dataset.n_too_long == len(corpus) - len(dataset) > 0
    assert max(dataset.batch([index]).ids.shape[1] for index in range(len(dataset))) <= limit
    with pytest.raises(InputError, match="0 items have at most 3 tokens"):
        PreferenceDataset(corpus, 1, max_len=3)


def test_columns_are_inferred_or_named(tmp_path: Path) -> None:
    renamed = [{"q": one["prompt"], "good": one["chosen"], "bad": one["rejected"]} for one in PAIRS]
    tok = gh.Tokenizer.train(texts=["plus"], vocab_size=263)
    path = write(tmp_path / "a.jsonl", renamed)
    named = gh.data.prepare(path, tok, tmp_path / "a", kind="preferences", columns=["q", "good", "bad"])
    usual = gh.data.prepare(write(tmp_path / "b.jsonl", PAIRS), tok, tmp_path / "b")
    assert usual.kind == "preferences"
    assert all(map(np.array_equal, named.item(5), usual.item(5)))
    with pytest.raises(InputError, match=r"columns is \('q', 'good'\), but preferences has three"):
        gh.data.prepare(path, tok, tmp_path / "c", kind="preferences", columns=["q", "good"])


@pytest.mark.long
def test_the_built_in_preferences_follow_their_rule() -> None:
    found = gh.data.builtin_dataset("preferences")
    items = [found.item("validation", index) for index in range(200)]
    for _, chosen, rejected in items:
        assert chosen in rejected  # the result, and a sentence with it
        assert rejected.endswith(".")
        assert len(rejected.split()) >= len(chosen.split()) + 2
    assert not set(items) & {found.item("train", index) for index in range(2000)}


# Runs


def settings(folder: Path, out: str = "run", **choices: Any) -> Run:  # noqa: ANN401
    path = write(folder / "a.jsonl", PAIRS) if not (folder / "a.jsonl").exists() else folder / "a.jsonl"
    table = {
        "model": {"preset": "tiny-decoder", "n_layers": 1, "dropout": 0.1},
        "data": {"path": str(path), "seq_len": 64, "vocab_size": 266, "val_fraction": 0.2},
        "train": {
            **{"steps": 6, "batch_tokens": 400, "eval_every": 3, "save_every": 3, "lr": 0.01, "grad_accum": 2},
            **{
                "objective": {"kind": "dpo", "beta": 0.5},
                "schedule": "constant",
                "out": str(folder / out),
                **choices,
            },
        },
    }
    return Run.from_dict(table)


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


class Stop(Callback):
    """Ends the run after a step."""

    def on_step_end(self, trainer: Trainer, step: int, metrics: dict[str, Any]) -> None:
        if step == 3:
            trainer.stop()


@pytest.mark.long
def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    gh.train(settings(tmp_path, "whole"), progress=False)
    gh.train(settings(tmp_path, "parts"), progress=False, callbacks=[Stop()])
    result = gh.train(settings(tmp_path, "parts"), progress=False)
    whole, parts = (
        [{key: value for key, value in line.items() if key != "tokens_per_second"} for line in lines(tmp_path / name)]
        for name in ("whole", "parts")
    )
    assert whole == parts
    assert {"validation_accuracy", "validation_margin", "validation_chosen_loss"} <= whole[-1].keys()
    assert "validation_perplexity" not in whole[-1]
    models = [gh.load(tmp_path / name / "model")[0].state_dict() for name in ("whole", "parts")]
    assert all(models[0][name].equal(models[1][name]) for name in models[0])
    # The reference of the resumed run is the initial model, not that of its checkpoint.
    assert result.report.metrics["margin"] == pytest.approx(whole[-1]["validation_margin"], rel=1e-4)
    assert whole[0]["n_targets"] < 64  # pairs, not tokens
    assert whole[0]["loss"] == pytest.approx(math.log(2), abs=1e-6)  # at the reference, in spite of model.dropout


def test_a_run_is_not_resumed_with_another_reference(tmp_path: Path) -> None:
    tok = gh.Tokenizer.train(texts=["plus"], vocab_size=266)
    for seed in (0, 1):
        torch.manual_seed(seed)
        gh.save(gh.build(gh.preset("tiny-decoder", vocab_size=266, n_layers=1)), tok, tmp_path / f"base-{seed}")
    run = replace(settings(tmp_path), model={"from": str(tmp_path / "base-0")})
    gh.train(run, progress=False, callbacks=[Stop()])
    shutil.rmtree(tmp_path / "base-0")
    shutil.copytree(tmp_path / "base-1", tmp_path / "base-0")
    with pytest.raises(StoreError, match=r"was trained with reference=\w+ and is resumed with reference=\w+"):
        gh.train(run, progress=False)


def test_preferences_alone_ask_for_dpo_and_settings_that_contradict_are_refused(
    tmp_path: Path, corpus: Corpus
) -> None:
    gh.train(settings(tmp_path, objective=None, steps=1), progress=False)
    assert "validation_margin" in lines(tmp_path / "run")[-1]
    assert isinstance(find_objective(gh.preset("tiny-decoder"), corpus), DPO)
    with pytest.raises(InputError, match="objective is dpo, which trains causal language models, but the model is"):
        find_objective(gh.preset("tiny-encoder"), corpus, DPO())
    (tmp_path / "a.txt").write_text("to be or not to be. " * 40)
    text = settings(tmp_path, "text")
    text = replace(text, data=replace(text.data, path=(str(tmp_path / "a.txt"),)))
    with pytest.raises(InputError, match="plain text, which is of kind text, not preferences"):
        gh.train(text, progress=False)


@pytest.mark.long
def test_dpo_learns_the_built_in_rule_in_a_small_model(tmp_path: Path) -> None:
    # Answers differ in their form alone, and a tiny model learns that from a few pairs.
    short = (item for item in gh.data.builtin_dataset("preferences").items() if len(item[0]) < 60)
    records = [dict(zip(("prompt", "chosen", "rejected"), item, strict=True)) for item in islice(short, 200)]
    write(tmp_path / "a.jsonl", records)
    run = settings(tmp_path, steps=12, batch_tokens=2000, eval_every=12, save_every=12, grad_accum=1, probes=[])
    run = replace(run, data=replace(run.data, seq_len=128, vocab_size=400))
    metrics = gh.train(run, progress=False).report.metrics
    assert metrics["accuracy"] > 0.9  # from a half, where every margin is 0
    assert metrics["margin"] > 0
