"""Circuits, estimated patches and saliency: are they right, and what do they cost beside other tools?

    python benchmarks/circuits.py [--parts induction rank cost] [--rounds 5] [--threads 2]

induction: the model of `attention_heads.py` that repeats random letters, three seeds: the circuit that `gh.circuit`
           finds, beside the known one, from the previous-token head into the keys of the induction heads.
rank:      edge attribution and attribution patching beside the exact sweep of one patch at a time, for three models:
           Spearman's rank correlation, and how many of the ten largest edges are found.
cost:      all heads at all positions of GPT-2 small, 64 tokens, random weights, each library in turn in one process:
           attribution patching (two forward passes and a backward), a part of the exact sweep, and integrated
           gradients. It needs TransformerLens, nnsight and Captum (the extra `lens`).
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
from figures import add_save, record, save
from torch import Tensor
from train_step import ratio, ratios
from trained_claims.attention_patterns import LETTERS, START, trained_echo
from trained_claims.experiment import make_rng

import glasshouse as gh
from glasshouse.inspection import (
    EdgeEffects,
    activation_patching,
    attribution_patching,
    edge_attribution,
    edge_patching,
)
from glasshouse.inspection.patching.activation_patching import Prompt
from glasshouse.models import Model

PAIRS, BEFORE = 32, 10  # prompts, and the letters before the one that comes again
LAYER, TOKENS, SWEPT = 6, 64, 2  # the sweep patches the first positions of one layer
STEPS = 20  # of integrated gradients
Metric = Callable[[Tensor], Tensor]


def echo_prompts() -> tuple[Tensor, Tensor, Metric]:
    """Return texts in which a letter comes again, corrupted and clean, and the logit of the letter after it.

    Corrupted, another letter stands before the answer, so that induction does not find it there.
    """
    rng, clean = make_rng(0), []
    for _ in range(PAIRS):
        once = torch.randperm(LETTERS, generator=rng)
        clean.append(torch.cat([torch.tensor([START]), once[:-1], once[: BEFORE + 1], once[-1:]]))
    rows = torch.stack(clean)
    corrupted = rows.clone()
    corrupted[:, BEFORE + 1] = rows[:, -1]  # the letter that is nowhere else
    answers = rows[:, BEFORE + 2]

    def answer_logit(logits: Tensor) -> Tensor:
        last = logits[:, -1]
        return (last.gather(1, answers[:, None])[:, 0] - last.mean(-1)).mean()

    return corrupted[:, :-1], rows[:, :-1], answer_logit


def induction(rounds: int) -> None:
    corrupted, clean, metric = echo_prompts()
    faithfulness, shares = [], []
    for seed in range(3):
        model = trained_echo(seed)
        scores = gh.head_scores(model, clean)
        previous = int(scores.previous[0].argmax())
        heads = [head for head, score in enumerate(scores.induction[1].tolist()) if score > 0.5]
        start = time.perf_counter()
        found = gh.circuit(model, corrupted, clean, metric)
        taken = time.perf_counter() - start
        sender = f"z.0[head={previous}]"
        keys = [head for head in heads if (sender, f"k.1[head={head}]") in found.edges]
        elsewhere = [edge for edge in found.edges if edge[0] == sender and edge[1].startswith(("q.1", "v.1"))]
        print(f"seed {seed}: {found}, {taken:.1f} s")
        print(f"  previous-token head 0.{previous}, induction heads {', '.join(f'1.{head}' for head in heads)}")
        print(f"  the first into the keys of {', '.join(f'1.{head}' for head in keys) or 'none'}; into queries or")
        print(f"  values: {elsewhere or 'none'}; on drawn letters as many edges give {found.random_faithfulness:.3f}")
        for (writer, reader), effect in found.edges.items():
            print(f"    {writer} -> {reader}: {effect:.3f}")
        faithfulness.append(found.faithfulness)
        shares.append(found.share)
    record("circuits.induction_faithfulness", faithfulness, 3)
    record("circuits.induction_share", shares, 1, "%")


def rank(rounds: int) -> None:
    corrupted, clean, metric = echo_prompts()
    print_ranks("echo", trained_echo(0), corrupted, clean, metric, None)
    model, tok = gh.load("python-3m")
    texts = (f"def add({name}, y):\n    return {name} + " for name in "xa")
    print_ranks("python-3m", model, *texts, None, tok)
    pair, tok = gh.load("dates-1m")
    print_ranks("dates-1m", pair, ("4 March 1999", ""), ("4 March 1997", ""), None, tok)


def print_ranks(
    name: str, model: Model, corrupted: Prompt, clean: Prompt, metric: Metric | None, tok: gh.Tokenizer | None
) -> None:
    start = time.perf_counter()
    exact = edge_patching(model, corrupted, clean, metric=metric, tok=tok)
    swept = time.perf_counter() - start
    known = exact.effect.isfinite()
    print(f"{name}: {int(known.sum())} edges, one at a time in {swept:.1f} s")
    for steps in (1, 5):
        start = time.perf_counter()
        found = edge_attribution(model, corrupted, clean, metric=metric, steps=steps, tok=tok)
        taken = time.perf_counter() - start
        correlation = spearman(found.effect[known], exact.effect[known])
        both = len({*top(found)} & {*top(exact)})
        print(f"  estimated, steps={steps}: {taken:.2f} s, rank correlation {correlation:.3f}, {both} of the top ten")
        if steps == 5:
            record(f"circuits.rank_{name.partition('-')[0]}", correlation, 2)
    site = "encoder.z" if isinstance(corrupted, tuple) else "z"
    nodes = activation_patching(model, corrupted, clean, site, axis=("head", "position"), metric=metric, tok=tok)
    for steps in (1, 5):
        guess = attribution_patching(
            model, corrupted, clean, site, axis=("head", "position"), metric=metric, steps=steps, tok=tok
        )
        correlation = spearman(guess.effect.flatten(), nodes.effect.flatten())
        print(f"  heads by position, steps={steps}: rank correlation {correlation:.3f}")


def top(effects: EdgeEffects) -> list[tuple[str, str]]:
    return effects.top(10)


def spearman(a: Tensor, b: Tensor) -> float:
    """Return the correlation of the ranks of absolute values, which is what a search orders by."""
    ranks = torch.stack([one.abs().argsort().argsort().double() for one in (a, b)])
    return float(torch.corrcoef(ranks)[0, 1])


def cost(rounds: int) -> None:
    os.environ["TQDM_DISABLE"] = "1"
    import transformer_lens as tl
    from captum.attr import LayerIntegratedGradients
    from nnsight import NNsight
    from transformer_lens import patching
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    ours = gh.build(gh.preset("gpt2", dropout=0.0)).eval()
    shape = {"n_layers": 12, "d_model": 768, "n_heads": 12, "d_head": 64, "d_mlp": 3072, "n_ctx": 1024}
    rest = {"d_vocab": 50257, "act_fn": "gelu_new", "normalization_type": "LN", "device": "cpu"}
    theirs = tl.HookedTransformer(tl.HookedTransformerConfig(**shape, **rest)).eval()
    traced = NNsight(GPT2LMHeadModel(GPT2Config()).eval())
    corrupted, clean = torch.randint(0, 50257, (2, 1, TOKENS))
    clean[:, 1:] = corrupted[:, 1:]

    def metric(logits: Tensor) -> Tensor:
        return logits[0, -1, 7] - logits[0, -1, 8]

    def estimate(seen: list[list[Tensor]], value: Tensor) -> None:
        slopes = torch.autograd.grad(value, seen[1])
        torch.stack([(one - two) * slope for one, two, slope in zip(*seen, slopes, strict=True)]).sum(-1)

    def estimated_by_theirs() -> None:
        """Attribution patching as their notebooks write it: two runs with hooks on z, and one backward."""
        seen: list[list[Tensor]] = [[], []]
        for number, ids in enumerate((clean, corrupted)):
            hooks = [
                (f"blocks.{layer}.attn.hook_z", lambda z, hook, to=seen[number]: to.append(z)) for layer in range(12)
            ]
            with torch.set_grad_enabled(number == 1):
                value = metric(theirs.run_with_hooks(ids, fwd_hooks=hooks))
        estimate(seen, value)

    def estimated_by_nnsight() -> None:
        """Do the same by the input of the output projection."""
        seen = []
        for number, ids in enumerate((clean, corrupted)):
            with torch.set_grad_enabled(number == 1), traced.trace(ids):
                heads = [].save()
                for block in traced.transformer.h:
                    heads.append(block.attn.c_proj.input)
                logits = traced.output.logits.save()
            seen.append(list(heads))
        estimate(seen, metric(logits))

    def swept_by_theirs() -> None:
        with torch.no_grad():
            _, cache = theirs.run_with_cache(clean, names_filter=lambda name: name.endswith("hook_z"))
            patching.generic_activation_patch(
                theirs, corrupted, cache, metric, patching.layer_pos_head_vector_patch_setter, "z",
                index_df=frame(),
            )  # fmt: skip

    def swept_by_nnsight() -> None:
        with torch.no_grad():
            with traced.trace(clean):
                z = traced.transformer.h[LAYER].attn.c_proj.input.save()
            for position in range(SWEPT):
                for head in range(12):
                    part = slice(64 * head, 64 * head + 64)
                    with traced.trace(corrupted):
                        traced.transformer.h[LAYER].attn.c_proj.input[:, position, part] = z[:, position, part]
                        logits = traced.output.logits.save()
                    metric(logits)

    def integrated_by_captum() -> None:
        theirs = LayerIntegratedGradients(lambda ids: ours(ids)[:, -1], ours.token_embedding)
        theirs.attribute(clean, baselines=clean.flip(1), target=7, n_steps=STEPS, method="riemann_middle")

    def integrated() -> None:
        gh.saliency(ours, clean, positions=[-1], token=7, steps=STEPS)

    axes = {"axis": ("head", "position"), "metric": metric}
    peers: dict[str, tuple[str, Callable[[], object], dict[str, Callable[[], object]]]] = {
        "estimate": (
            "attribution patching of z, all 12 heads at all 64 positions of 12 layers",
            lambda: attribution_patching(ours, corrupted, clean, "z", **axes),
            {"TransformerLens": estimated_by_theirs, "nnsight": estimated_by_nnsight},
        ),
        "sweep": (
            f"activation patching of layer {LAYER}, {12 * SWEPT} of its 768 head positions",
            lambda: activation_patching(ours, corrupted, clean, f"z.{LAYER}[position=0:{SWEPT}]", **axes),
            {"TransformerLens": swept_by_theirs, "nnsight": swept_by_nnsight},
        ),
        "saliency": (
            f"integrated gradients of one prediction, {STEPS} steps",
            integrated,
            {"Captum": integrated_by_captum},
        ),
    }
    for key, (name, own, others) in peers.items():
        works = {"ours": own, **others}
        times: dict[str, list[float]] = {one: [] for one in works}
        memory: dict[str, list[float]] = {one: [] for one in works}
        for number in range(rounds + 1):  # the first is the warm-up
            for one, work in works.items():
                seconds, used = measured(work)
                if number:
                    times[one].append(seconds)
                    memory[one].append(used)
        print(name)
        for one in works:
            print(
                f"  {one}: {statistics.median(times[one]):.2f} s, {statistics.median(memory[one]):.2f} GiB more"
                + ("" if one == "ours" else f"; ours {ratio(times[one], times['ours'])} times as fast")
            )
        record(f"circuits.{key}", times["ours"], 2, "s")
        record(f"circuits.{key}_memory", memory["ours"], 2, "GiB")
        for one in others:
            record(f"circuits.{key}_{one.lower()}", ratios(times[one], times["ours"]), 2)
            record(f"circuits.{key}_{one.lower()}_memory", memory[one], 2, "GiB")
    start = time.perf_counter()
    edge_attribution(ours, corrupted, clean, metric=metric, steps=1)
    print(f"edge attribution, steps=1: {time.perf_counter() - start:.2f} s")


def measured(work: Callable[[], object]) -> tuple[float, float]:
    """Return the seconds that a function takes, and by how many GiB the process grows meanwhile."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # glibc keeps freed memory, in which what is measured would hide
    before = most = resident()
    is_done = threading.Event()

    def watch() -> None:
        nonlocal most
        while not is_done.wait(0.005):
            most = max(most, resident())

    watcher = threading.Thread(target=watch)
    watcher.start()
    start = time.perf_counter()
    work()
    seconds = time.perf_counter() - start
    is_done.set()
    watcher.join()
    return seconds, (most - before) / 2**30


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def frame() -> object:
    """Return the patches of one layer as TransformerLens takes them."""
    import pandas as pd

    rows = [(LAYER, position, head) for head in range(12) for position in range(SWEPT)]
    return pd.DataFrame(rows, columns=["layer", "pos", "head"])


PARTS = {"induction": induction, "rank": rank, "cost": cost}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--parts", nargs="+", choices=PARTS, default=["induction", "rank"], help="(default: all but cost)"
    )
    parser.add_argument("--rounds", type=int, default=5, help="rounds of the timings (default 5)")
    parser.add_argument("--threads", type=int, default=2, help="torch threads (default 2)")
    add_save(parser)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print(f"torch {torch.__version__}, {args.threads} threads")
    for part in args.parts:
        PARTS[part](args.rounds)
    save(args.save)


if __name__ == "__main__":
    main()
