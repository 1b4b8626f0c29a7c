"""The selected token, layer and head within a stack."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor

from glasshouse import spec
from glasshouse.inspection.sites import Site, parts_of, sites, sublayer_of
from glasshouse.layers.attend.layout import make_layout
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

    @cached_property
    def kernel_sites(self) -> dict[str, Site]:
        """The sites of the layer that are inputs or intermediates of an attention kernel, whose map has them all."""
        known = sites(self.trace.model)
        names = [one.name for part in parts_of(self.block) for one in sublayer_of(self.block, part).sites()]
        found = {name: known[f"{self.prefix}{name}.{self.layer}"] for name in names}
        kernels = {site.path for site in found.values() if site.hook_point == "pattern"}
        return {name: site for name, site in found.items() if site.path in kernels and site.hook_point != "output"}

    def from_kernel(self, name: str) -> Tensor:
        """Return an input of a kernel [H, S, d], or the scores or weights of the selected head and query [K]."""
        site = self.kernel_sites[name]
        (pattern,) = (
            one for one in self.kernel_sites.values() if (one.path, one.hook_point) == (site.path, "pattern")
        )
        attention = self.trace.attention_map(pattern.name)
        match site.hook_point:
            case "scores":
                return attention.scores(head=self.head, query=self.position)[0]
            case "pattern":
                return attention.weights(head=self.head, query=self.position)[0]
            case number:
                assert isinstance(number, int)
                return (attention.kernel.q, attention.kernel.k, attention.kernel.v)[number][0]

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
