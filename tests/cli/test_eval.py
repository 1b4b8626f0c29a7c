"""`glasshouse eval` against what the library gives, as scripts and people meet it."""

from __future__ import annotations

import json
import math
import re
import shutil
import sys
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
    words = ("eval", place / "alone", place / "validation.txt", "--seq-len", "16", "--limit", "3", "--device", "cpu")
    metrics = report.metrics
    assert rows(call(*words)) == {
        "loss": f"{metrics['loss']:.4f}",
        "perplexity": f"{metrics['perplexity']:.2f}",
        "accuracy": f"{metrics['accuracy']:.2%}",
        "bits per byte": f"{metrics['bits_per_byte']:.4f}",
        "evaluated on": "48",
    }
    done = call(*words, "--json")
    assert done.out.count("\n") == 1
    found = json.loads(done.out)
    assert found == {
        "kind": "text",
        "n_targets": 48,
        "n_too_long": 0,
        "metrics": metrics,
        "n_items": report.n_items,
        "n_evaluated": 3,
        "n_generated": 0,
        "signatures": {},
        "examples": [
            {"input": one.input, "reference": one.reference, "prediction": one.prediction, "n_best": []}
            for one in report.examples
        ],
    }
    assert f"tokens, in 3 of {report.n_items} sequences\n" in call(*words).out


def test_kind_is_inferred_from_the_model_and_the_columns(place: Path, call: Call) -> None:
    translator, words = (
        place / "translator",
        ("--kind", "pairs", "--column", "en", "--column", "de", "--generate", "0"),
    )
    found = call("eval", translator, place / "pairs.tsv", *words)
    itself = call("eval", translator, place / "pairs.tsv", "--generate", "0")
    assert (itself.code, itself.out) == (0, found.out)
    assert (found.err, itself.err) == ("", "the data are of kind pairs, in the columns en, de\n")
    assert call("eval", translator, place / "pairs.tsv", "--column", "en,de", "--generate", "0").out == found.out
    model, tok = gh.load(translator)
    assert tok is not None
    assert gh.evaluate(model, tok, place / "pairs.tsv", generate=0).kind == "pairs"


def test_errors_replace_accepts_invalid_utf8(place: Path, call: Call) -> None:
    (place / "latin.txt").write_bytes(b"caf\xe9 " * 50)
    assert "errors (of a run, data.errors) to 'replace'" in call("eval", place / "alone", place / "latin.txt").err
    assert call("eval", place / "alone", place / "latin.txt", "--errors", "replace").code == 0


def test_the_folder_of_a_run_is_its_model(place: Path, call: Call) -> None:
    assert call("eval", place / "run").out == call("eval", place / "run" / "model").out != ""


def test_default_data_is_the_validation_set_of_the_run(
    place: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_name = call("eval", place / "run" / "model", place / "run" / "data" / "validation")
    assert call("eval", place / "run" / "model") == by_name
    assert by_name.code == 0
    monkeypatch.chdir(place / "run" / "model")
    assert call("eval", ".") == by_name


def test_baselines(place: Path, call: Call) -> None:
    counts = gh.evaluation.ByteModel(5)
    counts.train([TRAIN.encode()])
    bits = {name: gh.evaluation.compressed_bits(HELD.encode(), by=name) for name in ("gzip", "xz")}
    alone = json.loads(call("eval", place / "alone", place / "validation.txt", "--baselines", "--json").out)
    assert alone["baselines"] == bits
    shown = rows(call("eval", place / "run" / "model", "--baselines"))
    bits["byte 5-gram"] = counts.bits(HELD.encode())
    assert {name: shown[name] for name in bits} == {name: f"{value:.4f}" for name, value in bits.items()}
    # The training set is not compared with counts of itself.
    itself = ("eval", place / "run" / "model", place / "run" / "data" / "train", "--baselines", "--json")
    assert set(json.loads(call(*itself).out)["baselines"]) == {"gzip", "xz"}


def test_pairs_by_their_columns(place: Path, call: Call) -> None:
    words = ("eval", place / "translator", place / "pairs.tsv", "--kind", "pairs", "--column", "en", "--column", "de")
    done = call(*words)
    assert set(rows(done)) == {
        "loss",
        "perplexity",
        "accuracy",
        "exact match",
        "BLEU",
        "chrF",
        "evaluated on",
        "skipped",
    }
    assert rows(done)["skipped"] == "1"
    assert "example 2\ninput       no\nreference   nein\\x1b[31m\nprediction" in done.out
    assert "\x1b" not in done.out
    signature = gh.evaluation.bleu(["a"], ["a"]).signature
    assert re.search(rf"^BLEU +[\d.]+  0 to 100, over 2 texts, {re.escape(signature)}$", done.out, re.MULTILINE)
    assert re.search(r"^exact match +[\d.]+%  of 2 texts$", done.out, re.MULTILINE)
    for option in ("--generate", "--limit"):
        said = call(*words, option, "1").out
        assert re.search(r"^exact match +[\d.]+%  of 1 of 2 texts$", said, re.MULTILINE), said
        assert "0 to 100, over 1 of 2 texts, nrefs:1|" in said
    found = json.loads(call(*words, "--beams", "3", "--n-best", "2", "--json").out)
    assert set(found["signatures"]) == {"bleu", "chrf"}
    (first, _), (second, _) = found["examples"][0]["n_best"]
    assert first >= second
    lines = call(*words, "--beams", "3", "--n-best", "2").out.splitlines()
    best = [line for line in lines if line.startswith("best ")]
    assert len(best) == 4
    assert best[0].startswith(f"best 1      {first:.4f}  ")
    few = rows(call(*words, "--generate", "0"))
    assert set(few) == {"loss", "perplexity", "accuracy", "evaluated on", "skipped"}


def test_builtin_dataset(place: Path, call: Call) -> None:
    words = ("eval", place / "translator", "dates", "--limit", "4", "--generate", "0", "--json")
    found = [json.loads(call(*words, "--split", split).out) for split in ("validation", "test")]
    assert json.loads(call(*words).out) == found[0]
    assert found[0] != found[1]


@pytest.mark.long
@pytest.mark.slow
def test_progress_is_shown_only_on_terminals(place: Path, call: Call) -> None:
    plain = call("eval", place / "alone", place / "validation.txt")
    drawn = at_terminal("eval", place / "alone", place / "validation.txt", COLUMNS="100")
    assert plain.err == ""
    assert "evaluating" in drawn
    assert "perplexity" in drawn
    assert "evaluating" not in plain.out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("alone",), "there is no data to evaluate on"),
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
def test_errors_are_one_line(
    words: tuple[str, ...], said: str, place: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    monkeypatch.setattr(gh.device, "fastest", lambda: torch.device("cpu"))
    done = call("eval", *words)
    assert (done.code, done.out) == (1, "")
    assert done.err.startswith("error: ")
    assert said in done.err
    assert done.err.count("\n") == 1


def test_run_with_val_fraction_is_evaluated_on_the_split(place: Path, tmp_path: Path, call: Call) -> None:
    shutil.copytree(place / "run", tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "data" / "validation")
    run = '[model]\npreset = "tiny-decoder"\n[data]\nval_fraction = 0.25\n'
    (tmp_path / "run" / "run.toml").write_text(run)
    found = json.loads(call("eval", tmp_path / "run" / "model", "--json", "--baselines").out)
    learned, held = gh.data.Corpus.open(place / "run" / "data" / "train").split(0.25)
    model, tok = gh.load(place / "run" / "model")
    assert tok is not None
    assert found["metrics"]["loss"] == pytest.approx(gh.evaluate(model, tok, held).metrics["loss"])
    assert found["baselines"] == gh.evaluation.baseline_bits(held, learned)
    (tmp_path / "run" / "run.toml").unlink()
    assert "there is no data to evaluate on" in call("eval", tmp_path / "run" / "model").err


def test_json_has_null_for_nan_and_infinity(place: Path, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    metrics = {"loss": 800.0, "perplexity": math.inf, "accuracy": math.nan}
    report = gh.evaluation.Report("text", metrics, 1, [])

    def measured(*_: Any, **__: Any) -> gh.evaluation.Report:  # noqa: ANN401
        return report

    monkeypatch.setattr(gh, "evaluate", measured, raising=False)
    found = json.loads(call("eval", place / "run" / "model", "--json").out, parse_constant=pytest.fail)
    assert found["metrics"] == {"loss": 800.0, "perplexity": None, "accuracy": None}


def test_long_text_is_shortened_in_the_middle() -> None:
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


def test_ablated_and_steered_models(place: Path, call: Call, tmp_path: Path) -> None:
    model, tok = gh.load(place / "alone")
    vector = gh.steering_vector(model, tok, ["to be"], ["arms"])
    vector.save(tmp_path / "to=be.safetensors")
    words = ("eval", place / "alone", place / "validation.txt", "--device", "cpu", "--json")
    edited = call(
        *words, "--ablate", "z.0[head=1]", "--ablate", "ffn_out.0", "--steer", f"{tmp_path}/to=be.safetensors=-2"
    )
    edits = {"z.0[head=1]": 0.0, "ffn_out.0": 0.0, vector.site: gh.inspection.add(-2 * vector.vector)}
    with gh.edit(model, edits):
        expected = gh.evaluate(model, tok, place / "validation.txt").metrics
    assert json.loads(edited.out)["metrics"] == expected != json.loads(call(*words).out)["metrics"]
    assert "did you mean ffn_out.0" in call(*words, "--ablate", "ffn_ot.0").err
    assert "must be FILE=SCALE" in call(*words, "--steer", f"{tmp_path}/to=be.safetensors").err
    assert (
        "made for another model"
        in call("eval", "python-3m", "stdlib", "--steer", f"{tmp_path}/to=be.safetensors=1").err
    )


def test_tasks_without_lm_eval_and_beside_data(place: Path, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.delitem(sys.modules, "glasshouse.evaluation.harness", raising=False)
    tasks = ("eval", place / "alone", "--tasks", "arc_easy")
    expected = "error: tasks need lm-eval; install it with pip install 'glasshouse[lm-eval]'.\n"
    assert call(*tasks) == Done(1, "", expected)
    assert "both data and --tasks were given" in call(*tasks, place / "validation.txt").err
    assert "--n-best is for evaluations on data" in call(*tasks, "--n-best", "1").err
    assert "--num-fewshot is for tasks; add --tasks" in call("eval", place / "alone", "--num-fewshot", "1").err
