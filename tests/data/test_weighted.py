"""Sources with weights: an epoch reads the items of each as often as its weight says, whatever else is asked."""

from __future__ import annotations

import itertools
import json
import re
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from examples import first_of, up_to
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

import glasshouse as gh
from glasshouse.data.source_counts import count_source_tokens
from glasshouse.errors import ConfigError, InputError
from glasshouse.text.bpe.training import no_progress
from glasshouse.training import Callback
from glasshouse.training.run import Data
from glasshouse.training.setup.datasets import open_datasets, prepare_datasets

SOURCES = st.lists(
    st.tuples(st.lists(st.text("abc", min_size=1, max_size=5), min_size=1, max_size=4), st.integers(1, 3)),
    min_size=1,
    max_size=4,
)


@pytest.fixture(scope="module")
def letters() -> gh.Tokenizer:
    return gh.Tokenizer.train(texts=["abc"], vocab_size=263)


@given(sources=SOURCES, is_text=st.booleans(), fraction=st.sampled_from([None, 0.3, 0.6]))
@example(sources=[(["ab", "c"], 2), (["abcab"], 1), (["b", "ca"], 3)], is_text=True, fraction=None)
@example(sources=[(["ab", "c"], 2), (["abcab"], 1), (["b", "ca"], 3)], is_text=True, fraction=0.3)
@settings(max_examples=up_to(60), deadline=None)
def test_a_weighted_corpus_is_the_sources_written_out_as_often(
    letters: gh.Tokenizer, sources: list[tuple[list[str], int]], is_text: bool, fraction: float | None
) -> None:
    column = "text" if is_text else "source"
    with tempfile.TemporaryDirectory() as folder:
        weights = {}
        for number, (texts, weight) in enumerate(sources):
            path = Path(folder, f"{number}.jsonl")
            path.write_text("".join(json.dumps({column: text, "target": "a"}) + "\n" for text in texts))
            weights[str(path)] = weight
        corpus = gh.data.prepare(list(weights), letters, f"{folder}/ids", kind="text" if is_text else "pairs")
        if fraction is not None:
            if corpus.n_tokens * fraction < 1 or len(corpus) < 2:
                return
            corpus, _ = corpus.split(fraction)
        items = [(corpus.source_name(n), corpus.item(n)[0].tolist()) for n in range(len(corpus))]
        assert corpus.items_by_source() == {name: sum(one == name for one, _ in items) for name in weights}
        if not items:
            return
        weighted = corpus.weighted(weights)
        found = [(weighted.source_name(n), weighted.item(n)[0].tolist()) for n in range(len(weighted))]
        groups = [(name, [one for one in items if one[0] == name]) for name in weights]
        expected = [one for name, some in groups for one in some * weights[name]]
        assert sorted(found) == sorted(expected)
        assert weighted.n_tokens == corpus.n_tokens + sum(
            (weights[name] - 1) * (len(ids) + (not is_text)) for name, ids in items
        )
        if is_text:
            assert found == expected
            ids = list(itertools.chain.from_iterable(ids for _, ids in expected))
            assert weighted.read(0, len(ids)).tolist() == ids
            for start in range(len(ids)):
                assert weighted.read(start, min(start + 3, len(ids))).tolist() == ids[start : start + 3]
            assert torch.tensor(ids).equal(torch.cat([torch.from_numpy(ids) for ids, _ in weighted.blocks()]))


@given(sources=SOURCES, seq_len=st.integers(1, 7), is_text=st.booleans(), data=st.data())
@example(sources=[(["ab", "c"], 2), (["abcab"], 1), (["b", "ca"], 3)], seq_len=5, is_text=True, data=None)
@settings(max_examples=up_to(60), deadline=None)
def test_tokens_of_sources_are_those_that_the_samples_have(
    letters: gh.Tokenizer,
    sources: list[tuple[list[str], int]],
    seq_len: int,
    is_text: bool,
    data: st.DataObject | None,
) -> None:
    """The reference marks each id of the corpus with its source, and reads the samples' offsets, or their items."""
    with tempfile.TemporaryDirectory() as folder:
        weights = {}
        for number, (texts, weight) in enumerate(sources):
            path = Path(folder, f"{number}.jsonl")
            rows = ({"text": text} if is_text else {"source": text, "target": "a"} for text in texts)
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
            weights[str(path)] = weight
        kind = "text" if is_text else "pairs"
        corpus = gh.data.prepare(list(weights), letters, f"{folder}/ids", kind=kind).weighted(weights)
        names = [corpus.source_name(item) for item in range(len(corpus))]
        lengths = [sum(map(len, corpus.item(item))) for item in range(len(corpus))]
        owners = [name for name, length in zip(names, lengths, strict=True) for _ in range(length)]
        if is_text and len(owners) <= seq_len:
            return
        samples = (
            gh.data.CausalLMDataset(corpus, seq_len) if is_text else gh.data.Seq2SeqDataset(corpus, 1, max_len=9)
        )
        indices = range(3 * len(samples)) if data is None else data.draw(st.lists(st.integers(0, 40)))
        if is_text:
            found = [owners[(at + k) % len(owners)] for at in samples.offsets(indices) for k in range(seq_len)]
        else:
            found = [names[item] for item in samples.items(indices) for _ in range(lengths[item])]
        assert count_source_tokens(samples, indices, [[name] for name in weights]) == [
            found.count(name) for name in weights
        ]
        together = count_source_tokens(samples, indices, [list(weights)])
        assert together == [len(found)]


@pytest.mark.parametrize("kind", first_of(["text", "chat"]))
def test_a_run_reports_the_tokens_of_each_source_once_an_epoch(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_chats(tmp_path)
    for name, count in (("a", 40), ("b", 20)):
        (tmp_path / f"{name}.txt").write_text(f"{name} rose is {name} rose " * count)
    suffix = "txt" if kind == "text" else "jsonl"
    data = {"path": [f"{name}.{suffix}" for name in "ab"], "weights": [1, 2], "kind": kind, "vocab_size": 263}
    table: dict[str, Any] = {
        "model": {"preset": "tiny-decoder", "n_layers": 1},
        "data": {**data, "seq_len": 24, "val_fraction": 0.2},
        "train": {
            "epochs": 2.5,
            "batch_tokens": 80,
            "sample_prompts": 0,
            "probes": [],
            "out": "run",
            "trackers": [],
        },
    }

    class Lines(gh.training.SilentReporter):
        found: ClassVar[list[str]] = []

        def log(self, text: str) -> None:
            self.found.append(text)

    gh.train(gh.Run.from_dict(table), progress=Lines())
    lines = [line for line in Lines.found if line.startswith("epoch ")]
    assert [line.partition(":")[0] for line in lines] == ["epoch    1", "epoch    2", "epoch    3, as far as read"]
    tokens = [[int(n.replace(",", "")) for n in re.findall(r"([\d,]+) tokens", line)] for line in lines]
    train, _ = open_datasets(gh.Run.load("run").data, Path("run"))
    counts = Counter()
    for item in range(len(train)):
        counts[train.source_name(item)] += len(train.item(item)[0])
    once = [counts[f"a.{suffix}"], 2 * counts[f"b.{suffix}"]]
    for epoch in tokens[:2]:  # but for what fills no batch; a sequence may wrap around
        assert sum(once) - 80 - 24 < sum(epoch) <= sum(once)
        assert all(seen <= whole + 24 for seen, whole in zip(epoch, once, strict=True))
    assert 0.3 * sum(once) < sum(tokens[2]) < 0.8 * sum(once)


class StoppedError(Exception):
    pass


class StopAt(Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, trainer: object, step: int, metrics: dict[str, object]) -> None:
        if step == self.step:
            raise StoppedError


def write_chats(at: Path) -> None:
    for name, count in (("a", 30), ("b", 10)):
        chats = (
            [{"role": "user", "content": f"{name}{n}"}, {"role": "assistant", "content": name}] for n in range(count)
        )
        (at / f"{name}.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))


def test_an_epoch_has_each_item_as_often_as_its_weight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_chats(tmp_path)
    choice = Data(path=("a.jsonl", "b.jsonl"), weights=(1, 3), kind="chat", vocab_size=263, val_fraction=0.1)
    datasets = prepare_datasets(choice, tmp_path / "run", None, no_progress)
    assert [(one.path, one.weight) for one in datasets.sources] == [("a.jsonl", 1), ("b.jsonl", 3)]
    assert sum(one.n_items for one in datasets.sources) == 36  # of 40, of which a tenth validates
    samples = gh.data.ChatDataset(datasets.train, 1, max_len=64, seed=5)
    for epoch in range(2):
        indices = range(epoch * len(samples), (epoch + 1) * len(samples))
        seen = Counter(datasets.tok.decode(row) for index in indices for row in samples.batch([index]).ids)
        assert Counter(seen.values()) == {1: datasets.sources[0].n_items, 3: datasets.sources[1].n_items}
        assert {count for text, count in seen.items() if "b" in text} == {3}
    assert len(datasets.validation) == 4


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["chat", "text"])
def test_resumed_is_uninterrupted(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_chats(tmp_path)
    for name in ("a", "b"):
        (tmp_path / f"{name}.txt").write_text(f"{name} rose is {name} rose " * 20)
    suffix = "txt" if kind == "text" else "jsonl"

    table = {
        "model": {"preset": "tiny-decoder", "n_layers": 1, "dropout": 0.1},
        "data": {
            "path": [f"a.{suffix}", f"b.{suffix}"],
            "weights": [2, 3],
            "kind": kind,
            "vocab_size": 270,
            "seq_len": 24,
            "val_fraction": 0.3,
        },
        "train": {"steps": 6, "batch_tokens": 200, "save_every": 2, "sample_prompts": 0, "probes": []},
    }

    def train(out: str, *callbacks: Callback) -> dict[str, torch.Tensor]:
        gh.train(gh.Run.from_dict({**table, "train": {**table["train"], "out": out}}), callbacks=callbacks)
        return load_file(f"{out}/model/model.safetensors")

    whole = train("whole")
    with pytest.raises(StoppedError):
        train("stopped", StopAt(3))
    resumed = train("stopped")
    assert all(whole[name].equal(resumed[name]) for name in whole)
    table["data"]["weights"] = [2, 4]
    with pytest.raises(InputError, match=r"data.weights was \[2, 3\] and is \[2, 4\]"):
        train("stopped")


@pytest.mark.parametrize("name", ["too few", "aligned", "twice", "built-in"])
def test_weights_that_do_not_fit_are_one_sentence(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_chats(tmp_path)
    for side in ("de", "en"):
        (tmp_path / f"train.{side}").write_text("a\n" * 40)
    words, sentence = {
        "too few": (
            "data.path=a.jsonl,b.jsonl data.weights=[1]",
            r"weights is \(1,\), but it must be one whole number",
        ),
        "aligned": (
            "data.path=train.de,train.en data.kind=pairs data.weights=1,2",
            "but train.de and train.en are one source, as they are aligned; leave it out",
        ),
        "twice": ("data.path=a.jsonl,. data.weights=1,2 data.kind=chat", "'a.jsonl' is in two of data.path"),
        "built-in": ("data.path=preferences data.weights=[2]", "but 'preferences' is one source"),
    }[name]
    with pytest.raises((InputError, ConfigError), match=sentence) as error:
        prepare_datasets(gh.Run.load("demo", *words.split()).data, tmp_path / "run", None, no_progress)
    assert "\n" not in str(error.value)
