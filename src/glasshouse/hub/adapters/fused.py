"""LoRA matrices of a fused matrix.

A family may store several of our linear layers as one fused matrix (GPT-2's QKV). Its adapter has their A matrices
concatenated and their B matrices in a block-diagonal one, which is equivalent.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from glasshouse.hub.families.family import TensorMapping
from glasshouse.layers.lora import LoRALinear


class LoRAWeights(NamedTuple):
    """The LoRA matrices of one linear layer; their product is multiplied by alpha / rank."""

    lora_a: Tensor
    lora_b: Tensor
    alpha: float

    @property
    def scale(self) -> float:
        """The factor of the product."""
        return self.alpha / len(self.lora_a)


def fuse(chunks: list[tuple[TensorMapping, LoRALinear]]) -> tuple[Tensor, Tensor]:
    """Return the LoRA matrices of a fused matrix, which may also be one of ours alone."""
    chunks = sorted(chunks, key=lambda pair: pair[0].chunk)
    lora_a = torch.cat([layer.lora_a.detach() for _, layer in chunks])
    mapping, first = chunks[0]
    count, rank = first.lora_b.shape
    lora_b = first.lora_b.new_zeros(mapping.whole(count), rank * len(chunks))
    places = torch.arange(len(lora_b))
    for i, (mapping, layer) in enumerate(chunks):
        lora_b[mapping.rows(places), i * rank : (i + 1) * rank] = layer.lora_b.detach()
    return lora_a, lora_b


def split_fused(fused: LoRAWeights, stored: TensorMapping) -> dict[int, LoRAWeights]:
    """Return the LoRA matrices of each chunk: the inverse of `fuse`, or the whole A matrix for each.

    >>> fused = LoRAWeights(
    ...     torch.tensor([[1.0], [2.0]]), torch.tensor([[3.0, 0.0], [0.0, 0.0], [0.0, 4.0]]), alpha=6.0)
    >>> for chunk, own in split_fused(fused, TensorMapping("qkv", shares=(1, 1, 1))).items():
    ...     print(chunk, own.lora_a.tolist(), own.lora_b.tolist(), own.alpha)
    0 [[1.0]] [[3.0]] 3.0
    2 [[2.0]] [[4.0]] 3.0
    """
    rows = [stored._replace(chunk=chunk).rows(fused.lora_b) for chunk in range(len(stored.shares))]
    used = [chunk for chunk, own in enumerate(rows) if own.any()]
    if used and len(fused.lora_a) % len(used) == 0:
        rank = len(fused.lora_a) // len(used)
        blocks = {chunk: slice(i * rank, (i + 1) * rank) for i, chunk in enumerate(used)}
        if all(_is_zero_outside(rows[chunk], block) for chunk, block in blocks.items()):
            alpha = fused.alpha / len(used)
            return {
                chunk: LoRAWeights(fused.lora_a[block], rows[chunk][:, block], alpha)
                for chunk, block in blocks.items()
            }
    return {chunk: LoRAWeights(fused.lora_a, own, fused.alpha) for chunk, own in enumerate(rows)}


def _is_zero_outside(lora_b: Tensor, block: slice) -> bool:
    """Whether a B matrix is zero outside a block of columns."""
    return not lora_b[:, : block.start].any() and not lora_b[:, block.stop :].any()
