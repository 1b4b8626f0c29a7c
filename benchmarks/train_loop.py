"""Overhead of the training loop over a bare training step: batches, gradient clipping, metrics, checkpoints; CPU.

    python benchmarks/train_loop.py [--rounds 5] [--sizes small large]

The bare step is that of benchmarks/train_step.py: forward, backward, AdamW, repeated on one preloaded batch. Both
take turns within a round; a ratio is the median over rounds of the ratio within a round.
"""

from __future__ import annotations

import argparse
import random
import statistics
import string
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from figures import add_save, record, save
from train_step import SIZES, Size, glasshouse, make_step, ratio, seconds

import glasshouse as gh
from glasshouse.training.logging.progress import SilentReporter
from glasshouse.training.step import StepMetrics

STEPS = {"small": (300, 100), "large": (16, 8)}  # steps of a run, and save_every
WARMUP_STEPS = 2  # not timed: threads start and memory is allocated


class StepTimer(SilentReporter):
    """Records when steps end."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, step: int, steps: int, outcome: StepMetrics, speed: Any) -> None:  # noqa: ANN401
        self.ends.append(time.perf_counter())


def time_loop(size: Size, steps: int, save_every: int, folder: Path, number: int) -> float:
    """Return the seconds per step of a whole run, checkpoints included, evaluation excluded."""
    shape = {"n_layers": size.n_layers, "d_model": size.d_model, "n_heads": size.n_heads}
    drop = {"dropout": 0.0, "attention_dropout": 0.0, "embed_dropout": 0.0}
    run = {
        "model": {"preset": "gpt2", "feedforward": "gelu", **shape, **drop},
        "data": {"path": str(folder / "text.txt"), "vocab_size": 263, "seq_len": size.context},
        "train": {"steps": steps, "batch_tokens": size.tokens, "eval_every": 10**6, "eval_samples": 1}
        | {"save_every": save_every}
        | {"schedule": "constant", "lr": 1e-4, "out": str(folder / f"run-{number}"), "compile": "no"},
    }
    timer = StepTimer()
    gh.train(gh.Run.from_dict(run), timer)
    return (timer.ends[-1] - timer.ends[WARMUP_STEPS - 1]) / (len(timer.ends) - WARMUP_STEPS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5, help="rounds, one run of each per round (default 5)")
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES), help="model sizes (default: all)")
    add_save(parser)
    args = parser.parse_args()
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads")
    for name in args.sizes:
        size, (steps, save_every) = SIZES[name], STEPS[name]
        bare = make_step(glasshouse(size, feedforward="gelu", vocab_size=263), size, compiled=False)
        loop_times, step_times = [], []
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            letters = random.Random(0).choices(string.ascii_letters + " ", k=2**20)
            (folder / "text.txt").write_text("".join(letters))
            for number in range(args.rounds):
                seconds(bare, WARMUP_STEPS)
                before = seconds(bare, steps // 2)
                loop_times.append(time_loop(size, steps, save_every, folder, number))
                step_times.append(statistics.mean((before, seconds(bare, steps // 2))))
        speed = size.tokens / statistics.median(loop_times)
        print(f"{name}: {speed:,.0f} tokens/s, {ratio(step_times, loop_times)} of the bare step")
        record(f"train_loop.{name}", [bare / loop for bare, loop in zip(step_times, loop_times, strict=True)], 3)
    save(args.save)


if __name__ == "__main__":
    main()
