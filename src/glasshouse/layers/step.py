"""Steps: what a layer computes at one position, in order and with its numbers, for a page to draw."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class Step:
    """One step: its tensors and numbers by name, and the site of its output.

    A step with a title is drawn from title, formula and tensors; without one, the page has a picture for its name.
    """

    name: str
    numbers: Mapping[str, object] = field(default_factory=dict)
    site: str = ""  # without the stack's prefix and the layer's number: "z"
    index: Mapping[str, int] = field(default_factory=dict)  # of the site
    title: str = ""
    formula: str = ""
    why: str = ""


@dataclass(frozen=True, kw_only=True)
class LinearStep(Step):
    """A linear layer, whose rows from `first` on map x to y."""

    linear: nn.Module
    x: Tensor
    y: Tensor
    first: int = 0


@dataclass(frozen=True, kw_only=True)
class NormStep(Step):
    """A norm."""

    name: str = "norm"
    norm: nn.Module
    x: Tensor
    y: Tensor
