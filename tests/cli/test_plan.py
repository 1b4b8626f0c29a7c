"""The command that plans: every line for people, one object for scripts, and one line for what is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from saved_page import unpack

from cli.runner import Call
from glasshouse.training.setup import choice

RUN = """
[model]
preset = "llama-1b"

[data]
seq_len = 2048
vocab_size = 128256

[train]
steps = 1000
batch_tokens = 1048576
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    Path("run.toml").write_text(RUN)
    return "run.toml"


def test_plan_of_a_run(call: Call, run: str) -> None:
    done = call("plan", run, "--gpus", "64", "--gpu", "h100", "--price", "2.5", "train.parallel.kind=hybrid")
    assert done.code == 0, done.err
    rows = dict(line.strip().split("  ", 1) for line in done.out.splitlines())
    assert rows["model"].strip() == "1,235,814,400 parameters"
    assert rows["layout"].strip() == "hybrid (8 replicas, 8 shards): set explicitly"
    assert "8 sequences a GPU" in rows["batch"]
    assert {
        "weights",
        "optimizer",
        "activations",
        "memory",
        "all_gather",
        "reduce_scatter",
        "all_reduce",
    } <= rows.keys()
    assert "days" in rows["run"]
    assert rows["KV cache, grouped-query (8)"].strip() == "32,768 bytes a token"
    table = json.loads(call("plan", run, "--gpus", "64", "--gpu", "h100", "--price", "2.5", "--json").out)
    assert table["gpus"] == 64
    assert table["n_parameters"] == 1_235_814_400
    assert table["cost"] == pytest.approx(table["days"] * 24 * 64 * 2.5)
    assert table["memory"]["peak"] == sum(table["memory"]["parts"].values())


def test_figures_of_the_gpu_and_settings_can_be_given(call: Call, run: str) -> None:
    def plan(*words: str) -> dict[str, object]:
        return json.loads(call("plan", run, "--json", *words).out)

    usual, faster = plan(), plan("--tflops", "2000", "--bandwidth", "10")
    assert faster["tokens_per_second"] > usual["tokens_per_second"]  # type: ignore[operator]
    assert plan("--mfu", "0.4")["mfu"] == 0.4
    assert plan("--memory", "40")["rows"] < usual["rows"]  # type: ignore[operator]
    assert plan("train.steps=2000")["days"] == pytest.approx(2 * usual["days"])  # type: ignore[operator]


def test_plan_of_serving(call: Call) -> None:
    done = call("plan", "llama-1b", "--requests", "64", "--prompt", "1024", "--new", "256")
    assert done.code == 0, done.err
    assert [line.split()[0] for line in done.out.splitlines()[-2:]] == ["own", "copy"]
    table = json.loads(call("plan", "llama-1b", "--requests", "1", "--json").out)
    assert table["kv_bytes_per_token"] == 32_768
    assert [one["weights"] for one in table["choices"]] == ["own", "copy", "int8"]


def test_plan_errors_are_one_line(call: Call, run: str) -> None:
    cases = {
        ("plan", run, "--gpu", "h300"): "there is no GPU 'h300' in the list; did you mean h200?",
        ("plan", run, "--gpus", "12"): "12 GPUs, 8 a node, do not split into groups of tensor = 1",
        (
            "plan",
            run,
            "train.batch_tokens=2048",
            "--gpus",
            "8",
        ): "2048 tokens, but 8 GPUs need one each",
        ("plan", "none.toml"): "there is no file 'none.toml'",
        ("plan", run, "--mfu", "40"): "mfu is 40.0, but it must be above 0 and at most 1.",
    }
    for words, message in cases.items():
        done = call(*words)
        assert done.code == 1
        assert message in done.err
        assert done.err.count("\n") == 1


def test_the_picture_is_one_file(call: Call, run: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    done = call("plan", run, "--open")
    assert done.code == 0, done.err
    (page,) = tmp_path.glob("plan-*.html")
    assert page.as_uri() in done.err
    assert unpack(page.read_text(encoding="utf-8"))["plan"] == json.loads(call("plan", run, "--json").out)
    refused = call("plan", "gpt2", "--requests", "2", "--open")
    assert refused.code == 1
    assert refused.err.count("\n") == 1
    assert "--open" in refused.err


def test_candidates_for_some_minutes(call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_text("to be or not to be, that is the question whether it is nobler. " * 40)
    monkeypatch.setattr(choice, "time_step", lambda resolved, *_: resolved.run.train.batch_tokens / 1e4)
    words = ("plan", "--minutes", "2", "data.path=a.txt", "data.seq_len=16", "data.vocab_size=270")
    done = call(*words)
    assert done.code == 0, done.err
    header, *rows = done.out.splitlines()
    assert header.split() == ["depth", "parameters", "batch", "tokens/s", "steps", "epochs", "predicted", "loss"]
    losses = {int(row.split()[0]): float(row.split()[6]) for row in rows}
    (chosen,) = [int(row.split()[0]) for row in rows if "chosen" in row]
    assert losses[chosen] == min(losses.values())
    table = json.loads(call(*words, "--json").out)
    assert [one["depth"] for one in table["candidates"] if one["chosen"]] == [chosen]
    assert not Path("runs").exists()
    assert call("plan", "vaswani-base", "--minutes", "2").err.startswith("error: train.minutes is 2.0, which chooses")
