"""What `glasshouse plan` says beside what a GPU takes: memory and tokens per second of training steps and decoding.

    python benchmarks/plan.py [--parts decoding filling training] [--sizes gpt2 gpt2-medium llama-1b] [--minutes 7]

The plan is given the rate of a large matmul and the bandwidth of a copy that the same process measures, and nothing
else. Each case is `TrainStep` as a run uses it, compiled and in bfloat16, on random tokens: AdamW and Muon, with and
without activation checkpointing, one micro-batch and two, and the largest micro-batch that the trainer would choose.
Peak memory is torch's max_memory_allocated of steps after the third. Decoding is that of a warmed-up engine on
llama-1b, 1 and 64 sequences of 128 + 256 tokens, from the first token after the prompts on.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import glasshouse as gh
from glasshouse import device as machine
from glasshouse.data import Batch
from glasshouse.models import Model
from glasshouse.objectives.loss.cross_entropy import compute_loss
from glasshouse.training.optimizer import make_optimizer
from glasshouse.training.plan import Gpu, MemoryModel
from glasshouse.training.plan.serving import load_meta_decoder, plan_serving
from glasshouse.training.plan.speed import compute_seconds
from glasshouse.training.plan.training import USABLE, choose_grad_accum
from glasshouse.training.run import Train
from glasshouse.training.setup.model import prepare_for_training
from glasshouse.training.step import TrainStep

GIB = 2**30
WARMUP, STEPS = 3, 4
NO_DROPOUT = {"dropout": 0.0, "attention_dropout": 0.0, "embed_dropout": 0.0}
DEVICE = torch.device("cuda")


@dataclass(frozen=True)
class Case:
    """One configuration of a training step."""

    preset: str
    rows: int  # of a micro-batch; 0: as many as the trainer would choose
    seq_len: int
    grad_accum: int = 1
    optimizer: str = "adamw"
    checkpointing: bool = False


CASES = [
    Case("gpt2", 32, 1024),
    Case("gpt2-medium", 24, 1024),
    Case("llama-1b", 8, 2048),
    Case("llama-1b", 8, 2048, grad_accum=2, optimizer="muon"),
    Case("gpt2", 32, 1024, grad_accum=2, optimizer="muon"),
    Case("gpt2-medium", 24, 1024, grad_accum=2, optimizer="muon"),
    Case("llama-1b", 8, 2048, checkpointing=True),
    Case("gpt2", 32, 1024, checkpointing=True),
    Case("gpt2-medium", 24, 1024, checkpointing=True),
    Case("llama-1b", 1, 2048, optimizer="muon"),
]
FILLING = [Case("llama-1b", 0, 2048), Case("gpt2-medium", 0, 1024), Case("gpt2", 0, 1024)]


def measure_gpu() -> Gpu:
    """Return this GPU, with the two speeds that a plan is made from."""
    flops = machine.measure_peak_flops(DEVICE, torch.bfloat16)
    source = torch.empty(2**31, dtype=torch.uint8, device=DEVICE)
    copied = torch.empty_like(source)
    times = []
    for _ in range(12):
        torch.cuda.synchronize()
        start = time.perf_counter()
        copied.copy_(source)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    bandwidth = 2 * len(source) / statistics.median(times[2:])  # read and written
    return Gpu(torch.cuda.get_device_name(), machine.memory_bytes(DEVICE), flops, bandwidth, 1e9, 1e9)


def build(case: Case, device: str) -> tuple[Model, Train]:
    """Return the model of a case, and the settings that it is trained with."""
    train = gh.Run.from_dict(
        {
            "model": {"preset": case.preset},
            "train": {"optimizer": {"kind": case.optimizer}, "activation_checkpointing": case.checkpointing},
        }
    ).train
    dropout = NO_DROPOUT if case.preset.startswith("gpt2") else {}
    model = gh.build(gh.preset(case.preset, **dropout), device=device)
    prepare_for_training(model, train)
    return model, train


def predict(case: Case, gpu: Gpu) -> tuple[Case, dict[str, Any]]:
    """Return the case, its micro-batch chosen, and what the plan says of it."""
    model, train = build(case, "meta")
    memory = MemoryModel(model, train.chosen_optimizer(), precision=torch.bfloat16, checkpointing=case.checkpointing)
    if not case.rows:  # of a batch that is far too large
        batch = 4096
        grad_accum = choose_grad_accum(memory, batch, case.seq_len, USABLE * gpu.memory)
        rows = -(-batch // grad_accum)
        case = Case(case.preset, rows, case.seq_len, 2, case.optimizer, case.checkpointing)
    at = memory.at(case.rows, case.seq_len, case.grad_accum)
    seconds = compute_seconds(memory, gpu, rows=case.rows, seq_len=case.seq_len, grad_accum=case.grad_accum)
    parts = {name: round(size / GIB, 2) for name, size in at.parts.items()}
    return case, {"memory": at.peak, "seconds": seconds, "moment": at.moment, "parts": parts}


def measure(case: Case) -> dict[str, Any]:
    """Return the peak memory and the seconds of a step."""
    torch.manual_seed(0)
    model, train = build(case, "cuda")
    step = TrainStep(
        model,
        make_optimizer(model, train.chosen_optimizer()),
        loss_fn=compute_loss,
        defer_logits=True,
        precision=torch.bfloat16,
        on_fallback=lambda reason: print(f"  {reason}", flush=True),
    )
    step.compile()
    size = (case.rows * case.grad_accum, case.seq_len + 1)
    ids = torch.randint(model.spec.vocab_size, size, device=DEVICE)
    mask = torch.ones(size[0], case.seq_len, dtype=torch.bool, device=DEVICE)
    batch = Batch(ids[:, :-1].contiguous(), targets=ids[:, 1:].contiguous(), loss_mask=mask)
    began = time.perf_counter()
    for _ in range(WARMUP):
        step(batch, case.grad_accum)
    torch.cuda.synchronize()
    warm = time.perf_counter() - began
    torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    for _ in range(STEPS):
        step(batch, case.grad_accum)
    torch.cuda.synchronize()
    seconds = (time.perf_counter() - start) / STEPS
    found = {"memory": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}
    return {**found, "seconds": seconds, "warmup": warm}


def compare_training(cases: list[Case], gpu: Gpu, sizes: list[str], deadline: float) -> list[dict[str, Any]]:
    """Print every case that begins before the deadline, and return the figures."""
    print(
        f"{'case':48} {'GiB':>6} {'plan':>6} {'ratio':>6} {'tokens/s':>9} {'plan':>9} {'ratio':>6}",
        flush=True,
    )
    figures = []
    for case in cases:
        if case.preset not in sizes or time.perf_counter() > deadline:
            continue
        gc.collect()
        torch.cuda.empty_cache()
        torch.compiler.reset()
        case, planned = predict(case, gpu)
        name = f"{case.preset}, {case.grad_accum} x {case.rows} x {case.seq_len}, {case.optimizer}"
        name += ", checkpointing" if case.checkpointing else ""
        try:
            found = measure(case)
        except (RuntimeError, gh.GlasshouseError) as error:
            print(
                f"{name:48} failed: {str(error).splitlines()[0][:90]}; plan {planned['memory'] / GIB:.1f}",
                flush=True,
            )
            continue
        tokens = case.rows * case.grad_accum * case.seq_len
        print(
            f"{name:48} {found['memory'] / GIB:6.1f} {planned['memory'] / GIB:6.1f} "
            f"{planned['memory'] / found['memory']:6.3f} {tokens / found['seconds']:9,.0f} "
            f"{tokens / planned['seconds']:9,.0f} {found['seconds'] / planned['seconds']:6.3f}   "
            f"peak in {planned['moment']}: {planned['parts']}; reserved {found['reserved'] / GIB:.1f}, "
            f"warm-up {found['warmup']:.0f} s",
            flush=True,
        )
        figures.append({"case": name, "planned": planned, "measured": found})
    return figures


def compare_decoding(gpu: Gpu, rounds: int = 3) -> list[dict[str, Any]]:
    """Print the decoding of llama-1b, one sequence and 64, and return the figures."""
    prompt, new = 128, 256
    planned_model = load_meta_decoder("llama-1b")
    model = gh.build(gh.preset("llama-1b", end_ids=()), device=DEVICE, dtype=torch.bfloat16).eval()
    figures = []
    for requests in (1, 64):
        plan = plan_serving(planned_model, gpu, requests=requests, prompt=prompt, new=new).choices[0]
        engine = gh.Engine(model, slots=requests, max_len=prompt + new)
        engine.warm_up()
        rates = []
        for _ in range(rounds):
            prompts = torch.randint(model.spec.vocab_size, (requests, prompt)).tolist()
            submitted = [engine.submit(ids, max_new_tokens=new) for ids in prompts]
            while not all(request.ids for request in submitted):
                engine.step()
            left = sum(new - len(request.ids) for request in submitted)
            torch.cuda.synchronize()
            start = time.perf_counter()
            engine.run()
            torch.cuda.synchronize()
            rates.append(left / (time.perf_counter() - start))
        measured = statistics.median(rates)
        print(
            f"llama-1b, decoding {requests:2} sequences: {measured:9,.0f} tokens/s, plan "
            f"{plan.tokens_per_second:9,.0f}, ratio {measured / plan.tokens_per_second:.3f}",
            flush=True,
        )
        figures.append({"requests": requests, "planned": plan.tokens_per_second, "measured": rates})
        del engine
        torch.compiler.reset()
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parts = ["decoding", "filling", "training"]
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts)
    parser.add_argument("--sizes", nargs="+", default=["gpt2", "gpt2-medium", "llama-1b"])
    parser.add_argument("--minutes", type=float, default=7.0, help="no case starts after them")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    args = parser.parse_args()
    began = time.perf_counter()
    gpu = measure_gpu()
    print(
        f"torch {torch.__version__}, {gpu.name}: {gpu.memory / GIB:.1f} GiB, bfloat16 matmul {gpu.flops / 1e12:.0f} "
        f"TFLOP/s, copy {gpu.bandwidth / 1e12:.2f} TB/s\n",
        flush=True,
    )
    figures = compare_decoding(gpu) if "decoding" in args.parts else []
    cases = (FILLING if "filling" in args.parts else []) + (CASES if "training" in args.parts else [])
    if cases:
        figures += compare_training(cases, gpu, args.sizes, began + 60 * args.minutes)
    if args.json:
        args.json.write_text(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
