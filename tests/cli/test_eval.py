"""`glasshouse eval` against what the library gives, as scripts and people meet it."""

from __future__ import annotations

import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import glasshouse as gh
from cli.runner import Call, Done, at_terminal
from glasshouse.cli import evaluation as command

TRAIN = "to be or not to be, that is the question: whether 'tis nobler in the mind\n" * 20
HELD = "to suffer the slings and arrows of outrageous fortune, or to take arms\n" * 5
SIZE = {"vocab_size": 263, "d_model": 32, "n_layers": 1, "n_heads": 2, "max_len": 32}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run, with its model and both of its corpora, and other models beside it."""
    place = tmp_path_factory.mktemp("place")
    tok = gh.Tokenizer.train(texts=["x"], vocab_size=263)
    torch.manual_seed(0)
    decoder = gh.build(gh.preset("tiny-decoder", **SIZE))
    gh.save(decoder, tok, place / "run" / "model")
    gh.save(decoder, tok, place / "alone")
    gh.save(decoder, None, place / "wordless")
    gh.save(gh.build(gh.preset("tiny-seq2seq", **SIZE, start_id=0)), tok, place / "translator")
    (place / "run" / "run.toml").write_text('[model]\npreset = "tiny-decoder"\n')
    for name, text in (("train", TRAIN), ("validation", HELD)):
        (place / f"{name}.txt").write_text(text)
        gh.data.prepare(place / f"{name}.txt", tok, place / "run" / "data" / name)
    (place / "pairs.tsv").write_text("en\tde\nyes\tja\nno\tnein\x1b[31m\n" + "long" * 20 + "\tlang\n")
    return place


def rows(done: Done) -> dict[str, str]:
    """Return the numbers by their names, up to the examples."""
    assert (done.code, done.err) == (0, "")
    lines = done.out.partition("\n\n")[0].splitlines()
    return dict(re.split(" {2,}", line)[:2] for line in lines)


def test_figures_are_those_of_the_library(place: Path, call: Call) -> None:
    model, tok = gh.load(place / "alone")
    assert tok is not None
    report = gh.evaluate(model, tok, place / "validation.txt", seq_len=16, limit=3)
    words = ("eval", place / "alone", place / "validation.txt", "--length", "16", "--limit", "3", "--device", "cpu")
    figures = report.metrics
    assert rows(call(*words)) == {
        "loss": f"{figures['loss']:.4f}",
        "perplexity": f"{figures['perplexity']:.2f}",
        "accuracy": f"{figures['accuracy']:.2%}",
        "bits per byte": f"{figures['bits_per_byte']:.4f}",
        "asked for": "48",
    }
    done = call(*words, "--json")
    assert done.out.count("\n") == 1
    told = json.loads(done.out)
    assert told == {
        "kind": "text",
        "asked": 48,
        "left_out": 0,
        "figures": figures,
        "items": report.n_items,
        "measured": 3,
        "written": 0,
        "signatures": {},
        "examples": [
            {"read": one.input, "expected": one.reference, "said": one.prediction, "n_best": []}
            for one in report.examples
        ],
    }
    assert f"tokens, in 3 of {report.n_items} rows\n" in call(*words).out


def test_the_model_and_the_columns_tell_what_is_measured(place: Path, call: Call) -> None:
    translator, words = place / "translator", ("--kind", "pairs", "--field", "en", "--field", "de", "--written", "0")
    told = call("eval", translator, place / "pairs.tsv", *words)
    itself = call("eval", translator, place / "pairs.tsv", "--written", "0")
    assert (itself.code, itself.out) == (0, told.out)
    assert (told.err, itself.err) == ("", "the data are of kind pairs, in the columns en, de\n")
    assert call("eval", translator, place / "pairs.tsv", "--field", "en,de", "--written", "0").out == told.out
    model, tok = gh.load(translator)
    assert tok is not None
    assert gh.evaluate(model, tok, place / "pairs.tsv", generate=0).kind == "pairs"


def test_bytes_that_are_not_utf8_have_a_way_out(place: Path, call: Call) -> None:
    (place / "latin.txt").write_bytes(b"caf\xe9 " * 50)
    assert "errors (of a run, data.errors) to 'replace'" in call("eval", place / "alone", place / "latin.txt").err
    assert call("eval", place / "alone", place / "latin.txt", "--errors", "replace").code == 0


def test_the_folder_of_a_run_is_its_model(place: Path, call: Call) -> None:
    assert call("eval", place / "run").out == call("eval", place / "run" / "model").out != ""


def test_a_run_knows_what_it_was_tried_on(place: Path, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    by_name = call("eval", place / "run" / "model", place / "run" / "data" / "validation")
    assert call("eval", place / "run" / "model") == by_name
    assert by_name.code == 0
    monkeypatch.chdir(place / "run" / "model")
    assert call("eval", ".") == by_name


def test_baselines_stand_beside_the_model(place: Path, call: Call) -> None:
    counts = gh.evaluation.ByteModel(5)
    counts.train([TRAIN.encode()])
    bits = {name: gh.evaluation.compressed_bits(HELD.encode(), by=name) for name in ("gzip", "xz")}
    alone = json.loads(call("eval", place / "alone", place / "validation.txt", "--baselines", "--json").out)
    assert alone["baselines"] == bits
    shown = rows(call("eval", place / "run" / "model", "--baselines"))
    bits["byte 5-gram"] = counts.bits(HELD.encode())
    assert {name: shown[name] for name in bits} == {name: f"{value:.4f}" for name, value in bits.items()}
    # What the run learned from is not set beside counts of itself.
    itself = ("eval", place / "run" / "model", place / "run" / "data" / "train", "--baselines", "--json")
    assert set(json.loads(call(*itself).out)["baselines"]) == {"gzip", "xz"}


def test_pairs_by_their_columns(place: Path, call: Call) -> None:
    words = ("eval", place / "translator", place / "pairs.tsv", "--kind", "pairs", "--field", "en", "--field", "de")
    done = call(*words)
    assert set(rows(done)) == {
        "loss",
        "perplexity",
        "accuracy",
        "exact match",
        "BLEU",
        "chrF",
        "asked for",
        "left out",
    }
    assert rows(done)["left out"] == "1"
    assert "example 2\nread      no\nexpected  nein\\x1b[31m\nsaid" in done.out
    assert "\x1b" not in done.out
    signature = gh.evaluation.bleu(["a"], ["a"]).signature
    assert re.search(rf"^BLEU +[\d.]+  0 to 100, over 2 texts, {re.escape(signature)}$", done.out, re.MULTILINE)
    assert re.search(r"^exact match +[\d.]+%  of 2 texts$", done.out, re.MULTILINE)
    for option in ("--written", "--limit"):
        said = call(*words, option, "1").out
        assert re.search(r"^exact match +[\d.]+%  of 1 of 2 texts$", said, re.MULTILINE), said
        assert "0 to 100, over 1 of 2 texts, nrefs:1|" in said
    told = json.loads(call(*words, "--beams", "3", "--n", "2", "--json").out)
    assert set(told["signatures"]) == {"bleu", "chrf"}
    (first, _), (second, _) = told["examples"][0]["n_best"]
    assert first >= second
    lines = call(*words, "--beams", "3", "--n", "2").out.splitlines()
    best = [line for line in lines if line.startswith("best ")]
    assert len(best) == 4
    assert best[0].startswith(f"best 1    {first:.4f}  ")
    few = rows(call(*words, "--written", "0"))
    assert set(few) == {"loss", "perplexity", "accuracy", "asked for", "left out"}


def test_a_builtin_set(place: Path, call: Call) -> None:
    words = ("eval", place / "translator", "dates", "--limit", "4", "--written", "0", "--json")
    found = [json.loads(call(*words, "--split", split).out) for split in ("validation", "test")]
    assert json.loads(call(*words).out) == found[0]
    assert found[0] != found[1]


def test_progress_is_for_terminals_alone(place: Path, call: Call) -> None:
    plain = call("eval", place / "alone", place / "validation.txt")
    drawn = at_terminal("eval", place / "alone", place / "validation.txt", COLUMNS="100")
    assert plain.err == ""
    assert "evaluating" in drawn
    assert "perplexity" in drawn
    assert "evaluating" not in plain.out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("alone",), "there is no data to measure on"),
        (("absent", "dates"), "absent"),
        (("wordless", "validation.txt"), "has no tokenizer"),
        (("alone", "absent.txt"), "absent.txt"),
        (("alone", "pairs.tsv", "--kind", "pairs"), "of kind pairs"),
        (("translator", "validation.txt"), "of kind text"),
        (("translator", "dates", "--baselines"), "of kind pairs"),
        (("alone", "run/data/train", "--kind", "chat"), "of kind text"),
        (("alone", "validation.txt", "--device", "mps"), "--device is 'mps'"),
    ],
)
def test_a_mistake_is_one_sentence(
    words: tuple[str, ...], said: str, place: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    monkeypatch.setattr(gh.device, "fastest", lambda: torch.device("cpu"))
    done = call("eval", *words)
    assert (done.code, done.out) == (1, "")
    assert done.err.startswith("error: ")
    assert said in done.err
    assert done.err.count("\n") == 1


def test_a_run_that_held_out_a_part_is_measured_on_that(place: Path, tmp_path: Path, call: Call) -> None:
    shutil.copytree(place / "run", tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "data" / "validation")
    run = '[model]\npreset = "tiny-decoder"\n[data]\nhold_out = 0.25\n'
    (tmp_path / "run" / "run.toml").write_text(run)
    told = json.loads(call("eval", tmp_path / "run" / "model", "--json", "--baselines").out)
    learned, held = gh.data.Corpus.open(place / "run" / "data" / "train").split(0.25)
    model, tok = gh.load(place / "run" / "model")
    assert tok is not None
    assert told["figures"]["loss"] == pytest.approx(gh.evaluate(model, tok, held).metrics["loss"])
    assert told["baselines"] == gh.evaluation.baseline_bits(held, learned)
    (tmp_path / "run" / "run.toml").unlink()
    assert "there is no data to measure on" in call("eval", tmp_path / "run" / "model").err


def test_json_has_no_word_for_infinity(place: Path, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    figures = {"loss": 800.0, "perplexity": math.inf, "accuracy": math.nan}
    report = gh.evaluation.Report("text", figures, 1, [])

    def measured(*_: Any, **__: Any) -> gh.evaluation.Report:  # noqa: ANN401
        return report

    monkeypatch.setattr(gh, "evaluate", measured, raising=False)
    told = json.loads(call("eval", place / "run" / "model", "--json").out, parse_constant=pytest.fail)
    assert told["figures"] == {"loss": 800.0, "perplexity": None, "accuracy": None}


def test_a_long_text_shows_both_of_its_ends() -> None:
    assert command._shorten("a b") == "a␣b"
    assert command._shorten("a" * 160) == "a" * 160
    assert command._shorten("a" * 100 + "b" * 100) == "a" * 80 + " … " + "b" * 80


def test_help_shows_defaults_and_an_example(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    helped = call("eval", "--help").out
    for shown in (
        "validation]",
        "32]",
        "--limit",
        "--beams",
        "the model's max_len",
        "auto]",
        "Example: glasshouse eval",
    ):
        assert shown in helped, shown
