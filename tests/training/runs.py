"""Short runs on a little data, what they logged and saved, and a process that is killed while it trains."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import processes
import torch

import glasshouse as gh
from glasshouse import device
from glasshouse.training import Run, train
from glasshouse.training.logging.progress import SilentReporter

PutRun = Callable[..., None]  # the type of a fixture

SAYING = "to be or not to be, that is the question whether it is nobler. "
KINDS = {
    "decoder": {"preset": "tiny-decoder", "n_layers": 1},
    "encoder": {"preset": "tiny-encoder", "n_layers": 1, "head": "masked_token"},
    "seq2seq": {"preset": "tiny-seq2seq", "n_layers": 1},
}


def write_data(data_folder: Path) -> None:
    (data_folder / "a.txt").write_text(SAYING * 40)
    rows = (f"{number}\t{' '.join(str(number))}" for number in range(10, 210, 3))
    (data_folder / "a.tsv").write_text("source\ttarget\n" + "\n".join(rows) + "\n")
    labelled = (f"{number} is{'' if number % 2 else ' not'} odd\t{number % 2}" for number in range(100))
    (data_folder / "labels.tsv").write_text("text\tlabel\n" + "\n".join(labelled) + "\n")


def table(data_folder: Path, kind: str = "decoder", out: str = "run", **choices: Any) -> dict[str, Any]:  # noqa: ANN401
    source = (
        {"path": str(data_folder / "a.tsv"), "kind": "pairs"}
        if kind == "seq2seq"
        else {"path": str(data_folder / "a.txt")}
    )
    return {
        "model": {**KINDS[kind], "dropout": 0.2},
        "data": {**source, "seq_len": 16, "vocab_size": 270, "val_fraction": 0.1},
        "train": {"steps": 12, "batch_tokens": 96, "save_every": 3, "eval_every": 4, "grad_accum": 3, "lr": 0.01}
        | {
            "probes": [],  # which, with the samples, take a quarter of the time,
            "sample_prompts": 0,
            "workers": 0,  # as do the threads of a run this short
            "schedule": {"kind": "cosine", "warmup": min(2, choices.get("steps", 2))},
            "out": str(data_folder / out),
            **choices,
        },
    }


def logged_table(data_folder: Path, kind: str = "decoder", out: str = "run", **choices: Any) -> dict[str, Any]:  # noqa: ANN401
    """Return settings with the probes and samples that a run has by default."""
    settings = table(data_folder, kind, out, **choices)
    for name in {"probes", "sample_prompts"} - choices.keys():
        del settings["train"][name]
    return settings


def losses(data_folder: Path, out: str = "run") -> dict[int, float]:
    lines = [json.loads(line) for line in (data_folder / out / "metrics.jsonl").read_text().splitlines()]
    found = {line["step"]: line["loss"] for line in lines}
    assert len(found) == len(lines)  # one line per step
    return found


def weights(data_folder: Path, out: str = "run") -> dict[str, torch.Tensor]:
    return dict(gh.load(data_folder / out / "model")[0].state_dict())


def assert_same(data_folder: Path, one: str, other: str) -> None:
    assert losses(data_folder, one) == losses(data_folder, other)
    left, right = weights(data_folder, one), weights(data_folder, other)
    assert left.keys() == right.keys()
    for name in left:
        assert left[name].equal(right[name]), name


class RecordingReporter:
    """Records the messages of a run, and acts at a step."""

    def __init__(self, at: int = -1, act: Callable[[], None] = lambda: None) -> None:
        self.messages: list[str] = []
        self.at, self.act = at, act

    def stage(self, name: str, done: int, total: int) -> None: ...

    def log(self, text: str) -> None:
        self.messages.append(text)

    def on_step_end(self, step: int, *_: object) -> None:
        if step == self.at:
            self.act()

    def on_validation_end(self, step: int, metrics: dict[str, float]) -> None: ...


class SignallingReporter(SilentReporter):
    """Sends signals to its own process after step 8."""

    def __init__(self, number: signal.Signals, times: int) -> None:
        self.number, self.times = number, times

    def on_step_end(self, step: int, *_: object) -> None:
        for _ in range(self.times if step == 8 else 0):
            os.kill(os.getpid(), self.number)


def train_until_signal(settings: dict[str, Any], threads: int, number: signal.Signals, times: int) -> None:
    torch.set_num_threads(threads)
    device.measure_peak_flops = lambda *_, **__: 1e12
    train(Run.from_dict(settings), SignallingReporter(number, times))


def signalled(settings: dict[str, Any], number: signal.Signals, times: int = 1) -> None:
    """Train in a process that gets a signal after step 8, and assert that it ends by it."""
    code = processes.run(train_until_signal, settings, torch.get_num_threads(), number, times)
    assert code == -number


def killed(settings: dict[str, Any]) -> None:
    signalled(settings, signal.SIGKILL)
