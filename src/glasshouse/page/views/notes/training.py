"""Figures of training: L1 and L2."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from glasshouse import notes
from glasshouse.config import JsonDict
from glasshouse.page.views.notes.figure import (
    Control,
    Figure,
    Scene,
    bars,
    facts,
    generator,
    initialised,
    sentence,
    table,
    tokens,
)

WEIGHTS = 6  # checked by differences
LABELS = (100, 1000)  # of the experiment of L1
MASK = "[mask]"


def targets_without_labels(scene: Scene) -> list[JsonDict]:
    """L1."""
    names, length = scene.labels, scene.length
    count = max(1, length * int(scene.value) // 100)
    masked = sorted(torch.randperm(length, generator=generator())[:count].tolist())
    measured = notes.measurements()["L1"].figures

    def accuracy(labels: int, start: str) -> tuple[str, float]:
        name = f"accuracy with {labels} labels, {start}"
        return f"{start}, ± {measured[f'{name}, standard deviation']:.3f}", measured[name]

    return [
        sentence("First no labels: the text is its own target. Then few labels, for another task (measured)."),
        tokens("what an encoder is given", ((MASK if i in masked else names[i], i in masked) for i in range(length))),
        tokens("what it has to say: the tokens that were masked", ((names[i], False) for i in masked)),
        facts(
            ("tokens", length),
            ("targets, masked", count),
            ("targets of a decoder, the next token each time", length - 1),
        ),
        *(
            bars(
                f"then {labels:,} labels: accuracy in naming one of 20 languages",
                [accuracy(labels, "pretrained"), accuracy(labels, "from scratch")],
                most=1,
            )
            for labels in LABELS
        ),
    ]


def finite_differences(scene: Scene) -> list[JsonDict]:
    """L2."""
    size = 10.0**scene.value
    sizes: JsonDict = {"d_model": 16, "n_heads": 2, "n_kv_heads": 2, "n_layers": 1, "d_ff": 32, "vocab_size": 16}
    model = initialised("decoder", torch.float64, **sizes, init={"kind": "normal", "std": 0.3})
    ids = torch.randint(16, (2, 9), generator=generator())

    def loss() -> Tensor:
        return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())

    named = dict(list(model.named_parameters())[:WEIGHTS])
    with torch.enable_grad():
        found = torch.autograd.grad(loss(), list(named.values()))
    rows = []
    for (name, weight), gradient in zip(named.items(), found, strict=True):
        at = int(gradient.abs().argmax())
        flat, sides = weight.data.view(-1), []
        for sign in (1, -1):
            flat[at] += sign * size
            sides.append(float(loss()))
            flat[at] -= sign * size
        exact, near = float(gradient.flatten()[at]), (sides[0] - sides[1]) / (2 * size)
        rows.append([name, exact, near, abs(exact - near) / abs(exact)])
    return [
        sentence(
            "A small decoder in float64: the largest entry of each gradient, and what a change of the weight does."
        ),
        table(f"step {size:.0e}", ["weight", "gradient", "finite difference", "relative error"], rows),
        facts(("largest relative error", max(float(row[3]) for row in rows))),
    ]


FIGURES = {
    "L1": Figure(targets_without_labels, ("pass",), Control("masked, of a hundred tokens", 40, 10, 90, 10)),
    "L2": Figure(
        finite_differences, (), Control("step", -5, -9, -1, labels=tuple(f"1e{power}" for power in range(-9, 0)))
    ),
}
