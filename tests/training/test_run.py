"""Settings of a run: recipes, files, overrides and data of one's own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from runs import table, weights

import glasshouse as gh
from glasshouse.errors import ConfigError, InputError, StoreError
from glasshouse.training import Data, Run, train
from glasshouse.training.run import NewModel, Pretrained
from glasshouse.training.setup.resolve import data_kind

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
def test_a_run_is_named_after_its_data(
    settings: tuple[str, ...], out: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here" / "folder.v2").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")
    assert Run.load("stdlib", *settings).train.out == out


def test_a_toml_file_names_its_run(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text('[model]\npreset = "tiny-decoder"\n[data]\npath = "a.txt"\n')
    assert Run.load(tmp_path / "mine.toml", "data.path=b.txt").train.out == "runs/mine"


# The model it names


def test_a_table_of_a_model_is_typed() -> None:
    run = Run.load("stdlib", "model.n_layers=2")
    assert isinstance(run.model, NewModel)
    assert (run.model.preset, run.model.fields["n_layers"]) == ("qwen3-small", 2)
    assert Run(run.model.to_dict(), run.data, run.train) == run  # type: ignore[arg-type]
    assert Run.load("finetune-chat").model == Pretrained("runs/stdlib/model")
    full = {"kind": "decoder", "d_model": 64}
    assert Run.from_dict({"model": full}).to_dict()["model"] == full


@pytest.mark.parametrize(
    ("table", "sentence"),
    [
        ({"n_layers": 2}, "model has neither preset, nor from, nor the kind of a full spec; give one of them."),
        ({"from": "x", "n_layers": 2}, "model.from is given, so model.n_layers cannot be set; remove one of them."),
        ({"from": 3}, "model.from is 3, but it must be the folder or the hub id of a model."),
    ],
)
def test_a_table_of_no_model_is_explained(table: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as error:
        Run.from_dict({"model": table})
    assert str(error.value) == sentence


def test_data_settings_check_their_types() -> None:
    assert Data(path="a.txt").path == ("a.txt",)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="seq_len is 'long', but it must be a whole number"):
        Data(seq_len="long")  # type: ignore[arg-type]


# What kind of data


@pytest.mark.parametrize(
    ("recipe", "path", "kind"),
    [
        ("dates", "mt.tsv", "pairs"),
        ("vaswani-base", "mt.tsv", "pairs"),
        ("finetune-chat", "chat.jsonl", "chat"),
        ("finetune-classifier", "reviews.csv", "labelled"),
        ("langid", "reviews.csv", "labelled"),
        ("stdlib", "books", None),  # as its columns tell
        ("dates", "langid", None),  # a set of its own kind
        ("finetune-chat", "chat", None),
        ("dpo", "preferred.jsonl", "preferences"),
    ],
)
def test_a_recipe_sets_the_kind_of_data(recipe: str, path: str, kind: str | None) -> None:
    assert Run.load(recipe, f"data.path={path}").data.kind == kind
    assert Run.load(recipe, f"data.path={path}", "data.kind=text").data.kind == "text"


def test_a_model_sets_the_kind_of_data() -> None:
    for name in gh.presets():
        s = gh.preset(name)
        assert data_kind({"preset": name}, None) == ("pairs" if s.kind == "seq2seq" else None)
    assert data_kind({"kind": "encoder", "head": {"kind": "sequence_classification"}}, None) == "labelled"
    assert data_kind({"preset": "tiny-encoder", "head": "token_classification"}, None) == "tagged"
    assert data_kind({"from": "x"}, gh.build(gh.preset("tiny-seq2seq"), device="meta")) == "pairs"


def test_an_encoder_decoder_trains_on_two_columns_of_any_name(
    data_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = (data_folder / "a.tsv").read_text().splitlines()[1:]
    (data_folder / "mt.tsv").write_text("\n".join(["en\tde", *rows]) + "\n")
    settings = table(data_folder, "seq2seq", steps=1)
    settings["data"] |= {"path": str(data_folder / "mt.tsv")}
    del settings["data"]["kind"]
    result = train(Run.from_dict(settings))
    assert result.datasets.train.kind == "pairs"
    assert "tokens   pairs (columns en, de): " in capsys.readouterr().err
    # Both ways of giving them by name are the same.
    (data_folder / "three.tsv").write_text("\n".join(["id\ten\tde", *(f"{row[0]}\t{row}" for row in rows)]) + "\n")
    settings["data"] |= {"path": str(data_folder / "three.tsv")}
    settings["train"]["out"] = str(data_folder / "three")
    with pytest.raises(InputError, match="has the columns id, en, de, but pairs needs two, by default source"):
        train(Run.from_dict(settings), progress=False)
    settings["data"]["columns"] = ["en", "de"]
    again = train(Run.from_dict(settings), progress=False)
    assert again.report.metrics["loss"] == result.report.metrics["loss"]


# What it reads


def test_invalid_utf8_can_be_replaced(data_folder: Path) -> None:
    (data_folder / "a.txt").write_bytes(b"caf\xe9 au lait, to be or not to be. " * 60)
    settings = table(data_folder, steps=1)
    with pytest.raises(InputError, match=r"is not UTF-8 at byte 3; .*data\.errors\) to 'replace'"):
        train(Run.from_dict(settings), progress=False)
    settings["data"]["errors"] = "replace"
    result = train(Run.from_dict(settings), progress=False)
    assert "caf\N{REPLACEMENT CHARACTER}" in result.datasets.tok.decode(result.datasets.train.item(0)[0][:20])


# Its folder as a model


def test_a_run_folder_loads_its_model_or_newest_checkpoint(
    data_folder: Path, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    folder = data_folder / "run"
    train(Run.from_dict(table(data_folder)), progress=False)
    recwarn.clear()
    same = gh.load(folder)[0].state_dict()
    assert not recwarn
    for name, weight in weights(data_folder).items():
        assert weight.equal(same[name])
    assert gh.load(folder / "model")[1].fingerprint == gh.load(folder)[1].fingerprint
    # As if it had been stopped early.
    (folder / "model").rename(data_folder / "elsewhere")
    with pytest.warns(UserWarning, match="has not finished, so its latest checkpoint is loaded, that of step 12"):
        gh.load(folder)
    with (folder / "checkpoints" / "step-00000012" / "model.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\x01")
    with pytest.warns(UserWarning, match=r"that of step 9 \(skipped: .*step-00000012.* does not match its checksum"):
        older = gh.load(folder)[0].state_dict()
    assert not all(weight.equal(older[name]) for name, weight in same.items())
    # The training state is not needed.
    (folder / "checkpoints" / "step-00000009" / "training_state.safetensors").write_bytes(b"")
    with pytest.warns(UserWarning, match="that of step 9"):
        gh.load(folder)
    (folder / "checkpoints" / "step-00000009" / "training_state.json").write_text("[" * 200_000)
    with pytest.raises(StoreError, match=r"^the run in '.*run' has no intact checkpoint: .*step-00000012"):
        gh.load(folder)
    for checkpoint in (folder / "checkpoints").iterdir():
        checkpoint.rename(data_folder / checkpoint.name)
    with pytest.raises(StoreError, match=r"^the run in '.*run' has saved no model and no checkpoint yet; wait"):
        gh.load(folder)
    with pytest.raises(StoreError, match=r"there is no .*config.json'; give a model folder or a run folder"):
        gh.load(data_folder)


def test_a_run_starts_from_a_run_folder(data_folder: Path) -> None:
    first = train(Run.from_dict(table(data_folder)), progress=False)
    settings = table(data_folder, out="tuned", steps=1)
    settings["model"] = {"from": str(first.folder)}
    tuned = train(Run.from_dict(settings), progress=False)
    assert tuned.datasets.tok.fingerprint == first.datasets.tok.fingerprint
    fine_tuned = json.loads((tuned.folder / "metrics.jsonl").read_text().splitlines()[0])["loss"]
    from_scratch = json.loads((first.folder / "metrics.jsonl").read_text().splitlines()[0])["loss"]
    assert fine_tuned < from_scratch
