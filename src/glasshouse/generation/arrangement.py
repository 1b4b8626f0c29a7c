"""The model as an engine runs it: the same weights in a tree of its own, arranged for the machine at hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypeVar, get_args

import torch
from torch import Tensor, nn

from glasshouse.errors import InputError
from glasshouse.layers.int8 import quantize
from glasshouse.layers.joined import join
from glasshouse.layers.packed import FEWEST_ROWS, pack, share
from glasshouse.models import Decoder, Seq2Seq

Weights = Literal["own", "int8"]
M = TypeVar("M", Decoder, Seq2Seq, Decoder | Seq2Seq)


def prepare(model: M, weights: Weights, slots: int) -> M:
    """Return a model that writes what the given one would, which stays as it is, for so many rows at once."""
    if weights not in get_args(Weights):
        raise InputError(f"weights is {weights!r}, but it must be one of {', '.join(get_args(Weights))}.")
    tree = share(model).eval()
    if weights == "int8":
        quantize(tree)
    elif model.token.table.weight.is_cuda:
        join(tree)
    elif slots >= FEWEST_ROWS:
        pack(tree)
    return tree


def compiled(tree: nn.Module) -> dict[bool, Callable[..., Tensor]]:
    """Return the model compiled for steps of one row, and of several."""
    # Torch's tuning brings products with one row to the memory's speed. With more it takes minutes and gains nothing.
    one = torch.compile(tree, options={"coordinate_descent_tuning": True})
    return {True: one, False: torch.compile(tree)}
