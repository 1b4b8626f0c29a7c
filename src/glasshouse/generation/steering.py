"""Steering by request: each slot of an engine has offsets of its own, added to the residual stream after a layer."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor, nn

from glasshouse.errors import InputError
from glasshouse.generation.sampling_params import SamplingParams
from glasshouse.inspection.steering import SteeringVector
from glasshouse.layers.context import Context
from glasshouse.models import Decoder, Model


class Steering:
    """The steering vectors of an engine, and the offset of each slot at their layers.

    Offsets are tensors of a fixed shape that the forward pass reads, in a CUDA graph too: a request changes its row.
    """

    def __init__(self, model: Decoder, vectors: Mapping[str, SteeringVector], slots: int) -> None:
        weight = model.token_embedding.table.weight
        self._vectors = {name: (one.layer, one.vector.to(weight.device)) for name, one in vectors.items()}
        with torch.inference_mode(False):
            zeros = partial(torch.zeros, slots, model.spec.d_model, dtype=weight.dtype, device=weight.device)
            self._offsets: dict[int, Tensor] = {layer: zeros() for layer, _ in self._vectors.values()}
        for layer, offsets in self._offsets.items():
            if weight.is_cuda:
                torch._dynamo.mark_static_address(offsets)
            model.stack.blocks[layer].register_forward_hook(partial(_add_offsets, offsets))

    def set(self, slot: int, scales: Mapping[str, float]) -> None:
        """Steer the next request of a slot by vectors, each at its scale; without any, not at all."""
        for layer, offsets in self._offsets.items():
            added = torch.zeros_like(offsets[slot], dtype=torch.float32)
            for name, scale in scales.items():
                if self._vectors[name][0] == layer:
                    added += scale * self._vectors[name][1]
            offsets[slot] = added

    def copy(self, source: int, target: int) -> None:
        """Steer a slot like another one, whose sequence it gets."""
        for offsets in self._offsets.values():
            offsets[target] = offsets[source]


def _add_offsets(offsets: Tensor, block: nn.Module, args: tuple[Tensor, Context], x: Tensor) -> Tensor:
    """Add to the output of a block, [B, S, D], the offset of the slot of each token."""
    cache = args[1].cache
    assert cache is not None
    return x + offsets[cache.cache_rows]


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
    return f"{namespace} steered by {listed}" if listed else namespace
