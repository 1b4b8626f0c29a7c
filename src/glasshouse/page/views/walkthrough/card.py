"""Cards: one step each, with its inputs, outputs and weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from glasshouse.config import JsonDict
from glasshouse.inspection.walkthrough import LinearStep, NormStep, WalkthroughStep, norm_statistics
from glasshouse.layers.lora import LoRALinear
from glasshouse.page import serialization

CORNER = 8  # rows and columns of a weight matrix


def card(node: str, kind: str, site: str = "", **held: object) -> JsonDict:
    """Return a card: its node in the diagram, its kind, the site of its output, and its numbers."""
    return {"node": node, "kind": kind, "site": site, **{name: _sent(one) for name, one in held.items()}}


def _sent(value: object) -> object:
    match value:
        case Tensor():
            return serialization.encode_tensor(value)
        case float():
            return serialization.finite_or_none(value)
        case _:
            return value


def step_card(node: str, step: WalkthroughStep, site: str) -> JsonDict:
    """Return the card of a step of a layer."""
    match step:
        case LinearStep():
            made = linear_card(node, step.name, step.linear, step.x, step.y, step.first)
        case NormStep():
            made = norm_card(node, step.norm, step.x, step.y)
        case _:
            made = card(node, step.name)
    words = {name: words for name in ("title", "formula", "why") if (words := getattr(step, name))}
    return made | card(node, step.name, site, **step.numbers, **words)


def norm_card(node: str, norm: Any, x: Tensor, y: Tensor | None = None, site: str = "") -> JsonDict:  # noqa: ANN401
    """Return the card of a norm with its statistics."""
    return card(node, "norm", site, x=x, y=norm(x) if y is None else y, **norm_statistics(norm, x))


def linear_card(
    node: str,
    kind: str,
    linear: Any,  # noqa: ANN401
    x: Tensor,
    y: Tensor,
    first: int = 0,
) -> JsonDict:
    """Return the card of a linear map whose rows from `first` on give `y`, with a corner of its matrix."""
    base = linear.base if isinstance(linear, LoRALinear) else linear
    weight = base.weight[first : first + len(y), :]
    if isinstance(linear, LoRALinear):
        weight = torch.addmm(weight, linear.lora_b[first : first + len(y)], linear.lora_a, alpha=linear.config.scale)
    told: JsonDict = {} if base.bias is None else {"bias": base.bias[first : first + len(y)]}
    shape = [len(y), len(x)]
    return card(node, kind, x=x, y=y, weight=weight[:CORNER, :CORNER], shape=shape, **told)
