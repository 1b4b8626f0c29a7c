"""Token classification end to end: a run file, words on disk, an encoder trained to tag numbers."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

import glasshouse as gh
from glasshouse.training import Run, train
from glasshouse.training.setup.model import resize_for_data

pytestmark = pytest.mark.slow

WORDS = ["pear", "plum", "fig", "lime", "the", "and", "some", "ripe", "sour", "of"]


def write_tagged(path: Path, yes: str = "number", no: str = "word") -> str:
    """Write rows of words and numbers; nothing in a row tells which comes next."""
    draw = random.Random(0)
    with path.open("w") as file:
        for _ in range(300):
            row = [str(draw.randrange(1000)) if draw.random() < 0.4 else draw.choice(WORDS) for _ in range(8)]
            tags = [yes if word.isdigit() else no for word in row]
            file.write(json.dumps({"words": row, "tags": tags}) + "\n")
    return str(path)


def table(data_folder: Path, path: str, **model: Any) -> dict[str, Any]:  # noqa: ANN401
    return {
        "model": model or {"preset": "tiny-encoder", "n_layers": 1},
        "data": {"path": path, "kind": "tagged", "seq_len": 32, "vocab_size": 300, "val_fraction": 0.1},
        "train": {"steps": 36, "batch_tokens": 512, "lr": 0.01, "schedule": {"kind": "cosine", "warmup": 5}}
        | {"out": str(data_folder), "grad_accum": 1},
    }


def test_an_encoder_is_trained_to_tag(tmp_path: Path) -> None:
    path = write_tagged(tmp_path / "a.jsonl")
    result = train(Run.from_dict(table(tmp_path / "run", path)))
    head = result.model.spec.head
    assert (head.kind, head.labels) == ("token_classification", ("number", "word"))
    assert result.report.kind == "tagged"
    assert result.report.metrics["accuracy"] > 0.95
    assert result.report.metrics["f1"] > 0.95
    assert result.report.n_targets == 30 * 8  # no row is cut: a tenth of them, of eight words
    model, tok = gh.load(tmp_path / "run" / "model")
    assert model.spec.head == head
    again = gh.evaluate(model, tok, path, kind="tagged")
    assert again.metrics["accuracy"] > 0.95


@pytest.mark.long
def test_a_tagger_learns_other_labels(tmp_path: Path) -> None:
    train(Run.from_dict(table(tmp_path / "run", write_tagged(tmp_path / "a.jsonl"))))
    other = write_tagged(tmp_path / "b.jsonl", "figure", "name")
    settings = table(tmp_path / "other", other, **{"from": str(tmp_path / "run" / "model")})
    result = train(Run.from_dict(settings))
    assert result.model.spec.head.labels == ("figure", "name")
    assert result.report.metrics["accuracy"] > 0.95


def test_a_head_is_kept_if_it_fits_and_replaced_if_not(tmp_path: Path) -> None:
    tok = gh.Tokenizer.train(texts=["x"], vocab_size=263)
    tags = gh.data.prepare(write_tagged(tmp_path / "a.jsonl"), tok, tmp_path / "tags", kind="tagged")
    (tmp_path / "a.tsv").write_text("text\tlabel\none\tword\n1\tnumber\n")
    labels = gh.data.prepare(tmp_path / "a.tsv", tok, tmp_path / "labels", kind="labelled")
    assert tags.labels == labels.labels
    for mine, other, kind, another in (
        (tags, labels, "token_classification", "sequence_classification"),
        (labels, tags, "sequence_classification", "token_classification"),
    ):
        head = {"kind": kind, "n_labels": 2, "labels": ["number", "word"]}
        base = gh.build(gh.preset("tiny-encoder", vocab_size=263, head=head))
        assert resize_for_data(base, tok, tok, mine) is base
        changed = resize_for_data(base, tok, tok, other)
        assert (changed.spec.head.kind, changed.spec.head.labels) == (another, ("number", "word"))
