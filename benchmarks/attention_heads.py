"""Claim A11: what the heads of trained models do, found by the tools of glasshouse.inspection and not planted.

    python benchmarks/attention_heads.py [--parts recall echo library]

recall: the model of claim M7, one layer that finds the only capital letter: which of its heads look at it, what
        silencing each costs, and how much of the answer moves when each is patched from another text.
echo:   two layers that learn to go on with random letters said before: heads for the token before, for the first
        one and for induction, and the path from one to the other.
library: the recipe `stdlib` as `glasshouse train` runs it: heads that look at the token before, at ends of lines,
        and evenly at everything.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable

import torch
from claims import LETTERS, QUERY, SMALL, ask, build, dice, learn, recall, say, show
from torch import Tensor

import glasshouse as gh
from glasshouse.data import Batch, builtin_dataset
from glasshouse.inspection import HeadScores, ablation_effects, activation_patching, path_patching
from glasshouse.models import Model

# What a head must reach to be called one of its kind: a quarter of its weight on one sort of place, at every query on
# average; or, for one that looks everywhere, an entropy near that of an even head. What an even head has is shown.
THRESHOLDS = {"previous": 0.25, "first": 0.25, "induction": 0.25, "marked": 0.25, "normalized_entropy": 0.7}
PAIRS = 16  # of texts to patch between


def numbers(values: Tensor) -> str:
    return " ".join(f"{value:.3f}" for value in values.tolist())


def classify_heads(label: str, scores: HeadScores, names: dict[str, str]) -> None:
    """Say which head is the best at what, and whether it reaches the threshold."""
    for score, name in names.items():
        values = getattr(scores, score)
        layer, head = divmod(int(values.argmax()), values.shape[1])
        met = "found" if values.max() >= THRESHOLDS[score] else "not found"
        figures = {"score": f"{values.max():.3f}", "even": f"{scores.uniform_baseline[score][layer]:.3f}"}
        show(label, head=f"{name} {layer}.{head}", **figures, threshold=THRESHOLDS[score], it_is=met)


# The recall of M7


def recalls() -> None:
    context = 128
    for seed in range(3):
        shape = SMALL | {"n_layers": 1, "max_len": context}
        model = build(seed, kind="decoder", vocab_size=QUERY + 1, position="rotary", **shape)
        learn(model, recall(context, 32), 800, 3e-3, seed=seed)
        batch = recall(context, 256)(dice(10**6))
        place = (batch.ids >= LETTERS).float().argmax(1)
        with torch.no_grad(), gh.record(model, "pattern.0[query=-1]") as seen:
            model(batch.ids)
        weight = seen["pattern.0"][torch.arange(len(place)), :, place].mean(0)
        targets = batch.targets.where(batch.loss, -100)
        grown = ablation_effects(model, batch.ids, targets=targets)
        moved = [
            activation_patching(model, batch.ids[row, None], capital(batch, row, int(place[row])), "z").effect[0]
            for row in range(PAIRS)
        ]
        induction = gh.head_scores(model, batch.ids).induction[0]
        right = ask(model, [batch])["accuracy"]
        show(
            "recall",
            seed=seed,
            right=f"{right:.4f}",
            loss=f"{grown.baseline:.4f}",
            weight_on_the_capital=numbers(weight),
        )
        show(
            "recall",
            seed=seed,
            loss_grows_without=numbers(grown.metric_increase[0]),
            patched=numbers(torch.stack(moved).mean(0)),
        )
        show("recall", seed=seed, induction=numbers(induction))


def capital(batch: Batch, row: int, place: int) -> Tensor:
    """Return a row in which another letter is the capital."""
    other = batch.ids[row, None].clone()
    other[0, place] = LETTERS + (other[0, place] - LETTERS + 13) % LETTERS
    return other


# Random letters said again


START, SAID = LETTERS, 64


def echoes(rows: int) -> Callable[[torch.Generator], Batch]:
    """Draw rows of a start token and random letters, said over and over; the first round is not asked for."""

    def draw(chance: torch.Generator) -> Batch:
        period = int(torch.randint(SAID // 4, SAID // 2 + 1, (1,), generator=chance))
        once = torch.randint(LETTERS, (rows, period), generator=chance)
        ids = torch.cat([torch.full((rows, 1), START), once.repeat(1, SAID // period + 1)], 1)[:, : SAID + 1]
        asked = torch.zeros(rows, SAID, dtype=torch.bool)
        asked[:, period + 1 :] = True
        return Batch(ids[:, :-1], ids[:, 1:], asked)

    return draw


def echo() -> None:
    for seed in range(3):
        model = build(seed, kind="decoder", vocab_size=LETTERS + 1, position="rotary", **SMALL)
        learn(model, echoes(32), 1500, 3e-3, seed=seed)
        right = ask(model, [echoes(64)(dice(10**6))])["accuracy"]
        ids = torch.cat(
            [torch.full((64, 1), START), gh.inspection.repeated_tokens(LETTERS, SAID // 2 - 1, rows=64)], 1
        )
        scores = gh.head_scores(model, ids)
        grown = ablation_effects(model, ids, targets=after_the_first_round(ids)).metric_increase
        show("echo", seed=seed, right=f"{right:.4f}")
        names = {"previous": "before", "first": "first", "induction": "induction", "normalized_entropy": "broad"}
        classify_heads("echo", scores, names)
        for layer in range(2):
            each = {name: numbers(getattr(scores, name)[layer]) for name in names}
            show("echo", layer=layer, **each, loss_grows_without=numbers(grown[layer]))
        explain(model, scores)


def after_the_first_round(ids: Tensor) -> Tensor:
    """Return what follows each letter where it was said before, and -100 where it was not."""
    round_ = (ids.shape[1] - 1) // 2
    targets = torch.full_like(ids, -100)
    targets[:, round_ + 1 : -1] = ids[:, round_ + 2 :]
    return targets


def explain(model: Model, scores: HeadScores) -> None:
    """Follow the answer: from the head that looks one back into the keys of those that find what comes next.

    Of two texts that ask for the same letter, one has another letter before it: so it is not found there.
    """
    sender, receiver = int(scores.previous[0].argmax()), int(scores.induction[1].argmax())
    moved, patched = [], []
    for number in range(PAIRS):
        chance = dice(number)
        once = torch.randperm(LETTERS, generator=chance)[: LETTERS - 1][None]
        at = int(torch.randint(4, 20, (1,), generator=chance))
        ids = torch.cat([torch.full((1, 1), START), once, once[:, : at + 1]], 1)  # asks for once[at + 1]
        unsaid = next(letter for letter in range(LETTERS) if letter not in once)
        moved.append(activation_patching(model, ids, with_letter(ids, at + 2, unsaid), "z").effect)
        patched.append(traced(model, ids, with_letter(ids, at + 1, unsaid), at + 2, sender, receiver))
    for layer, effect in enumerate(torch.stack(moved).mean(0)):
        show("echo", layer=layer, answer_moves_with=numbers(effect))
    found = {name: sum(one[name] for one in patched) / PAIRS for name in patched[0]}
    show("echo", **{name: f"{effect:.3f}" for name, effect in found.items()})


def with_letter(ids: Tensor, place: int, letter: int) -> Tensor:
    other = ids.clone()
    other[0, place] = letter
    return other


@torch.no_grad()
def traced(model: Model, ids: Tensor, broken: Tensor, place: int, sender: int, receiver: int) -> dict[str, float]:
    """Return how much of what the broken text costs each patch costs, at the answer's place and on the way to it."""
    answer = int(ids[0, place])

    def stands_out(logits: Tensor) -> Tensor:
        return logits[0, -1, answer] - logits[0, -1].mean()

    before, after = (float(stands_out(model(text))) for text in (ids, broken))

    def effect(*names: str) -> float:
        return (float(stands_out(gh.patch(model, ids, broken, *names))) - before) / (after - before)

    found = {
        f"head_0.{sender}": effect(f"z.0[head={sender}]"),
        "the_stream_at_the_answer": effect(f"resid_post.0[position={place}]"),
        "just_before_it": effect(f"resid_post.0[position={place - 1}]"),
        **{f"all_{name}": effect(f"{name}.1") for name in "kqv"},
    }
    # Several heads do the same and make up for one; without the others, a path through one alone is felt.
    with gh.edit(model, {"z.1": gh.ablate_head(*(head for head in range(4) if head != receiver))}):
        for name in "kqv":
            ends = f"z.0[head={sender}]", f"{name}.1[head={receiver}]"
            found[f"0.{sender}_to_{name}_of_1.{receiver}_alone"] = float(
                path_patching(model, ids, broken, *ends, metric=stands_out).effect
            )
    return found


# The recipe


def library() -> None:
    with tempfile.TemporaryDirectory() as folder:
        gh.train(gh.Run.load("stdlib", f"train.out={folder}/run"))
        model, tok = gh.load(f"{folder}/run/model")
    assert tok is not None
    text = "\n".join(text for _, text in builtin_dataset("stdlib").items("validation"))
    ids = torch.tensor(tok.encode(text)[: 16 * 256]).view(16, 256)
    ends = torch.tensor([b"\n" in tok.decode_bytes([number]) for number in range(len(tok))])[ids]
    scores = gh.head_scores(model, ids, marked=ends)
    show("library", ends_of_lines=f"{ends.float().mean():.3f} of the tokens")
    names = {"previous": "before", "marked": "end of line", "first": "first", "normalized_entropy": "broad"}
    classify_heads("library", scores, names)
    for layer in range(len(scores.normalized_entropy)):
        show("library", layer=layer, **{name: numbers(getattr(scores, name)[layer]) for name in names})


PARTS: dict[str, Callable[[], None]] = {"recall": recalls, "echo": echo, "library": library}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=[*PARTS])
    choice = parser.parse_args()
    print(f"torch {torch.__version__}")
    for part in choice.parts:
        torch.set_num_threads(2 if part == "library" else 1)  # the small ones gain nothing from more
        begun = time.perf_counter()
        PARTS[part]()
        say(f"{part} took {time.perf_counter() - begun:.0f} s")


if __name__ == "__main__":
    main()
