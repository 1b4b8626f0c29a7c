"""LoRA on float32, int8 and int4 weights: held-out loss over seeds, and memory beside the plan's.

    python benchmarks/quantized_lora.py [--parts loss memory] [--out runs/quantized-lora] [--seeds 3] [--steps 40]

Needs no download: the base model is the bundled python-3m, the conversations are built in (extra cldr), and memory is
that of a GPT-2 with random weights. Minutes on two idle cores. A run that was interrupted resumes.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import multiprocessing
import re
import statistics
from itertools import islice
from pathlib import Path

import torch
from torch import nn

import glasshouse as gh
from glasshouse.data import Batch
from glasshouse.layers import lora
from glasshouse.layers.lora import FrozenWeights, LoRA
from glasshouse.training import Run
from glasshouse.training.optimizer import AdamW, make_optimizer
from glasshouse.training.plan import MemoryModel
from glasshouse.training.step import TrainStep

BASE = "python-3m"
WEIGHTS: tuple[FrozenWeights, ...] = ("own", "int8", "int4")
LORA = {"rank": 8, "targets": ["*"]}
MIB = 2**20


def name_of(weights: FrozenWeights) -> str:
    """Return the name of weights in a table."""
    return "float32" if weights == "own" else weights


def write_chats(out: Path) -> tuple[str, str]:
    """Write some of the built-in conversations, by split; return the settings that name them."""
    out.mkdir(parents=True, exist_ok=True)
    for split, count in (("train", 3000), ("validation", 50)):
        chats = islice(gh.data.builtin_dataset("chat").items(split), count)
        (out / f"{split}.jsonl").write_text("".join(json.dumps({"messages": one}) + "\n" for one in chats))
    return f"data.path={out / 'train.jsonl'}", f"data.validation={out / 'validation.jsonl'}"


def loss(out: Path, seeds: int, steps: int) -> None:
    """Fine-tune on conversations, with the same batches and first adapters on every kind of weights."""
    common = (f"model.from={BASE}", "data.kind=chat", *write_chats(out), "data.seq_len=128")
    common += ("train.batch_tokens=1024", f"train.steps={steps}", "train.lr=1e-2", "train.schedule.warmup=10")
    common += (f"train.eval_every={steps}", f"train.save_every={steps}", "train.probes=[]", "train.sample_prompts=0")
    found: dict[FrozenWeights, list[float]] = {weights: [] for weights in WEIGHTS}
    for seed in range(seeds):
        for weights in WEIGHTS:
            table = json.dumps({**LORA, "weights": weights}).replace(":", " =")
            settings = (
                *common,
                f"train.lora={table}",
                f"train.seed={seed}",
                f"train.out={out / f'{weights}-{seed}'}",
            )
            result = gh.train(Run.load("finetune-chat", *settings), progress=False)
            found[weights].append(result.report.metrics["loss"])
            print(f"seed {seed}, {name_of(weights)}: validation loss {found[weights][-1]:.4f}", flush=True)
    print(f"\n| {BASE}, {steps} steps of LoRA on | mean | least | most | more than float32, by seed |")
    print("|---|---|---|---|---|")
    for weights, losses in found.items():
        more = ", ".join(f"{one - own:+.4f}" for one, own in zip(losses, found["own"], strict=True))
        spread = f"{statistics.fmean(losses):.4f} | {min(losses):.4f} | {max(losses):.4f}"
        print(f"| {name_of(weights)} | {spread} | {more} |")


def resident(name: str = "VmRSS") -> int:
    """Return the bytes of memory that this process has, or has had at most (`VmHWM`)."""
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return 1024 * int(found[1])


def settle() -> None:
    """Return freed memory to the system, and count the most memory anew."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")


def stored_bytes(model: nn.Module) -> int:
    """Return the bytes of a model's tensors, each counted once."""
    tensors = (*model.parameters(), *model.state_dict().values())
    return sum({one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in tensors}.values())


def measure(weights: FrozenWeights, rows: int, seq_len: int) -> tuple[int, int, int, int]:
    """Return what the plan says of weights and of a step of GPT-2, and what both take in this new process."""
    s = gh.preset("gpt2", dropout=0.0, attention_dropout=0.0, embed_dropout=0.0)
    config = LoRA(rank=8, targets=("*",), weights=weights)
    meta = gh.build(s, device="meta")
    lora.attach(meta, config)
    plan = MemoryModel(meta, AdamW()).at(rows, seq_len)
    small = gh.build(gh.preset("tiny-decoder"))  # for what a first step allocates of any model
    take_steps(small, small.spec.vocab_size, 1, 8)
    settle()
    before = resident()
    model = gh.build(s)
    lora.attach(model, config)
    settle()
    take_steps(model, s.vocab_size, rows, seq_len)
    return plan.parts["weights"], stored_bytes(model), plan.peak, resident("VmHWM") - before


def take_steps(model: nn.Module, vocab_size: int, rows: int, seq_len: int) -> None:
    """Train a model on random tokens."""
    step = TrainStep(model.train(), make_optimizer(model, AdamW()))
    for _ in range(3):
        ids = torch.randint(vocab_size, (rows, seq_len + 1))
        step(Batch(ids[:, :-1], ids[:, 1:], torch.ones(rows, seq_len, dtype=torch.bool)))


def memory(rows: int = 1, seq_len: int = 256) -> None:
    """Compare the memory of GPT-2 small with the plan, each kind of weights in a process of its own."""
    print(f"\nGPT-2 small, {rows} x {seq_len} tokens, float32:\n")
    print("| LoRA on | weights: plan | stored | step: plan | the process grows by |")
    print("|---|---|---|---|---|")
    for weights in WEIGHTS:
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            sizes = pool.apply(measure, (weights, rows, seq_len))
        print(f"| {name_of(weights)} | {' | '.join(f'{size / MIB:,.0f} MiB' for size in sizes)} |", flush=True)


def main() -> None:
    """Run the parts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", default=["loss", "memory"], choices=["loss", "memory"])
    parser.add_argument("--out", type=Path, default=Path("runs/quantized-lora"))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40)
    args = parser.parse_args()
    if "loss" in args.parts:
        loss(args.out, args.seeds, args.steps)
    if "memory" in args.parts:
        memory()


if __name__ == "__main__":
    main()
