"""Short runs on a little data, what they logged and saved, and a process that is killed while it trains."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import glasshouse as gh

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
            "schedule": {"kind": "cosine", "warmup": min(2, choices.get("steps", 2))},
            "out": str(data_folder / out),
            **choices,
        },
    }


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


KILLED = """
import json, os, signal, sys, torch
torch.set_num_threads(int(sys.argv[2]))
from glasshouse.training import Run, train
from glasshouse.training.progress import SilentReporter

class Killer(SilentReporter):
    def on_step_end(self, step, *_):
        if step == 8:
            os.kill(os.getpid(), signal.SIGKILL)

train(Run.from_dict(json.loads(sys.argv[1])), Killer())
"""


def killed(settings: dict[str, Any]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", KILLED, json.dumps(settings), str(torch.get_num_threads())],
        capture_output=True,
        timeout=120,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()
