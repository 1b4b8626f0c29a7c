"""The whole training loop beside the bare step inside it: batches, clipping, metrics and checkpoints, on the CPU.

    python benchmarks/train_loop.py [--rounds 5] [--sizes small large]

The bare step is that of benchmarks/train_step.py: forward, backward, AdamW, over and over on one batch that is there
already. Both take turns within a round; a ratio is the median over rounds of the ratio within a round.
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
from train_step import SIZES, Size, glasshouse, make_step, ratio, seconds

import glasshouse as gh
from glasshouse.training.progress import SilentReporter
from glasshouse.training.step import StepMetrics

STEPS = {"small": (300, 100), "large": (16, 8)}  # of a run, and after how many it saves
SKIPPED = 2  # steps at the start, in which threads and memory are found


class Clock(SilentReporter):
    """Notes when steps end."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def step(self, step: int, steps: int, outcome: StepMetrics, speed: Any) -> None:  # noqa: ANN401
        self.ends.append(time.perf_counter())


def loop(size: Size, steps: int, save_every: int, place: Path, number: int) -> float:
    """Return the seconds a step of a whole run takes, checkpoints included, evaluation left out."""
    shape = {"n_layers": size.n_layers, "d_model": size.d_model, "n_heads": size.n_heads}
    drop = {"dropout": 0.0, "attention_dropout": 0.0, "embed_dropout": 0.0}
    run = {
        "model": {"preset": "gpt2", "feedforward": "gelu", **shape, **drop},
        "data": {"path": str(place / "text.txt"), "vocab_size": 263, "length": size.context},
        "train": {"steps": steps, "batch_tokens": size.tokens, "eval_every": 10**6, "eval_samples": 1}
        | {"save_every": save_every}
        | {"schedule": "constant", "lr": 1e-4, "out": str(place / f"run-{number}"), "compile": "no"},
    }
    clock = Clock()
    gh.train(gh.Run.from_dict(run), clock)
    return (clock.ends[-1] - clock.ends[SKIPPED - 1]) / (len(clock.ends) - SKIPPED)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    choice = parser.parse_args()
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads")
    for name in choice.sizes:
        size, (steps, save_every) = SIZES[name], STEPS[name]
        bare = make_step(glasshouse(size, feedforward="gelu", vocab_size=263), size, compiled=False)
        whole, alone = [], []
        with tempfile.TemporaryDirectory() as folder:
            place = Path(folder)
            letters = random.Random(0).choices(string.ascii_letters + " ", k=2**20)
            (place / "text.txt").write_text("".join(letters))
            for number in range(choice.rounds):
                seconds(bare, SKIPPED)
                before = seconds(bare, steps // 2)
                whole.append(loop(size, steps, save_every, place, number))
                alone.append(statistics.mean((before, seconds(bare, steps // 2))))
        print(
            f"{name}: {size.tokens / statistics.median(whole):,.0f} tokens/s, {ratio(alone, whole)} of the bare step"
        )


if __name__ == "__main__":
    main()
