"""The model as an engine runs it: the same weights in a tree of its own, arranged for the machine at hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeVar, get_args

import torch
from torch import Tensor, nn

from glasshouse.errors import InputError
from glasshouse.layers.fused_linear import fuse_linears
from glasshouse.layers.int8 import quantize_int8
from glasshouse.layers.module_swap import clone_sharing_parameters, replace_module
from glasshouse.layers.prepacked import prepack_linears
from glasshouse.models import Decoder, Seq2Seq

# Those of the model as they lie; a copy, in the order in which this machine reads it fastest; a byte each.
Weights = Literal["own", "copy", "int8"]
M = TypeVar("M", Decoder, Seq2Seq, Decoder | Seq2Seq)


def prepare_for_inference(model: M, weights: Weights, slots: int) -> M:
    """Return a model that writes what the given one would, which stays as it is, for so many rows at once."""
    check_weights(weights)
    tree = clone_sharing_parameters(model).eval()
    remove_dropout(tree)
    match weights:
        case "int8":
            quantize_int8(tree)
        case "copy" if model.token_embedding.table.weight.is_cuda:
            fuse_linears(tree)
        case "copy":
            prepack_linears(tree, slots)
    return tree


def check_weights(weights: Weights) -> None:
    """Refuse what is no way to hold the weights."""
    if weights not in get_args(Weights):
        raise InputError(f"weights is {weights!r}, but it must be one of {', '.join(get_args(Weights))}.")


def weight_copy_bytes(model: Decoder | Seq2Seq, weights: Weights) -> int:
    """Return at most how many bytes `prepare` takes for matrices in an order of its own.

    >>> from glasshouse.models import build
    >>> from glasshouse.spec import preset
    >>> shape = {"d_model": 100, "n_heads": 2, "n_kv_heads": 2, "d_ff": 200, "n_layers": 1, "vocab_size": 1000}
    >>> model = build(preset("tiny-decoder", **shape))
    >>> [weight_copy_bytes(model, weights) for weights in ("own", "copy", "int8")]
    [0, 1200000, 400000]
    """
    table = model.token_embedding.table.weight
    matrices = sum(one.numel() for one in model.parameters() if one.dim() == 2)
    match weights:
        case "own":
            return 0
        case "copy":
            return matrices * table.element_size()
        case "int8":
            return matrices + table.numel()  # a table that is the head's matrix too is held in both orders


def remove_dropout(tree: nn.Module) -> None:
    """Take out what does nothing here: on a CPU a call costs as much as a small layer."""
    for module in list(tree.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Dropout):
                replace_module(module, name, nn.Identity())


def compile_decode(tree: Decoder | Seq2Seq, slots: int) -> Callable[..., Tensor]:
    """Return the model compiled for steps of so many rows."""
    # What goes into a matrix product is worked out once: left to itself, torch does it again for each of its rows.
    options: dict[str, Any] = {"realize_opcount_threshold": 4, "realize_reads_threshold": 1}
    if slots == 1:  # brings products to the memory's speed; with more rows it takes minutes and gains nothing
        options["coordinate_descent_tuning"] = True
    return torch.compile(tree, dynamic=False if tree.token_embedding.table.weight.is_cuda else None, options=options)
