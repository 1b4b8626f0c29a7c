"""What FSDP2 costs on one GPU: a training step of a sharded model in one process, against the plain path.

    python benchmarks/parallel_overhead.py [--model 1.2B] [--rounds 5] [--kinds shard replicate]

With one process there is nobody to communicate with, so what is left is the overhead: copies into and out of what
would be sent, and compilation by blocks instead of model and loss at once. Both steps train the same new decoder on
the same batches, take turns, and are timed within one process.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time

import torch
from figures import add_save, record, save

import glasshouse as gh
from glasshouse import device as machine
from glasshouse.data import Batch
from glasshouse.training.distributed.fsdp import parallelize
from glasshouse.training.distributed.processes import Parallel, Processes, join_processes
from glasshouse.training.optimizer import AdamW, make_optimizer
from glasshouse.training.step import ShardedTrainStep, TrainStep

MODELS = {
    "1.2B": {"d_model": 2048, "n_layers": 20, "n_heads": 16, "n_kv_heads": 16, "d_ff": 5632, "vocab_size": 50_304},
    "tiny": {"d_model": 64, "n_layers": 2, "n_heads": 4, "n_kv_heads": 4, "d_ff": 128, "vocab_size": 512},
}
STEPS, WARMUP_STEPS = 5, 4  # of a round, and before the first


def make_step(model: str, kind: str, processes: Processes, device: torch.device) -> TrainStep:
    """Return the compiled step of a new model; `plain` is that of one process."""
    torch.manual_seed(0)
    spec = gh.preset("qwen3-small", max_len=1024, **MODELS[model])
    precision, settings = machine.compute_dtype(device), {"defer_logits": True, "grad_clip": 1.0}
    if kind == "plain":
        built = gh.build(spec, device=device)
        step = TrainStep(built, make_optimizer(built, AdamW()), precision=precision, **settings)
    else:
        built = gh.build(spec, device="meta")
        parallelize(built, Parallel(kind=kind), processes, device, precision)  # type: ignore[arg-type]
        optimizer = make_optimizer(built, AdamW())
        step = ShardedTrainStep(built, optimizer, precision=precision, reduce=processes.sum, **settings)
    if machine.compiles_by_default(device):
        step.compile()
    return step


def seconds(step: TrainStep, batch: Batch, grad_accum: int, count: int) -> float:
    """Return the seconds per step, over some steps that run ahead of the host as in a run."""
    began = time.perf_counter()
    futures = [step.launch(batch, grad_accum) for _ in range(count)]
    for future in futures:
        future.result()
    return (time.perf_counter() - began) / count


def main() -> None:
    """Print the seconds per step of each, and the ratio to the plain path, by rounds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="1.2B")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", type=int, default=32, help="sequences of 1,024 tokens per step")
    parser.add_argument("--grad-accum", type=int, default=2)
    parser.add_argument("--kinds", nargs="+", default=["shard", "replicate"])
    add_save(parser)
    chosen = parser.parse_args()
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29533"}
    with join_processes(Parallel(kind="shard"), machine.fastest()) as (processes, device):
        ids = torch.randint(MODELS[chosen.model]["vocab_size"], (chosen.rows, 1025))
        batch = Batch(ids[:, :-1], ids[:, 1:], torch.ones(chosen.rows, 1024, dtype=torch.bool)).to(device)
        steps = {kind: make_step(chosen.model, kind, processes, device) for kind in ("plain", *chosen.kinds)}
        weights = sum(weight.numel() for weight in steps["plain"].model.parameters())
        print(f"{weights:,} parameters on {machine.describe(device)}, {chosen.rows * 1024:,} tokens per step")
        for step in steps.values():
            seconds(step, batch, chosen.grad_accum, WARMUP_STEPS)
        times: dict[str, list[float]] = {kind: [] for kind in steps}
        for _ in range(chosen.rounds):
            for kind, step in steps.items():
                times[kind].append(seconds(step, batch, chosen.grad_accum, STEPS))
        for kind, measured in times.items():
            ratios = [one / plain for one, plain in zip(measured, times["plain"], strict=True)]
            middle, spread = statistics.median(ratios), (max(ratios) - min(ratios)) / 2
            print(f"{kind:10} {statistics.median(measured):8.3f} s per step   {middle:.3f} ± {spread:.3f} of plain")
            if kind != "plain":
                record(f"parallel_overhead.{kind}", ratios, 3)
        save(chosen.save, device)


if __name__ == "__main__":
    main()
