"""The attention map of one layer: which a model has, and what its mask and position bias add to the scores."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from glasshouse.config import Settings, did_you_mean, require
from glasshouse.errors import InputError
from glasshouse.inspection import AttentionMap, sites
from glasshouse.page.forward_pass import ForwardPass
from glasshouse.page.trace import Trace, TraceCache

MASKED = -1.0  # marks masked positions: no weight is negative


@dataclass(frozen=True)
class LayerParams(Settings):
    """Parameters of an endpoint about the attention of one layer."""

    forward_pass: ForwardPass = field(default_factory=ForwardPass)
    attention: str = "pattern"
    layer: int = 0

    def map(self, traces: TraceCache) -> AttentionMap:
        """Return the attention map of the layer."""
        return layer_map(traces.trace(self.forward_pass), self.attention, self.layer)


@dataclass(frozen=True)
class HeadParams(LayerParams):
    """Parameters of an endpoint about one attention head."""

    head: int = 0

    def map(self, traces: TraceCache) -> AttentionMap:
        """Return the attention map of the head's layer."""
        found = super().map(traces)
        require(0 <= self.head < found.shape[1], "head", self.head, f"within 0 and {found.shape[1] - 1}")
        return found


def attention_kinds(trace: Trace) -> list[str]:
    """Return the attention site of every layer, without its layer number."""
    return [name.rpartition(".")[0] for name, site in sites(trace.model).items() if site.hook_point == "pattern"]


def n_layers(trace: Trace, attention: str) -> int:
    """Return the number of layers with this attention."""
    kinds = attention_kinds(trace)
    if attention not in kinds:
        raise InputError(f"the model has no attention {attention!r}; {did_you_mean(attention, dict.fromkeys(kinds))}")
    return kinds.count(attention)


def layer_map(trace: Trace, attention: str, layer: int) -> AttentionMap:
    """Return the attention map of a layer."""
    depth = n_layers(trace, attention)
    require(0 <= layer < depth, "layer", layer, f"within 0 and {depth - 1}")
    return trace.attention_map(f"{attention}.{layer}")


def mask_of(found: AttentionMap, head: int, queries: slice) -> Tensor | None:
    """Return the mask or bias of some queries of a head, broadcastable to [queries, keys]."""
    drawn = found.kernel.mask.to_dense(*found.shape[2:], found.kernel.q.device, queries)
    if drawn is None:
        return None
    heads = drawn[(None,) * (4 - drawn.dim())][0]
    return heads[head if len(heads) > 1 else 0]
