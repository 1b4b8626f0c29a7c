"""Looking inside a GPT-2-small shape on the CPU: what it costs, beside TransformerLens and transformers.

    python benchmarks/inspection.py [--rounds 5] [--parts off maps long probes] [--threads 2]

off: a training step of a model that was recorded and edited before, beside one that never was.
maps: all attention maps and the residual stream of 512 tokens, each system in a process of its own; they take turns,
      and the memory is the process's peak above what it held before the first call.
long: one head's whole map at 8,192 tokens in layer 4, beside the fused pass to that layer.
probes: a training step with probes at each checkpoint beside one without.

Not named after the room's verb: a file `inspect.py` here would stand in the way of Python's own module.
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
from torch import Tensor
from train_loop import SKIPPED, Clock
from train_step import ratio

import glasshouse as gh
from glasshouse.data.dataset import make_dataset
from glasshouse.training.datasets import open_datasets
from glasshouse.training.probes import Probes, first_texts

LAYERS, HEADS, WIDTH, VOCABULARY, TOKENS = 12, 12, 768, 50257, 512
LONG, LAYER = 8192, 4
CONTEXT, SAVE_EVERY = 128, 20  # of the runs with probes; a default run of 1,000 steps saves every 100


def model(max_len: int = 1024) -> gh.models.Model:
    torch.manual_seed(0)
    return gh.build(gh.preset("gpt2", max_len=max_len)).eval()


def draw(count: int) -> Tensor:
    return torch.randint(0, VOCABULARY, (1, count), generator=torch.Generator().manual_seed(0))


# What each process does: a function that looks once, and how much it has looked at, in bytes.


def ours(stop: bool) -> Callable[[], int]:
    looked_at, ids = model(), draw(TOKENS)

    def look() -> int:
        with gh.record(looked_at, "pattern.*", "embed", "resid_post.*", stop=stop) as seen:
            looked_at(ids)
        return size(seen.values())

    return look


def lens(everything: bool) -> Callable[[], int]:
    import transformer_lens as tl

    shape = {"n_layers": LAYERS, "d_model": WIDTH, "n_heads": HEADS, "d_head": WIDTH // HEADS, "d_mlp": 4 * WIDTH}
    words = {"n_ctx": 1024, "d_vocab": VOCABULARY, "act_fn": "gelu_new", "normalization_type": "LN", "device": "cpu"}
    looked_at, ids = tl.HookedTransformer(tl.HookedTransformerConfig(**shape, **words)).eval(), draw(TOKENS)
    names = None if everything else lambda name: name.endswith(("hook_pattern", "hook_resid_pre", "hook_resid_post"))

    def look() -> int:
        _, cache = looked_at.run_with_cache(ids, names_filter=names)
        return size(cache.values())

    return look


def published() -> Callable[[], int]:
    import transformers as hf

    looked_at, ids = hf.GPT2LMHeadModel(hf.GPT2Config(attn_implementation="eager")).eval(), draw(TOKENS)

    def look() -> int:
        out = looked_at(ids, output_attentions=True, output_hidden_states=True)
        return size([*out.attentions, *out.hidden_states])

    return look


def plain() -> Callable[[], int]:
    runs, ids = model(), draw(TOKENS)
    return lambda: size([runs(ids)])


def long_map(name: str) -> Callable[[], int]:
    looked_at, ids = model(LONG), draw(LONG)

    def look() -> int:
        with gh.record(looked_at, name, stop=True) as seen:
            looked_at(ids)
        return size(seen.values())

    return look


def size(tensors: Any) -> int:  # noqa: ANN401
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


LOOKS: dict[str, Callable[[], Callable[[], int]]] = {
    "the model alone": plain,
    "ours": lambda: ours(stop=False),
    "ours, stopped after the last": lambda: ours(stop=True),
    "TransformerLens, run_with_cache": lambda: lens(everything=True),
    "TransformerLens, the same sites alone": lambda: lens(everything=False),
    "transformers, eager, all outputs": published,
    "fused pass to the layer": lambda: long_map(f"z.{LAYER}"),
    "one head's whole map": lambda: long_map(f"pattern.{LAYER}[head=0]"),
}


def serve(name: str, threads: int) -> None:
    """Look whenever told to, and say how long it took, how much was looked at, and the memory's peak above before."""
    torch.set_num_threads(threads)
    with torch.no_grad():
        look = LOOKS[name]()
        torch.randn(256, 256) @ torch.randn(256, 256)
        before = resident()
        print("ready", flush=True)
        for _ in sys.stdin:
            start = time.perf_counter()
            amount = look()
            taken = time.perf_counter() - start
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
            print(taken, amount, peak - before, peak, flush=True)


def resident() -> int:
    with open("/proc/self/statm") as file:  # noqa: PTH123
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Looker:
    """One of the processes."""

    def __init__(self, name: str, threads: int) -> None:
        command = [sys.executable, __file__, "--serve", name, "--threads", str(threads)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.times: list[float] = []
        self.amount = self.above = self.peak = 0.0
        while (line := self.out.readline().strip()) != "ready":
            if not line and self.process.poll() is not None:
                raise SystemExit(f"{name} could not be run; see above.")

    @property
    def out(self) -> IO[str]:
        assert self.process.stdout is not None
        return self.process.stdout

    def look(self, count: bool) -> None:
        assert self.process.stdin is not None
        print("go", file=self.process.stdin, flush=True)
        taken, self.amount, self.above, self.peak = map(float, self.out.readline().split())
        if count:
            self.times.append(taken)


def compare(names: list[str], rounds: int, threads: int) -> dict[str, Looker]:
    lookers = {name: Looker(name, threads) for name in names}
    for number in range(rounds + 1):  # the first finds threads and memory
        for name, looker in lookers.items():
            looker.look(number > 0)
            print(f"  round {number}: {name}", file=sys.stderr)
    for looker in lookers.values():
        looker.process.terminate()
    return lookers


def maps(rounds: int, threads: int) -> None:
    lookers = compare(list(LOOKS)[:6], rounds, threads)
    print(f"all attention maps and the residual stream of {TOKENS} tokens, {rounds} rounds")
    base = lookers["ours"]
    for name, one in lookers.items():
        figures = f"{statistics.median(one.times):.2f} s, {one.above / 2**20:,.0f} MiB for {one.amount / 2**20:,.0f}"
        beside = "" if one is base else f"; ours is {ratio(one.times, base.times)} times as fast"
        share = "" if one is base else f", with {base.above / one.above:.2f} of the memory"
        print(f"  {name}: {figures}{beside}{share}")


def long(rounds: int, threads: int) -> None:
    lookers = compare(list(LOOKS)[6:], rounds, threads)
    fused, whole = lookers.values()
    print(f"one head's map of {LONG} x {LONG} in layer {LAYER}, {rounds} rounds")
    print(f"  fused pass to the layer: {statistics.median(fused.times):.1f} s, {fused.peak / 2**30:.2f} GiB in all")
    print(f"  with the map: {statistics.median(whole.times):.1f} s, {whole.peak / 2**30:.2f} GiB in all")
    print(f"  {ratio(whole.times, fused.times)} of the fused pass")


def off(rounds: int, threads: int) -> None:
    """Time steps of two equal models in turn, of which one was looked into before."""
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
    print(f"a step of a model that was looked into, beside one that never was, {40 * rounds} rounds")
    print(f"  {ratio(times[1], times[0])} of its time")


def probes(rounds: int, threads: int) -> None:
    """Time the steps of two equal runs in turn, of which one looks inside at each checkpoint, and that look alone."""
    torch.set_num_threads(threads)
    times: dict[bool, list[float]] = {False: [], True: []}
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        (place / "text.txt").write_text("".join(random.Random(0).choices(string.ascii_letters + " ", k=2**20)))
        for number in range(rounds):
            for probed in (False, True) if number % 2 else (True, False):
                times[probed].append(step_of_a_run(place, f"{number}-{probed}", None if probed else []))
                print(f"  round {number}: {'with' if probed else 'without'}", file=sys.stderr)
        _, held = open_datasets(gh.Run.load(place / "0-True" / "run.toml").data, place / "0-True")
        learned, _ = gh.load(place / "0-True" / "model")
    texts = first_texts(make_dataset(learned.spec, held, batch_size=1, seq_len=CONTEXT))
    looks = Probes(learned, texts, length=CONTEXT)
    looks.take(learned)  # the first finds threads and memory
    start = time.perf_counter()
    for _ in range(rounds):
        looks.take(learned)
    taken, step = (time.perf_counter() - start) / rounds, statistics.median(times[False])
    print(f"steps of a run with probes, beside one without, a checkpoint every {SAVE_EVERY}, {rounds} rounds")
    print(f"  {ratio(times[True], times[False])} of its time")
    print(f"  one look takes {taken:.3f} s, one step without {step:.3f} s")


def step_of_a_run(place: Path, name: str, chosen: list[str] | None) -> float:
    """Return the seconds a step takes, checkpoints included, evaluation and the first steps left out."""
    drop = {"dropout": 0.0, "attention_dropout": 0.0, "embed_dropout": 0.0}
    run = {
        "model": {"preset": "gpt2", "n_layers": 4, "d_model": 128, "n_heads": 4, **drop},
        "data": {"path": str(place / "text.txt"), "vocab_size": 263, "length": CONTEXT},
        "train": {"steps": 3 * SAVE_EVERY + 1, "save_every": SAVE_EVERY, "eval_every": 10**6, "eval_samples": 1}
        | {"schedule": "constant", "lr": 1e-4, "compile": "no", "out": str(place / name)}
        | {"samples": 0, "history": 0}
        | ({} if chosen is None else {"probes": chosen}),
    }
    clock = Clock()
    gh.train(gh.Run.from_dict(run), clock)
    return (clock.ends[-1] - clock.ends[SKIPPED - 1]) / (len(clock.ends) - SKIPPED)


PARTS = {"off": off, "maps": maps, "long": long, "probes": probes}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    choice = parser.parse_args()
    if choice.serve is not None:
        serve(choice.serve, choice.threads)
        return
    print(f"torch {torch.__version__}, {choice.threads} threads")
    for part in choice.parts:
        PARTS[part](choice.rounds, choice.threads)


if __name__ == "__main__":
    main()
