"""The selected token, layer and head within a stack."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from glasshouse import spec
from glasshouse.layers.layout import make_layout
from glasshouse.models import Seq2Seq
from glasshouse.models.stack import Stack
from glasshouse.page.trace import Trace


@dataclass(frozen=True)
class TokenPath:
    """The stack, and the selected position, layer and head."""

    trace: Trace
    prefix: str
    stack: Stack
    ids: Tensor  # [1, S]
    position: int
    layer: int
    head: int

    @property
    def spec(self) -> spec.Spec:
        """The model's spec."""
        return self.trace.model.spec

    @property
    def block(self) -> Any:  # noqa: ANN401 - torch types what a module holds as tensor or module
        """The selected layer."""
        return self.stack.blocks[self.layer]

    @property
    def position_ids(self) -> Tensor:
        """The position id, [1, 1]."""
        return make_layout(self.ids).positions[:, self.position : self.position + 1]

    def site(self, name: str, *axes: str) -> str:
        """Return the name of a site of the layer, indexed by the selection."""
        here = {"head": self.head, "position": self.position, "query": self.position}
        part = ", ".join(f"{axis}={here[axis]}" for axis in axes or ("position",))
        return f"{self.prefix}{name}.{self.layer}[{part}]"

    def residual(self, layer: int) -> Tensor:
        """Return the residual stream after a layer, [S, D]; -1 is the embedding."""
        return self.trace.activation(f"{self.prefix}embed" if layer < 0 else f"{self.prefix}resid_post.{layer}")


def memory_of(trace: Trace) -> Tensor:
    """Return the encoder output, [S, D]."""
    assert isinstance(trace.model, Seq2Seq)
    encoder = trace.model.encoder
    last = trace.activation(f"encoder.resid_post.{len(encoder.blocks) - 1}")[None]
    read: Tensor = trace.run(lambda: encoder.norm(last))[0]
    return read
