"""Prepares a model for inference: a copy of the module tree that shares its parameters, optimised for the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeVar, get_args

import torch
from torch import Tensor, nn

from glasshouse.errors import InputError
from glasshouse.layers import inference_kernels as kernels
from glasshouse.layers.cache import Cache
from glasshouse.layers.cache.kernels import write_kv
from glasshouse.layers.feedforward import FusedGateUpFeedForward
from glasshouse.layers.linear.fused import fuse_linears
from glasshouse.layers.linear.int4 import GROUP, quantize_int4
from glasshouse.layers.linear.int8 import quantize_int8
from glasshouse.layers.linear.int8_gpu import quantize_weights
from glasshouse.layers.linear.matvec import make_matvec_linear
from glasshouse.layers.linear.prepacked import prepack_linears
from glasshouse.layers.module_swap import clone_sharing_parameters, is_own_code, replace_module, swap_linears
from glasshouse.layers.norm import RMSNorm
from glasshouse.layers.position import RotaryPosition
from glasshouse.models import Decoder, Seq2Seq

# The model's own tensors; a copy in the memory layout that is fastest here; one byte per weight; half a byte.
Weights = Literal["own", "copy", "int8", "int4"]
M = TypeVar("M", Decoder, Seq2Seq, Decoder | Seq2Seq)


def prepare_for_inference(model: M, weights: Weights, slots: int) -> M:
    """Return a model with the same outputs for batches of `slots`; the given model is not changed."""
    check_weights(weights)
    tree = clone_sharing_parameters(model).eval()
    remove_dropout(tree)
    match weights:
        case "int8" if model.token_embedding.table.weight.is_cuda:
            quantize_weights(tree)
        case "int8":
            quantize_int8(tree)
        case "int4":
            quantize_int4(tree)
        case "copy" if model.token_embedding.table.weight.is_cuda:
            fuse_linears(tree)
            if slots == 1:
                swap_linears(tree, make_matvec_linear)
        case "copy":
            prepack_linears(tree, slots)
    return tree


def make_cache(model: Decoder | Seq2Seq, slots: int, max_len: int, source_len: int, chunk: int) -> Cache:
    """Return the KV cache of an engine, for at most `chunk` tokens per sequence and call."""
    if not isinstance(model, Seq2Seq):
        return model.make_cache(slots, max_len, chunk=chunk)
    cache = model.make_cache(slots, max_len, source_len, chunk=chunk)
    assert cache.source is not None
    cache.source.filled = True  # a slot's source is encoded before it decodes
    return cache


def check_weights(weights: Weights) -> None:
    """Raise if the name of the weight format is unknown."""
    if weights not in get_args(Weights):
        raise InputError(f"weights is {weights!r}, but it must be one of {', '.join(get_args(Weights))}.")


def weight_copy_bytes(model: Decoder | Seq2Seq, weights: Weights) -> int:
    """Return an upper bound on the bytes `prepare_for_inference` allocates for weights.

    >>> from glasshouse.models import build
    >>> from glasshouse.spec import preset
    >>> shape = {"d_model": 100, "n_heads": 2, "n_kv_heads": 2, "d_ff": 200, "n_layers": 1, "vocab_size": 1000}
    >>> model = build(preset("tiny-decoder", **shape))
    >>> [weight_copy_bytes(model, weights) for weights in ("own", "copy", "int8", "int4")]
    [0, 1200000, 400000, 362500]
    """
    table = model.token_embedding.table.weight
    matrices = sum(one.numel() for one in model.parameters() if one.dim() == 2)
    match weights:
        case "own":
            return 0
        case "copy":
            return matrices * table.element_size()
        case "int8":
            return matrices + table.numel()  # a tied table is stored in both layouts
        case "int4":
            int8 = sum(one.numel() for one in model.parameters() if one.shape == table.shape)  # and its own head
            return (matrices - int8) * (GROUP // 2 + 4) // GROUP + int8 + table.numel()  # four bytes for a scale


def use_kernels(tree: Decoder | Seq2Seq, cache: Cache) -> None:
    """Let a prepared model and its cache run inference kernels, where there are some for its modules."""
    weight = tree.token_embedding.table.weight
    if not (kernels.available and weight.is_cuda and weight.dtype in kernels.DTYPES):
        return
    cache.write_kv = write_kv
    for module in list(tree.modules()):
        for name, child in list(module.named_children()):
            if not is_own_code(child):  # what has hooks, or another's forward function, stays
                continue
            if type(child) is RMSNorm:
                replace_module(module, name, kernels.KernelRMSNorm(child))
            elif type(child) is RotaryPosition:
                replace_module(module, name, kernels.KernelRotaryPosition(child, weight.device))
            elif type(child) is FusedGateUpFeedForward and child.kind in kernels.ACTIVATIONS:
                replace_module(module, name, kernels.KernelGatedFeedForward(child))


def remove_dropout(tree: nn.Module) -> None:
    """Remove dropout, which does nothing here: on a CPU the call costs as much as a small layer."""
    for module in list(tree.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Dropout):
                replace_module(module, name, nn.Identity())


def compile_decode(tree: Decoder | Seq2Seq, slots: int) -> Callable[..., Tensor]:
    """Return the model compiled for decode steps of `slots` sequences."""
    if not tree.token_embedding.table.weight.is_cuda:  # where Inductor's own matmuls, tuned below, are slow
        return torch.compile(tree)
    # Materialise the input of each matmul: left alone, Inductor recomputes it for every row of the weight.
    options: dict[str, Any] = {"realize_opcount_threshold": 4, "realize_reads_threshold": 1}
    if slots == 1:  # reaches memory bandwidth; with more slots it takes minutes and gains nothing
        options["coordinate_descent_tuning"] = True
    return torch.compile(tree, dynamic=False, options=options)
