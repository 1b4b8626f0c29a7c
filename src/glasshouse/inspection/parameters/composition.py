"""Composition of attention heads: how much one reads of what an earlier one writes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from glasshouse.inspection.display.html import Drawing, Heatmap, HtmlDisplay
from glasshouse.inspection.parameters.low_rank import LowRank

Mode = Literal["Q", "K", "V"]


@dataclass(frozen=True, eq=False, repr=False)
class Composition(HtmlDisplay):
    """The composition score of each head, the reader, with each other, the writer; 0 unless its layer is earlier."""

    axes: ClassVar[Mapping[str, tuple[str, ...]]] = {"scores": ("layer", "head", "writer_layer", "writer_head")}
    scores: Tensor
    mode: Mode

    def _drawings(self) -> list[Drawing]:
        layers, heads = self.scores.shape[:2]
        names = [f"{layer}.{head}" for layer in range(layers) for head in range(heads)]
        caption = f"{self.mode}-composition of each head (row) with each of an earlier layer (column)"
        layer = torch.arange(layers).repeat_interleave(heads)
        values = self.scores.flatten(2).flatten(0, 1).cpu().masked_fill(layer[:, None] <= layer, torch.nan)
        values = values[heads:, :-heads]  # the first layer has no writers, the last no readers
        return [Heatmap(values, names[heads:], names[:-heads], caption)]


@torch.no_grad()
def compose(written: Iterable[LowRank], read: Iterable[LowRank], mode: Mode) -> Composition:
    """Compare the OV of each layer, [head, D, D], with what the layers after it read: their QK, or for "V" their OV.

    >>> one = LowRank(torch.ones(1, 4, 2), torch.ones(1, 2, 4))
    >>> compose([one, one], [one, one], "V").scores.flatten(2)[1, 0]
    tensor([1., 0.])
    """
    earlier: list[Tensor] = []  # of each layer so far, what its heads write, condensed: [head, rank, D]
    scores = []
    for out, into in zip(written, read, strict=True):
        reader = (into if mode == "K" else into.T).condensed()  # its side that does not read counts by its norm alone
        found = [_overlap(writer, reader) for writer in earlier]
        earlier.append(out.condensed())
        scores.append(found)
    empty = reader.new_zeros(len(reader), len(reader))
    rows = [torch.stack([*found, *[empty] * (len(scores) - len(found))], 1) for found in scores]
    return Composition(torch.stack(rows), mode)


def _overlap(writer: Tensor, reader: Tensor) -> Tensor:
    """Return |writer reader^T| / (|writer| |reader|) for all pairs of heads, [reader, writer]; 0 where one is 0."""
    products = torch.einsum("wax,rbx->rwab", writer, reader)
    norms = torch.outer(torch.linalg.matrix_norm(reader), torch.linalg.matrix_norm(writer))
    return torch.linalg.matrix_norm(products) / norms.clamp(min=torch.finfo(norms.dtype).tiny)
