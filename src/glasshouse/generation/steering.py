"""Steering by request: each slot of an engine has offsets of its own, added to the residual stream after a layer."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor, nn

from glasshouse.errors import InputError
from glasshouse.generation.sampling_params import SamplingParams, SteerAt
from glasshouse.inspection.steering import SteeringVector
from glasshouse.layers.context import Context
from glasshouse.models import Decoder, Model

FOREVER = 2**62  # a position after every other


class Steering:
    """The steering vectors of an engine, and of each slot the offset at their layers and the positions that get it.

    They are tensors of a fixed shape that the forward pass reads, in a CUDA graph too: a request changes its row.
    """

    def __init__(self, model: Decoder, vectors: Mapping[str, SteeringVector], slots: int) -> None:
        weight = model.token_embedding.table.weight
        self._vectors = {name: (one.layer, one.vector.to(weight.device)) for name, one in vectors.items()}
        with torch.inference_mode(False):
            zeros = partial(torch.zeros, slots, model.spec.d_model, dtype=weight.dtype, device=weight.device)
            self._offsets: dict[int, Tensor] = {layer: zeros() for layer, _ in self._vectors.values()}
            # The first position that is steered, and the one after the last.
            self._spans = torch.zeros(slots, 2, dtype=torch.long, device=weight.device)
        for layer, offsets in self._offsets.items():
            if weight.is_cuda:
                torch._dynamo.mark_static_address(offsets)
                torch._dynamo.mark_static_address(self._spans)
            model.stack.blocks[layer].register_forward_hook(partial(_add_offsets, offsets, self._spans))

    def set(self, slot: int, scales: Mapping[str, float], at: SteerAt, prompt_len: int) -> None:
        """Steer the request of a slot from now on by vectors, each at its scale; without any, not at all."""
        span = {"all": (0, FOREVER), "prompt": (0, prompt_len), "new": (prompt_len, FOREVER)}[at]
        self._spans[slot] = torch.tensor(span)
        for layer, offsets in self._offsets.items():
            added = torch.zeros_like(offsets[slot], dtype=torch.float32)
            for name, scale in scales.items():
                if self._vectors[name][0] == layer:
                    added += scale * self._vectors[name][1]
            offsets[slot] = added

    def copy(self, source: int, target: int) -> None:
        """Steer a slot like another one, whose sequence it gets."""
        self._spans[target] = self._spans[source]
        for offsets in self._offsets.values():
            offsets[target] = offsets[source]


def _add_offsets(offsets: Tensor, spans: Tensor, block: nn.Module, args: tuple[Tensor, Context], x: Tensor) -> Tensor:
    """Add to the output of a block, [B, S, D], the offset of the slot of each token that is steered."""
    cache, positions = args[1].cache, args[1].positions
    assert cache is not None
    first, end = spans[cache.cache_rows].unbind(-1)
    steered = (first <= positions) & (positions < end)
    return x + offsets[cache.cache_rows] * steered[..., None]


def check_vectors(model: Model, vectors: Mapping[str, SteeringVector]) -> None:
    """Raise for vectors of another model."""
    if vectors and not isinstance(model, Decoder):
        raise InputError(f"steering was given, but the model is a {type(model).__name__}; give a decoder.")
    for name, vector in vectors.items():
        vector.check(model, f"the steering vector {name!r}")


def steered_namespace(namespace: str, options: SamplingParams) -> str:
    """Return the namespace of a request's cached prefixes: keys and values depend on the steering.

    >>> steered_namespace("mine", SamplingParams(steer={"b": 1, "a": 2.5, "c": 0}))
    'mine steered by a 2.5, b 1.0'
    """
    listed = ", ".join(f"{name} {float(scale)!r}" for name, scale in sorted(options.steer.items()) if scale)
    if any(rule.steer for rule in options.rules):  # at some of its new tokens
        return f"{namespace} steered by {listed} and rules, request {next(_numbers)}"
    if not listed:
        return namespace
    # What is new to one request is the prompt of the next, so no other one may continue its prefix.
    alone = "" if options.steer_at == "all" else f", {options.steer_at} tokens of request {next(_numbers)}"
    return f"{namespace} steered by {listed}{alone}"


_numbers = itertools.count()
