"""Base class of attention and feed-forward layers.

Inspection, weight initialization, FLOP estimates and fused projections use this interface, so they work with any
registered kind of layer.
"""

from __future__ import annotations

from typing import ClassVar, Literal, NamedTuple

from torch import nn

from glasshouse.layers.cache import KVShape
from glasshouse.layers.flops import FlopCount

Inside = Literal["scores", "pattern"]  # intermediates of a kernel: not the input or output of any module
Derived = Literal["scale", "result"]  # of a norm; of an output projection, what each head writes
HookPoint = Literal["output"] | Inside | Derived | int  # a module's output, an intermediate, or argument number
INSIDE: tuple[Inside, ...] = ("scores", "pattern")

TOKENS = ("batch", "position")
STREAM = ("batch", "position", "width")
NEURONS = ("batch", "position", "neuron")
VECTORS = ("batch", "head", "position", "width")
PAIRS = ("batch", "head", "query", "key")


class LayerSite(NamedTuple):
    """An activation inside a layer that can be recorded or edited."""

    name: str
    axes: tuple[str, ...]
    path: str  # of the module in the layer
    hook_point: HookPoint


class Sublayer(nn.Module):
    """A layer whose output is added to the residual stream, and comes from a linear layer of its own.

    A new kind needs `forward`, `residual_projection`, `residual_input` and `sites`; the defaults of the other methods
    fit layers whose modules run one after the other.
    """

    residual_input: ClassVar[str]  # the site of the input of `residual_projection`: by head or by neuron
    kv_shape: KVShape  # the shape of its KV cache; attention only
    shared_input: ClassVar[tuple[str, ...]] = ()  # linear layers with the same input, which `fused` replaces by one

    @property
    def residual_projection(self) -> nn.Linear:
        """The linear layer whose output is added to the residual stream."""
        raise NotImplementedError

    def sites(self) -> list[LayerSite]:
        """Return the activations inside the layer, in the order of the forward pass; `residual_input` is one."""
        raise NotImplementedError

    def fused(self, project: nn.Module) -> nn.Module:
        """Return a layer for inference in which `project` gives the outputs of `shared_input`."""
        raise NotImplementedError

    def add_flops(self, count: FlopCount, trained: bool) -> bool:
        """Add the FLOPs of the layer; return whether its output needs a gradient, as it does if its input does."""
        return count.add_children(self, trained)

    def stored_bytes(self, itemsize: int) -> int:
        """Return the bytes of activations per token stored for the backward pass, besides the layer's input."""
        return itemsize * sum(one.out_features for one in self.modules() if isinstance(one, nn.Linear))
