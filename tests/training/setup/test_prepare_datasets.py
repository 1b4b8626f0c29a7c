"""Datasets of a run: its tokenizer never sees the validation set."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

import glasshouse as gh
from glasshouse.data.corpus import Corpus
from glasshouse.text import Tokenizer
from glasshouse.text.bpe.training import no_progress
from glasshouse.training.run import Data
from glasshouse.training.setup.datasets import Datasets, open_datasets, prepare_datasets

WORDS = [f"word{number:03}" for number in range(300)]  # each stands once, so it is in one part alone


def make(path: Path, kind: str, packed: bool = False) -> tuple[str, ...]:
    """Write data in which each item, or stretch of text, has words of its own."""
    match kind:
        case "text":
            text, name = "ü " + " ".join(WORDS), "a.txt"
        case "pairs":
            text, name = "source\ttarget\n" + "".join(f"{word}\tx\n" for word in WORDS), "a.tsv"
        case "labelled":
            rows = ({"text": word, "label": number % 2} for number, word in enumerate(WORDS))
            text, name = "".join(json.dumps(row) + "\n" for row in rows), "a.jsonl"
        case "tagged":
            rows = ({"words": [word], "tags": ["w"]} for word in WORDS)
            text, name = "".join(json.dumps(row) + "\n" for row in rows), "a.jsonl"
        case _:
            rows = (
                {"messages": [{"role": "user", "content": word}, {"role": "assistant", "content": "x"}]}
                for word in WORDS
            )
            text, name = "".join(json.dumps(row) + "\n" for row in rows), "a.jsonl"
    if packed:
        (path / f"{name}.gz").write_bytes(gzip.compress(text.encode()))
        return (str(path / f"{name}.gz"),)
    (path / name).write_text(text)
    return (str(path / name),)


def seen_by_training(monkeypatch: pytest.MonkeyPatch, choice: Data, folder: Path) -> tuple[str, Datasets]:
    """Gather what a run needs; return also all that its tokenizer was trained on."""
    seen: list[str] = []
    real = Tokenizer.train

    def train(*, texts: Any, **rest: Any) -> Tokenizer:  # noqa: ANN401
        given = [text if isinstance(text, str) else text.decode() for text in texts]
        seen.extend(given)
        return real(texts=given, **rest)

    monkeypatch.setattr(Tokenizer, "train", train)
    datasets = prepare_datasets(choice, folder, None, no_progress)
    return "\n".join(seen), datasets


def text_of(corpus: Corpus, tok: Tokenizer) -> str:
    items = (corpus.item(number)[: 1 if corpus.kind != "pairs" else 2] for number in range(len(corpus)))
    return "\n".join(tok.decode(part, skip_special_tokens=True) for item in items for part in item)


@pytest.mark.few(4)
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kind", ["text", "pairs", "labelled", "tagged", "chat"])
def test_the_tokenizer_is_trained_on_the_training_set_only(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: Any,  # noqa: ANN401
    packed: bool,
) -> None:
    choice = Data(path=make(tmp_path, kind, packed), kind=kind, val_fraction=0.2, vocab_size=300)
    seen, datasets = seen_by_training(monkeypatch, choice, tmp_path / "run")
    train_text, val_text = (text_of(corpus, datasets.tok) for corpus in (datasets.train, datasets.validation))
    there = {word for word in WORDS if word in val_text}
    assert 55 <= len(there) <= 60  # a fifth of 300; of text, the word at the cut may lie on both sides
    assert not [word for word in there if word in seen]
    missing = [word for word in WORDS if word in train_text and word not in seen]
    assert len(missing) <= 1  # the token across the split is in the training set, and was seen in part
    again = open_datasets(choice, tmp_path / "run")
    assert [text_of(corpus, datasets.tok) for corpus in again] == [train_text, val_text]


def test_with_validation_data_the_tokenizer_uses_all_training_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (path,) = make(tmp_path, "text")
    (tmp_path / "b.txt").write_text("something else " * 20)
    choice = Data(path=(path,), validation=(str(tmp_path / "b.txt"),), vocab_size=300)
    seen, _ = seen_by_training(monkeypatch, choice, tmp_path / "run")
    assert all(word in seen for word in WORDS)
    assert "something" not in seen


def test_a_character_at_the_split_is_not_cut(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("ü" * 1000 + "a")
    for share in (0.3, 0.301):  # one of which falls within a letter of two bytes
        choice = Data(path=(str(tmp_path / "a.txt"),), val_fraction=share, vocab_size=263)
        datasets = prepare_datasets(choice, tmp_path / f"run-{share}", None, no_progress)
        assert isinstance(datasets.tok, gh.Tokenizer)
