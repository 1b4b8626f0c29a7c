"""A11: which patterns attention heads learn: on repeated letters, and in the recipe `stdlib`."""

from __future__ import annotations

import tempfile
from collections.abc import Callable

import torch

import glasshouse as gh
from glasshouse.data import Batch, builtin_dataset
from glasshouse.models import Model
from trained_claims.experiment import SMALL, Result, build, evaluate, log, make_rng, train

LETTERS, LENGTH = 26, 64
START = LETTERS  # the token that every text begins with
LIBRARY_STEPS = 440  # of the recipe


def echo_batches(rows: int) -> Callable[[torch.Generator], Batch]:
    """Sample a start token and a repeated string of random letters; the first occurrence carries no loss."""

    def sample(rng: torch.Generator) -> Batch:
        period = int(torch.randint(LENGTH // 4, LENGTH // 2 + 1, (1,), generator=rng))
        once = torch.randint(LETTERS, (rows, period), generator=rng)
        ids = torch.cat([torch.full((rows, 1), START), once.repeat(1, LENGTH // period + 1)], 1)[:, : LENGTH + 1]
        loss_mask = torch.zeros(rows, LENGTH, dtype=torch.bool)
        loss_mask[:, period + 1 :] = True
        return Batch(ids[:, :-1], ids[:, 1:], loss_mask)

    return sample


def trained_echo(seed: int, steps: int = 1500) -> Model:
    """Return two layers that learned to repeat random letters."""
    model = build(seed, kind="decoder", vocab_size=LETTERS + 1, position="rotary", **SMALL)
    train(model, echo_batches(32), steps, 3e-3, seed=seed)
    return model


def echo_scores(model: Model) -> gh.inspection.HeadScores:
    """Return the scores of its heads on letters that repeat."""
    once = gh.inspection.repeated_tokens(LETTERS, LENGTH // 2 - 1, rows=64)
    return gh.head_scores(model, torch.cat([torch.full((64, 1), START), once], 1))


def echo_patterns(seeds: int = 3, steps: int = 1500) -> Result:
    """Return the best head of each kind, the least of the seeds."""
    result = Result()
    best: dict[str, list[float]] = {"previous": [], "induction": []}
    accuracy = []
    for seed in range(seeds):
        model = trained_echo(seed, steps)
        accuracy.append(evaluate(model, [echo_batches(64)(make_rng(10**6))])["accuracy"])
        scores = echo_scores(model)
        for name, values in best.items():
            values.append(float(getattr(scores, name).max()))
        log(f"A11: repeated letters, seed {seed}, accuracy {accuracy[-1]:.3f}")
    result.figures["repeated letters: accuracy, the least of the seeds"] = min(accuracy)
    for name, values in best.items():
        label = {"previous": "previous-token", "induction": "induction"}[name]
        result.figures[f"repeated letters: {label} head, the least of the seeds"] = min(values)
    return result


def library_scores(steps: int = LIBRARY_STEPS) -> tuple[gh.inspection.HeadScores, float]:
    """Train the recipe `stdlib` as `glasshouse train` does; return its heads' scores, and the share of line ends."""
    with tempfile.TemporaryDirectory() as folder:
        gh.train(gh.Run.load("stdlib", f"train.out={folder}/run", f"train.steps={steps}"), progress=False)
        model, tok = gh.load(f"{folder}/run/model")
    assert tok is not None
    text = "\n".join(text for _, text in builtin_dataset("stdlib").items("validation"))
    ids = torch.tensor(tok.encode(text)[: 16 * 256]).view(16, 256)
    line_ends = torch.tensor([b"\n" in tok.decode_bytes([number]) for number in range(len(tok))])[ids]
    return gh.head_scores(model, ids, marked=line_ends), float(line_ends.float().mean())


def patterns(seeds: int = 3, steps: int = 1500, library_steps: int = LIBRARY_STEPS) -> Result:
    """Return what heads learn on repeated letters and on the standard library."""
    result = echo_patterns(seeds, steps)
    scores, line_ends = library_scores(library_steps)
    result.figures |= {
        "stdlib: previous-token head": float(scores.previous.max()),
        "stdlib: end-of-line head": float(scores.marked.max()),
        "stdlib: share of ends of lines": line_ends,
        "stdlib: broad head, entropy of uniform": float(scores.normalized_entropy.max()),
        "stdlib: first-token head": float(scores.first.max()),
    }
    return result
