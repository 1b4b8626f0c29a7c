"""Training throughput on one GPU: gh.train, with its defaults, against a plain PyTorch GPT-2.

    python benchmarks/training_gpu.py [--parts gpt2 modern restart] [--rounds 3] [--tokenizer FOLDER]

The peer is written as nanoGPT is: one matmul for queries, keys and values, no biases, a vocabulary padded to 50,304,
autocast, torch.compile, fused AdamW. It takes preloaded batches, so it has no data loading and no metrics to write.
Ours is the whole loop of a run on Python's standard library, from the third step on. Both have the same number of
tokens per step and per micro-batch; MFU is relative to the bfloat16 matmul that the same process measures.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from figures import add_save, record, save
from torch import Tensor, nn
from torch.nn import functional as F

import glasshouse as gh
from glasshouse import device as machine
from glasshouse.training.logging.progress import SilentReporter, Throughput
from glasshouse.training.step import StepMetrics

CONTEXT = 1024
STEPS = 8  # of a round
WARMUP_STEPS = 3  # compiling, and the first steps of a schedule
NO_DROPOUT = {"dropout": 0.0, "attention_dropout": 0.0, "embed_dropout": 0.0}
MODELS: dict[str, dict[str, Any]] = {
    "gpt2": {"preset": "gpt2", **NO_DROPOUT},
    "gpt2, no biases": {
        "preset": "gpt2",
        **NO_DROPOUT,
        "qkv_bias": False,
        "out_bias": False,
        "ffn_bias": False,
        "norm": {"kind": "layer", "bias": False},
    },
    "modern-base": {"preset": "modern-base"},
}


class PlainGPT(nn.Module):
    """GPT-2 124M in plain PyTorch; returns the loss."""

    def __init__(self, vocab_size: int = 50_304, n_layers: int = 12, d_model: int = 768, n_heads: int = 12) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.token = nn.Embedding(vocab_size, d_model)
        self.position = nn.Embedding(CONTEXT, d_model)
        self.layers = nn.ModuleList(
            nn.ModuleDict(
                {
                    "norm": nn.LayerNorm(d_model, bias=False),
                    "qkv": nn.Linear(d_model, 3 * d_model, bias=False),
                    "out": nn.Linear(d_model, d_model, bias=False),
                    "ffn_norm": nn.LayerNorm(d_model, bias=False),
                    "up": nn.Linear(d_model, 4 * d_model, bias=False),
                    "down": nn.Linear(4 * d_model, d_model, bias=False),
                }
            )
            for _ in range(n_layers)
        )
        self.norm = nn.LayerNorm(d_model, bias=False)
        for weight in self.parameters():
            if weight.dim() == 2:
                nn.init.normal_(weight, std=0.02)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        rows, length = ids.shape
        x = self.token(ids) + self.position(torch.arange(length, device=ids.device))
        for layer in self.layers:
            parts = layer["qkv"](layer["norm"](x)).chunk(3, -1)
            q, k, v = (part.view(rows, length, self.n_heads, -1).transpose(1, 2) for part in parts)
            z = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + layer["out"](z.transpose(1, 2).reshape(rows, length, -1))
            x = x + layer["down"](F.gelu(layer["up"](layer["ffn_norm"](x))))
        logits = F.linear(self.norm(x), self.token.weight)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def time_plain(rows: int, grad_accum: int, rounds: int) -> list[float]:
    """Return the tokens per second of the peer in each round."""
    device = torch.device("cuda")
    model = PlainGPT().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    compiled = torch.compile(model)
    ids = torch.randint(50_257, (8, rows, CONTEXT + 1), device=device)

    def step() -> None:
        for number in range(grad_accum):
            batch = ids[number % len(ids)]
            with torch.autocast("cuda", torch.bfloat16):
                loss = compiled(batch[:, :-1].contiguous(), batch[:, 1:].contiguous()) / grad_accum
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    for _ in range(WARMUP_STEPS):
        step()
    speeds = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(STEPS):
            step()
        torch.cuda.synchronize()
        speeds.append(STEPS * grad_accum * rows * CONTEXT / (time.perf_counter() - start))
    return speeds


class StepTimer(SilentReporter):
    """Records when steps end."""

    def __init__(self) -> None:
        self.ends: list[float] = []
        self.mfu_per_speed = 0.0  # MFU of one token per second

    def on_step_end(self, step: int, steps: int, metrics: StepMetrics, throughput: Throughput) -> None:
        self.ends.append(time.perf_counter())
        self.mfu_per_speed = throughput.mfu / throughput.tokens_per_second  # both include compiling at first

    def log(self, message: str) -> None:
        if message.startswith(("not compiled", "out of memory")):
            print(f"  {message}")


def run_settings(model: dict[str, Any], folder: Path, args: argparse.Namespace, steps: int) -> gh.Run:
    train: dict[str, Any] = {"steps": steps, "batch_tokens": args.batch_tokens, "grad_accum": args.grad_accum}
    train |= {"eval_every": 10**6, "save_every": 10**6, "eval_samples": 1, "sample_prompts": 0, "out": str(folder)}
    train |= {"keep_snapshots": 0, "lr": 1e-4, "schedule": "constant", "compile": "yes"}  # as in a long run
    data = {"path": "stdlib", "seq_len": CONTEXT, "tokenizer": str(args.tokenizer)}
    return gh.Run.from_dict({"model": model, "data": data, "train": train})


def time_ours(model: dict[str, Any], folder: Path, args: argparse.Namespace) -> tuple[list[float], StepTimer]:
    """Return the tokens per second of gh.train in each round, which are parts of one run."""
    timer = StepTimer()
    torch.cuda.reset_peak_memory_stats()
    # The last step is not timed: it is validated and saved.
    gh.train(run_settings(model, folder, args, WARMUP_STEPS + args.rounds * STEPS + 1), timer)
    rows = args.batch_tokens // CONTEXT
    ends = timer.ends[WARMUP_STEPS - 1 :: STEPS]
    return [STEPS * rows * CONTEXT / (end - start) for start, end in itertools.pairwise(ends)], timer


def show(name: str, speeds: list[float], beside: str = "", *, figure: str) -> None:
    memory = torch.cuda.max_memory_allocated() / 2**30
    record(f"training_gpu.{figure}", speeds, 0, "tokens/s")
    record(f"training_gpu.{figure}_memory", memory, 1, "GiB")
    low, high = min(speeds), max(speeds)
    print(
        f"{name:32} {statistics.median(speeds):9,.0f} tokens/s [{low:,.0f} - {high:,.0f}] {memory:5.1f} GiB {beside}",
        flush=True,
    )
    gc.collect()
    torch.cuda.empty_cache()
    torch.compiler.reset()


def first_step(args: argparse.Namespace) -> None:
    """Print the seconds from the start of gh.train to the end of the first step; for a process of its own."""
    timer, start = StepTimer(), time.perf_counter()
    gh.train(run_settings(MODELS["gpt2"], args.first_step, args, args.steps), timer)
    print(f"start {args.steps} of a run: first step after {timer.ends[0] - start:.1f} s, imports not included")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", nargs="+", default=["gpt2", "modern", "restart"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batch-tokens", type=int, default=480 * CONTEXT, help="tokens per step (default 491,520)")
    parser.add_argument("--grad-accum", type=int, default=8, help="micro-batches per step (default 8)")
    parser.add_argument("--tokenizer", type=Path, help="folder of a tokenizer (default: one of 50,257 is trained)")
    parser.add_argument("--first-step", type=Path, help="only time the first step of the run in this folder")
    parser.add_argument("--steps", type=int, default=1, help="with --first-step: steps of the run")
    add_save(parser)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        if args.tokenizer is None:
            args.tokenizer = folder / "tokenizer"
            texts = (text for _, text in gh.data.builtin_dataset("stdlib").items("train"))
            gh.Tokenizer.train(texts=texts, vocab_size=50_257).save(args.tokenizer)
        if args.first_step is not None:
            first_step(args)
            return
        device = torch.device("cuda")
        peak = machine.measure_peak_flops(device, torch.bfloat16) / 1e12
        print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}, bfloat16 matmul {peak:.0f} TFLOP/s")
        peer: list[float] = []
        if "gpt2" in args.parts:
            peer = time_plain(args.batch_tokens // CONTEXT // args.grad_accum, args.grad_accum, args.rounds)
            show("plain PyTorch, as nanoGPT", peer, figure="peer")
        for name, model in MODELS.items():
            if name.partition("-")[0].partition(",")[0] in args.parts:
                speeds, timer = time_ours(model, folder / name.replace(" ", ""), args)
                speed = statistics.median(speeds)
                beside = f", {speed / statistics.median(peer):.2f} of the peer" if peer else ""
                figure = name.replace(", no biases", "_no_bias")
                show(f"gh.train, {name}", speeds, f"MFU {speed * timer.mfu_per_speed:.0%}{beside}", figure=figure)
                if peer:
                    record(f"training_gpu.{figure}_ratio", speed / statistics.median(peer), 2)
        if "restart" in args.parts:
            start = [
                sys.executable,
                __file__,
                "--tokenizer",
                str(args.tokenizer),
                "--first-step",
                str(folder / "run"),
            ]
            for steps, which in (("1", "first"), ("2", "second"), ("3", "third")):  # the last two resume the run
                done = subprocess.run([*start, "--steps", steps], capture_output=True, text=True, check=True)
                print(done.stdout.strip(), flush=True)
                seconds = float(re.findall(r"after ([\d.]+) s", done.stdout)[0])
                record(f"training_gpu.{which}_start", seconds, 1, "s")
        save(args.save, device)


if __name__ == "__main__":
    main()
