"""Claim A11: attention patterns of heads in trained models, found with glasshouse.inspection.

    python benchmarks/attention_heads.py [--parts recall echo library]

recall: the model of claim M7, one layer that finds the only upper-case letter: which heads attend to it, the loss
        increase when each is ablated, and the effect of patching each from another text.
echo:   two layers that learn to repeat random letters: previous-token, first-token and induction heads, and the
        path between them (path patching).
library: the recipe `stdlib` as `glasshouse train` runs it: previous-token heads, end-of-line heads and heads with
        broad attention.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from torch import Tensor
from trained_claims.attention_patterns import LENGTH, LETTERS, START, echo_batches, library_scores, trained_echo
from trained_claims.experiment import evaluate, log, make_rng
from trained_claims.recall import recall, trained_attention

import glasshouse as gh
from glasshouse.data import Batch
from glasshouse.inspection import HeadScores, ablation_effects, activation_patching, path_patching
from glasshouse.models import Model

PAIRS = 16  # of clean and corrupted texts


def show(name: str, **metrics: object) -> None:
    print(f"{name}: {', '.join(f'{key} {value}' for key, value in metrics.items())}", flush=True)


def format_values(values: Tensor) -> str:
    return " ".join(f"{value:.3f}" for value in values.tolist())


def report_heads(label: str, scores: HeadScores, names: dict[str, str]) -> None:
    """Print the head with the highest value of each score, beside that of uniform attention."""
    for score, name in names.items():
        values = getattr(scores, score)
        layer, head = divmod(int(values.argmax()), values.shape[1])
        uniform = scores.uniform_baseline[score][layer]
        show(label, head=f"{name} {layer}.{head}", score=f"{values.max():.3f}", uniform=f"{uniform:.3f}")


# Recall: the model of M7


def run_recall() -> None:
    context = 128
    for seed in range(3):
        model = trained_attention(seed, 800, context)
        batch = recall(context, 256)(make_rng(10**6))
        position = (batch.ids >= LETTERS).float().argmax(1)
        with torch.no_grad(), gh.record(model, "pattern.0[query=-1]") as recording:
            model(batch.ids)
        weight = recording["pattern.0"][torch.arange(len(position)), :, position].mean(0)
        targets = batch.targets.where(batch.loss_mask, -100)
        ablated = ablation_effects(model, batch.ids, targets=targets)
        patched = [
            activation_patching(
                model, batch.ids[row, None], other_capital(batch, row, int(position[row])), "z"
            ).effect[0]
            for row in range(PAIRS)
        ]
        induction = gh.head_scores(model, batch.ids).induction[0]
        accuracy = evaluate(model, [batch])["accuracy"]
        show(
            "recall",
            seed=seed,
            accuracy=f"{accuracy:.4f}",
            loss=f"{ablated.baseline:.4f}",
            attention_to_the_capital=format_values(weight),
        )
        show(
            "recall",
            seed=seed,
            loss_increase_when_ablated=format_values(ablated.metric_increase[0]),
            patching_effect=format_values(torch.stack(patched).mean(0)),
        )
        show("recall", seed=seed, induction=format_values(induction))


def other_capital(batch: Batch, row: int, position: int) -> Tensor:
    """Return a sequence with another upper-case letter at this position."""
    other = batch.ids[row, None].clone()
    other[0, position] = LETTERS + (other[0, position] - LETTERS + 13) % LETTERS
    return other


# Echo: repeated random letters


def echo() -> None:
    for seed in range(3):
        model = trained_echo(seed)
        accuracy = evaluate(model, [echo_batches(64)(make_rng(10**6))])["accuracy"]
        ids = torch.cat(
            [torch.full((64, 1), START), gh.inspection.repeated_tokens(LETTERS, LENGTH // 2 - 1, rows=64)], 1
        )
        scores = gh.head_scores(model, ids)
        loss_increase = ablation_effects(model, ids, targets=targets_after_first_occurrence(ids)).metric_increase
        show("echo", seed=seed, accuracy=f"{accuracy:.4f}")
        names = {"previous": "previous", "first": "first", "induction": "induction", "normalized_entropy": "broad"}
        report_heads("echo", scores, names)
        for layer in range(2):
            each = {name: format_values(getattr(scores, name)[layer]) for name in names}
            show("echo", layer=layer, **each, loss_increase_when_ablated=format_values(loss_increase[layer]))
        trace_induction(model, scores)


def targets_after_first_occurrence(ids: Tensor) -> Tensor:
    """Return next-token targets where the letters repeat, and -100 in the first occurrence."""
    period = (ids.shape[1] - 1) // 2
    targets = torch.full_like(ids, -100)
    targets[:, period + 1 : -1] = ids[:, period + 2 :]
    return targets


def trace_induction(model: Model, scores: HeadScores) -> None:
    """Trace the induction circuit: from the previous-token head into the keys of the induction heads.

    The corrupted text has another letter before the answer, so that induction does not find it there.
    """
    sender, receiver = int(scores.previous[0].argmax()), int(scores.induction[1].argmax())
    effects, traces = [], []
    for number in range(PAIRS):
        rng = make_rng(number)
        once = torch.randperm(LETTERS, generator=rng)[: LETTERS - 1][None]
        at = int(torch.randint(4, 20, (1,), generator=rng))
        ids = torch.cat([torch.full((1, 1), START), once, once[:, : at + 1]], 1)  # the target is once[at + 1]
        unused = next(letter for letter in range(LETTERS) if letter not in once)
        effects.append(activation_patching(model, ids, with_letter(ids, at + 2, unused), "z").effect)
        traces.append(trace_patches(model, ids, with_letter(ids, at + 1, unused), at + 2, sender, receiver))
    for layer, effect in enumerate(torch.stack(effects).mean(0)):
        show("echo", layer=layer, patching_effect=format_values(effect))
    found = {name: sum(one[name] for one in traces) / PAIRS for name in traces[0]}
    show("echo", **{name: f"{effect:.3f}" for name, effect in found.items()})


def with_letter(ids: Tensor, position: int, letter: int) -> Tensor:
    other = ids.clone()
    other[0, position] = letter
    return other


@torch.no_grad()
def trace_patches(
    model: Model, clean: Tensor, corrupted: Tensor, position: int, sender: int, receiver: int
) -> dict[str, float]:
    """Patch activations of the corrupted text into the clean one; effects are fractions of that of the whole text."""
    answer = int(clean[0, position])

    def answer_logit(logits: Tensor) -> Tensor:
        return logits[0, -1, answer] - logits[0, -1].mean()

    baseline, changed = (float(answer_logit(model(text))) for text in (clean, corrupted))

    def effect(*names: str) -> float:
        return (float(answer_logit(gh.patch(model, clean, corrupted, *names))) - baseline) / (changed - baseline)

    found = {
        f"head_0.{sender}": effect(f"z.0[head={sender}]"),
        "residual_at_the_answer": effect(f"resid_post.0[position={position}]"),
        "residual_one_before": effect(f"resid_post.0[position={position - 1}]"),
        **{f"all_{name}": effect(f"{name}.1") for name in "kqv"},
    }
    # Induction heads are redundant; with the others ablated, the path through one has an effect.
    with gh.edit(model, {"z.1": gh.ablate_head(*(head for head in range(4) if head != receiver))}):
        for name in "kqv":
            ends = f"z.0[head={sender}]", f"{name}.1[head={receiver}]"
            found[f"0.{sender}_to_{name}_of_1.{receiver}_alone"] = float(
                path_patching(model, clean, corrupted, *ends, metric=answer_logit).effect
            )
    return found


# Library: the recipe stdlib


def library() -> None:
    scores, line_ends = library_scores()
    show("library", line_ends=f"{line_ends:.3f} of the tokens")
    names = {"previous": "previous", "marked": "end of line", "first": "first", "normalized_entropy": "broad"}
    report_heads("library", scores, names)
    for layer in range(len(scores.normalized_entropy)):
        show("library", layer=layer, **{name: format_values(getattr(scores, name)[layer]) for name in names})


PARTS: dict[str, Callable[[], None]] = {"recall": run_recall, "echo": echo, "library": library}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=[*PARTS], help="(default: all)")
    args = parser.parse_args()
    print(f"torch {torch.__version__}")
    for part in args.parts:
        torch.set_num_threads(2 if part == "library" else 1)  # the small ones gain nothing from more
        start = time.perf_counter()
        PARTS[part]()
        log(f"{part} took {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
