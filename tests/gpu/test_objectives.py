"""Runs of every objective on a CUDA device, compiled and in bfloat16, beside the same runs on the CPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import glasshouse as gh

WORDS = ("tin", "oak", "wax", "ink", "gum", "fir", "ash", "ore", "elm", "dye")
SAYING = "to be or not to be, that is the question whether it is nobler. "


def write_text(folder: Path) -> Path:
    path = folder / "a.txt"
    path.write_text(SAYING * 200)
    return path


def write_preferences(folder: Path) -> Path:
    path = folder / "a.jsonl"
    pairs = [{"prompt": f"{a} {b}", "chosen": b, "rejected": f"it is {a} {b}"} for a in WORDS for b in WORDS]
    path.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    return path


def write_pairs(folder: Path) -> Path:
    path = folder / "a.tsv"
    path.write_text("source\ttarget\n" + "".join(f"{a} and {b}\t{b}, {a}\n" for a in WORDS for b in WORDS))
    return path


def save_teacher(folder: Path) -> Path:
    tok = gh.Tokenizer.train(texts=[SAYING], vocab_size=270)
    torch.manual_seed(1)
    gh.save(gh.build(gh.preset("tiny-decoder", vocab_size=len(tok))), tok, folder / "teacher")
    return folder / "teacher"


CASES = {
    "dpo": (write_preferences, "tiny-decoder", {"beta": 0.5}),
    "distillation": (write_text, "tiny-decoder", {}),
    "multi_token": (write_text, "tiny-decoder", {"n": 3}),
    "contrastive": (write_pairs, "tiny-encoder", {"temperature": 0.1}),
}


@pytest.mark.parametrize("kind", CASES)
def test_a_run_is_nearly_that_of_the_cpu(kind: str, tmp_path: Path) -> None:
    write, preset, fields = CASES[kind]
    data = {"path": str(write(tmp_path)), "seq_len": 32, "vocab_size": 270}
    if kind == "distillation":
        fields = {"teacher": str(save_teacher(tmp_path))}
    losses, metrics = [], []
    for device, more in (("cpu", {"precision": "float32"}), ("cuda", {"compile": "yes"})):
        train: dict[str, Any] = {
            **{"objective": {"kind": kind, **fields}, "steps": 24, "batch_tokens": 1024, "lr": 0.001},
            **{"eval_every": 24, "save_every": 24, "device": device, "out": str(tmp_path / device), **more},
        }
        table = {"model": {"preset": preset, "n_layers": 1, "dropout": 0.0}, "data": data, "train": train}
        result = gh.train(gh.Run.from_dict(table), progress=False)
        lines = [json.loads(line) for line in (tmp_path / device / "metrics.jsonl").read_text().splitlines()]
        losses.append([line["loss"] for line in lines if "loss" in line])
        metrics.append(result.report.metrics)
    assert len(losses[0]) == 24
    assert losses[0][-1] < 0.9 * losses[0][0]
    tolerance = 0.03 * losses[0][0]  # as of bfloat16 in test_training.py; the loss of dpo falls to nearly zero
    assert losses[1] == pytest.approx(losses[0], abs=tolerance)
    assert metrics[1].keys() == metrics[0].keys()
    assert metrics[1]["loss"] == pytest.approx(metrics[0]["loss"], abs=tolerance)
