"""Overhead of recording activations in GPT-2 small on the CPU, compared with TransformerLens and transformers.

    python benchmarks/inspection.py [--rounds 5] [--parts off maps long probes] [--threads 2]

off: a training step of a model that was recorded and edited before, compared with one that never was.
maps: all attention maps and the residual stream of 512 tokens, each library in its own process; they take turns, and
      memory is the process's peak above its level before the first call.
long: one head's whole attention map at 8,192 tokens in layer 4, compared with the fused pass up to that layer.
probes: a training step with probes at each checkpoint, compared with one without.

A file `inspect.py` here would shadow Python's own module.
"""

from __future__ import annotations

import argparse
import os
import random
import resource
import statistics
import string
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import torch
from figures import add_save, record, save
from torch import Tensor
from train_loop import WARMUP_STEPS, StepTimer
from train_step import ratio, ratios

import glasshouse as gh
from glasshouse.objectives import make_dataset
from glasshouse.training.logging.checkpoint_log import Probes, first_texts
from glasshouse.training.setup.datasets import open_datasets

LAYERS, HEADS, WIDTH, VOCAB_SIZE, TOKENS = 12, 12, 768, 50257, 512
LONG, LAYER = 8192, 4
CONTEXT, SAVE_EVERY = 128, 20  # of the runs with probes; by default a run of 1,000 steps saves every 100


def build_model(max_len: int = 1024) -> gh.models.Model:
    torch.manual_seed(0)
    return gh.build(gh.preset("gpt2", max_len=max_len)).eval()


def random_ids(count: int) -> Tensor:
    return torch.randint(0, VOCAB_SIZE, (1, count), generator=torch.Generator().manual_seed(0))


# What each process does: a function that runs one forward pass and returns the bytes recorded.


def record_ours(stop: bool) -> Callable[[], int]:
    model, ids = build_model(), random_ids(TOKENS)

    def forward() -> int:
        with gh.record(model, "pattern.*", "embed", "resid_post.*", stop=stop) as recording:
            model(ids)
        return size(recording.values())

    return forward


def run_with_cache(everything: bool) -> Callable[[], int]:
    import transformer_lens as tl

    shape = {"n_layers": LAYERS, "d_model": WIDTH, "n_heads": HEADS, "d_head": WIDTH // HEADS, "d_mlp": 4 * WIDTH}
    rest = {"n_ctx": 1024, "d_vocab": VOCAB_SIZE, "act_fn": "gelu_new", "normalization_type": "LN", "device": "cpu"}
    model, ids = tl.HookedTransformer(tl.HookedTransformerConfig(**shape, **rest)).eval(), random_ids(TOKENS)
    names = None if everything else lambda name: name.endswith(("hook_pattern", "hook_resid_pre", "hook_resid_post"))

    def forward() -> int:
        _, cache = model.run_with_cache(ids, names_filter=names)
        return size(cache.values())

    return forward


def transformers_outputs() -> Callable[[], int]:
    import transformers as hf

    model, ids = hf.GPT2LMHeadModel(hf.GPT2Config(attn_implementation="eager")).eval(), random_ids(TOKENS)

    def forward() -> int:
        out = model(ids, output_attentions=True, output_hidden_states=True)
        return size([*out.attentions, *out.hidden_states])

    return forward


def forward_only() -> Callable[[], int]:
    model, ids = build_model(), random_ids(TOKENS)
    return lambda: size([model(ids)])


def record_long(name: str) -> Callable[[], int]:
    model, ids = build_model(LONG), random_ids(LONG)

    def forward() -> int:
        with gh.record(model, name, stop=True) as recording:
            model(ids)
        return size(recording.values())

    return forward


def size(tensors: Any) -> int:  # noqa: ANN401
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


SYSTEMS: dict[str, Callable[[], Callable[[], int]]] = {
    "forward pass alone": forward_only,
    "ours": lambda: record_ours(stop=False),
    "ours, stopped after the last site": lambda: record_ours(stop=True),
    "TransformerLens, run_with_cache": lambda: run_with_cache(everything=True),
    "TransformerLens, the same sites": lambda: run_with_cache(everything=False),
    "transformers, eager, all outputs": transformers_outputs,
    "fused pass up to the layer": lambda: record_long(f"z.{LAYER}"),
    "one head's attention map": lambda: record_long(f"pattern.{LAYER}[head=0]"),
}


def work(name: str, threads: int) -> None:
    """Run a forward pass per line of stdin, and print seconds, bytes recorded, and peak memory above the baseline."""
    torch.set_num_threads(threads)
    with torch.no_grad():
        forward = SYSTEMS[name]()
        torch.randn(256, 256) @ torch.randn(256, 256)
        before = resident()
        print("ready", flush=True)
        for _ in sys.stdin:
            start = time.perf_counter()
            n_bytes = forward()
            taken = time.perf_counter() - start
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
            print(taken, n_bytes, peak - before, peak, flush=True)


def resident() -> int:
    with open("/proc/self/statm") as file:  # noqa: PTH123
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Worker:
    """One of the processes."""

    def __init__(self, name: str, threads: int) -> None:
        command = [sys.executable, __file__, "--worker", name, "--threads", str(threads)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.times: list[float] = []
        self.n_bytes = self.above = self.peak = 0.0
        while (line := self.out.readline().strip()) != "ready":
            if not line and self.process.poll() is not None:
                raise SystemExit(f"{name} could not be run; see above.")

    @property
    def out(self) -> IO[str]:
        assert self.process.stdout is not None
        return self.process.stdout

    def run(self, count: bool) -> None:
        assert self.process.stdin is not None
        print("go", file=self.process.stdin, flush=True)
        taken, self.n_bytes, self.above, self.peak = map(float, self.out.readline().split())
        if count:
            self.times.append(taken)


def compare(names: list[str], rounds: int, threads: int) -> dict[str, Worker]:
    workers = {name: Worker(name, threads) for name in names}
    for number in range(rounds + 1):  # the first is the warm-up
        for name, worker in workers.items():
            worker.run(number > 0)
            print(f"  round {number}: {name}", file=sys.stderr)
    for worker in workers.values():
        worker.process.terminate()
    return workers


def maps(rounds: int, threads: int) -> None:
    workers = compare(list(SYSTEMS)[:6], rounds, threads)
    print(f"all attention maps and the residual stream of {TOKENS} tokens, {rounds} rounds")
    base = workers["ours"]
    for name, one in workers.items():
        seconds, peak, recorded = statistics.median(one.times), one.above / 2**20, one.n_bytes / 2**20
        metrics = f"{seconds:.2f} s, {peak:,.0f} MiB peak, {recorded:,.0f} MiB recorded"
        speedup = "" if one is base else f"; ours {ratio(one.times, base.times)} times as fast"
        memory = "" if one is base else f", with {base.above / one.above:.2f} of the memory"
        print(f"  {name}: {metrics}{speedup}{memory}")
    record("inspection.maps", base.times, 2, "s")
    lens = workers["TransformerLens, run_with_cache"]
    record("inspection.maps_lens", lens.times, 2, "s")
    record("inspection.maps_ratio", ratios(lens.times, base.times), 2)
    record("inspection.maps_memory_ratio", base.above / lens.above, 2)


def long(rounds: int, threads: int) -> None:
    workers = compare(list(SYSTEMS)[6:], rounds, threads)
    fused, whole = workers.values()
    print(f"one head's attention map of {LONG} x {LONG} in layer {LAYER}, {rounds} rounds")
    print(f"  fused pass up to the layer: {statistics.median(fused.times):.1f} s, {fused.peak / 2**30:.2f} GiB peak")
    print(f"  with the map: {statistics.median(whole.times):.1f} s, {whole.peak / 2**30:.2f} GiB peak")
    print(f"  {ratio(whole.times, fused.times)} of the fused pass")
    record("inspection.long", ratios(whole.times, fused.times), 3)
    record("inspection.long_memory", whole.peak / 2**30, 2, "GiB")


def off(rounds: int, threads: int) -> None:
    """Time steps of two equal models in turn, one of which was recorded and edited before."""
    torch.set_num_threads(threads)
    models = [gh.build(gh.preset("gpt2", n_layers=4, d_model=128, n_heads=4, vocab_size=256)) for _ in range(2)]
    ids = torch.randint(0, 256, (8, 64), generator=torch.Generator().manual_seed(0))
    with gh.record(models[1], "*"), gh.edit(models[1], {"pattern.*": lambda value: value}):
        models[1](ids)
    times: list[list[float]] = [[], []]
    for number in range(40 * rounds):
        for one in (0, 1) if number % 2 else (1, 0):
            start = time.perf_counter()
            models[one](ids).sum().backward()
            times[one].append(time.perf_counter() - start)
    print(f"step time of a model recorded and edited before, relative to one that never was, {40 * rounds} rounds")
    print(f"  {ratio(times[1], times[0])}")
    record("inspection.off", ratios(times[1], times[0]), 3)


def probes(rounds: int, threads: int) -> None:
    """Time the steps of two equal runs in turn, one with probes at each checkpoint, and the probes alone."""
    torch.set_num_threads(threads)
    times: dict[bool, list[float]] = {False: [], True: []}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        (folder / "text.txt").write_text("".join(random.Random(0).choices(string.ascii_letters + " ", k=2**20)))
        for number in range(rounds):
            for probed in (False, True) if number % 2 else (True, False):
                times[probed].append(run_step_seconds(folder, f"{number}-{probed}", None if probed else []))
                print(f"  round {number}: {'with' if probed else 'without'}", file=sys.stderr)
        _, validation = open_datasets(gh.Run.load(folder / "0-True" / "run.toml").data, folder / "0-True")
        model, _ = gh.load(folder / "0-True" / "model")
    texts = first_texts(make_dataset(model.spec, validation, batch_size=1, seq_len=CONTEXT))
    prober = Probes(model, texts)
    prober.take(model)  # warm-up
    start = time.perf_counter()
    for _ in range(rounds):
        prober.take(model)
    taken, step = (time.perf_counter() - start) / rounds, statistics.median(times[False])
    print(f"step time with probes relative to without, a checkpoint every {SAVE_EVERY} steps, {rounds} rounds")
    print(f"  {ratio(times[True], times[False])}")
    record("inspection.probes", ratios(times[True], times[False]), 3)
    print(f"  probes take {taken:.3f} s, a step without {step:.3f} s")


def run_step_seconds(folder: Path, name: str, probes: list[str] | None) -> float:
    """Return the seconds per step, checkpoints included, evaluation and warm-up excluded."""
    drop = {"dropout": 0.0, "attention_dropout": 0.0, "embed_dropout": 0.0}
    run = {
        "model": {"preset": "gpt2", "n_layers": 4, "d_model": 128, "n_heads": 4, **drop},
        "data": {"path": str(folder / "text.txt"), "vocab_size": 263, "seq_len": CONTEXT},
        "train": {"steps": 3 * SAVE_EVERY + 1, "save_every": SAVE_EVERY, "eval_every": 10**6, "eval_samples": 1}
        | {"schedule": "constant", "lr": 1e-4, "compile": "no", "out": str(folder / name)}
        | {"sample_prompts": 0, "keep_snapshots": 0}
        | ({} if probes is None else {"probes": probes}),
    }
    timer = StepTimer()
    gh.train(gh.Run.from_dict(run), timer)
    return (timer.ends[-1] - timer.ends[WARMUP_STEPS - 1]) / (len(timer.ends) - WARMUP_STEPS)


PARTS = {"off": off, "maps": maps, "long": long, "probes": probes}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5, help="rounds, one run of each per round (default 5)")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="(default: all)")
    parser.add_argument("--threads", type=int, default=2, help="torch threads (default 2)")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    add_save(parser)
    args = parser.parse_args()
    if args.worker is not None:
        work(args.worker, args.threads)
        return
    print(f"torch {torch.__version__}, {args.threads} threads")
    for part in args.parts:
        PARTS[part](args.rounds, args.threads)
    save(args.save)


if __name__ == "__main__":
    main()
