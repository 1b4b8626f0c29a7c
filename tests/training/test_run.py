"""A run as it is written down: by name or file, on own data, with lists as people type them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from test_loop import table, weights

import glasshouse as gh
from glasshouse.errors import InputError, StoreError
from glasshouse.training import Run, train
from glasshouse.training.model_setup import wanted_kind

# Where it writes


@pytest.mark.parametrize(
    ("settings", "out"),
    [
        ((), "runs/stdlib"),
        (("data.path=stdlib",), "runs/stdlib"),
        (("data.path=books/hamlet.txt",), "runs/hamlet"),
        (("data.path=mt.tsv.gz",), "runs/mt"),
        (("data.path=my/books/**/*.txt",), "runs/books"),
        (("data.path=train.en,train.de",), "runs/train"),
        (("data.path=dates",), "runs/dates"),
        (("data.path=folder.v2",), "runs/folder.v2"),
        (("data.path=.",), "runs/here"),
        (("data.path=*.txt",), "runs/here"),
        (("data.path=/",), "runs/stdlib"),  # which has no name
        (("data.path=books", "train.out=mine"), "mine"),
    ],
)
def test_own_data_name_their_run(
    settings: tuple[str, ...], out: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here" / "folder.v2").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")
    assert Run.load("stdlib", *settings).train.out == out


def test_a_file_names_its_run_whatever_its_data(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text('[model]\npreset = "tiny-decoder"\n[data]\npath = "a.txt"\n')
    assert Run.load(tmp_path / "mine.toml", "data.path=b.txt").train.out == "runs/mine"


# What kind of data


@pytest.mark.parametrize(
    ("recipe", "path", "kind"),
    [
        ("dates", "mt.tsv", "pairs"),
        ("vaswani-base", "mt.tsv", "pairs"),
        ("finetune-chat", "chat.jsonl", "chat"),
        ("finetune-labels", "reviews.csv", "labelled"),
        ("langid", "reviews.csv", "labelled"),
        ("stdlib", "books", None),  # as its columns tell
        ("dates", "langid", None),  # a set of its own kind
        ("finetune-chat", "chat", None),
    ],
)
def test_a_recipe_knows_what_kind_of_data_it_is_for(recipe: str, path: str, kind: str | None) -> None:
    assert Run.load(recipe, f"data.path={path}").data.kind == kind
    assert Run.load(recipe, f"data.path={path}", "data.kind=text").data.kind == "text"


def test_a_model_knows_what_kind_of_data_it_learns_from() -> None:
    for name in gh.presets():
        s = gh.preset(name)
        assert wanted_kind({"preset": name}, None) == ("pairs" if s.kind == "seq2seq" else None)
    assert wanted_kind({"kind": "encoder", "head": {"kind": "sequence_classification"}}, None) == "labelled"
    assert wanted_kind({"preset": "tiny-encoder", "head": "token_classification"}, None) == "tagged"
    assert wanted_kind({"from": "x"}, gh.build(gh.preset("tiny-seq2seq"), device="meta")) == "pairs"


def test_an_encoder_decoder_learns_from_two_columns_of_any_name(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = (place / "a.tsv").read_text().splitlines()[1:]
    (place / "mt.tsv").write_text("\n".join(["en\tde", *rows]) + "\n")
    settings = table(place, "seq2seq", steps=1)
    settings["data"] |= {"path": str(place / "mt.tsv")}
    del settings["data"]["kind"]
    result = train(Run.from_dict(settings))
    assert result.datasets.train.kind == "pairs"
    assert "tokens   pairs (columns en, de): " in capsys.readouterr().err
    # Both ways of giving them by name are the same.
    (place / "three.tsv").write_text("\n".join(["id\ten\tde", *(f"{row[0]}\t{row}" for row in rows)]) + "\n")
    settings["data"] |= {"path": str(place / "three.tsv")}
    settings["train"]["out"] = str(place / "three")
    with pytest.raises(
        InputError, match="has the columns id, en, de, of which pairs take two, by their names source"
    ):
        train(Run.from_dict(settings), progress=False)
    settings["data"]["fields"] = ["en", "de"]
    again = train(Run.from_dict(settings), progress=False)
    assert again.report.metrics["loss"] == result.report.metrics["loss"]


# What it reads


def test_bytes_that_are_not_utf8_have_a_way_out_that_works(place: Path) -> None:
    (place / "a.txt").write_bytes(b"caf\xe9 au lait, to be or not to be. " * 60)
    settings = table(place, steps=1)
    with pytest.raises(InputError, match=r"is not UTF-8 at byte 3; .*data\.errors\) to 'replace'"):
        train(Run.from_dict(settings), progress=False)
    settings["data"]["errors"] = "replace"
    result = train(Run.from_dict(settings), progress=False)
    assert "caf\N{REPLACEMENT CHARACTER}" in result.datasets.tok.decode(result.datasets.train.item(0)[0][:20])


# Its folder as a model


def test_the_folder_of_a_run_is_its_model_or_its_newest_checkpoint(
    place: Path, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    folder = place / "run"
    train(Run.from_dict(table(place)), progress=False)
    recwarn.clear()
    same = gh.load(folder)[0].state_dict()
    assert not recwarn
    for name, weight in weights(place).items():
        assert weight.equal(same[name])
    assert gh.load(folder / "model")[1].fingerprint == gh.load(folder)[1].fingerprint
    # As if it had been stopped before its end.
    (folder / "model").rename(place / "elsewhere")
    with pytest.warns(UserWarning, match="has not finished, so its latest checkpoint is loaded, that of step 12"):
        gh.load(folder)
    with (folder / "checkpoints" / "step-00000012" / "model.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\x01")
    with pytest.warns(UserWarning, match=r"that of step 9 \(skipped: .*step-00000012.* does not match its checksum"):
        older = gh.load(folder)[0].state_dict()
    assert not all(weight.equal(older[name]) for name, weight in same.items())
    # What training alone needs is not asked for.
    (folder / "checkpoints" / "step-00000009" / "training.safetensors").write_bytes(b"")
    with pytest.warns(UserWarning, match="that of step 9"):
        gh.load(folder)
    (folder / "checkpoints" / "step-00000009" / "training.json").write_text("[" * 200_000)
    with pytest.raises(StoreError, match=r"^the run in '.*run' has no intact checkpoint: .*step-00000012"):
        gh.load(folder)
    for checkpoint in (folder / "checkpoints").iterdir():
        checkpoint.rename(place / checkpoint.name)
    with pytest.raises(StoreError, match=r"^the run in '.*run' has saved no model and no checkpoint yet; wait"):
        gh.load(folder)
    with pytest.raises(StoreError, match=r"there is no .*config.json'; give a model folder or a run folder"):
        gh.load(place)


def test_a_run_starts_from_the_folder_of_a_run(place: Path) -> None:
    first = train(Run.from_dict(table(place)), progress=False)
    settings = table(place, out="tuned", steps=1)
    settings["model"] = {"from": str(first.folder)}
    tuned = train(Run.from_dict(settings), progress=False)
    assert tuned.datasets.tok.fingerprint == first.datasets.tok.fingerprint
    begun = json.loads((tuned.folder / "metrics.jsonl").read_text().splitlines()[0])["loss"]
    learned = json.loads((first.folder / "metrics.jsonl").read_text().splitlines()[0])["loss"]
    assert begun < learned
