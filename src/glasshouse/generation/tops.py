"""What each new token came from: the most probable tokens after each layer, and the most attended positions."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from glasshouse.generation.recording import RecordedSite
from glasshouse.generation.sampling.logits_kernels import top_logprobs
from glasshouse.generation.sampling_params import MOST_TOP
from glasshouse.inspection.inputs.forward_pass import final_stack
from glasshouse.inspection.sites import Selection, select
from glasshouse.layers.attend.layout import make_layout
from glasshouse.models import Decoder, Seq2Seq


class Top(NamedTuple):
    """The highest values of each new token, the highest first, and what they are of: tokens or positions."""

    values: Tensor  # [token, ..., rank]
    indices: Tensor


class LensReading:
    """The logit lens of a decode step: the most probable next tokens after each layer."""

    def __init__(self, model: Decoder | Seq2Seq, count: int) -> None:
        prefix, stack = final_stack(model)
        self.name, self._count = f"lens of {count}", min(count, model.spec.vocab_size)
        # The last layer is read after the final norm, as the head receives it.
        before = [f"{prefix}embed", *(f"{prefix}resid_post.{layer}" for layer in range(len(stack.blocks) - 1))]
        self._selections = [one for name in (*before, f"{prefix}final") for one in select(model, name)]
        self._model, self._norm = model, stack.norm

    def in_pass(self, model: Decoder | Seq2Seq) -> list[Selection]:
        """Return the sites of the residual stream."""
        return self._selections

    def of(self, *values: Tensor) -> Tensor:
        """Return probabilities and tokens [n, layer, rank, 2] of streams [n, 1, D], those of all layers at once."""
        *before, last = (value[:, -1] for value in values)
        # By `forward`, which bypasses hooks: this is not part of the forward pass.
        vectors = torch.cat([self._norm.forward(torch.stack(before, 1)), last[:, None]], 1)  # [n, layer, D]
        layout = make_layout(vectors[..., 0].long())
        logits = self._model.head.forward(vectors, layout, self._model.token_embedding.table.weight)
        logprobs, ids = top_logprobs(logits.flatten(0, 1), self._count)
        return pack(logprobs.exp(), ids).unflatten(0, vectors.shape[:2])


class Attended:
    """The most attended positions of some heads in a decode step, of which a request wants `count`."""

    def __init__(self, site: RecordedSite, count: int) -> None:
        self.name, self.site, self.count = f"most attended in {site.name}", site, count

    def in_pass(self, model: Decoder | Seq2Seq) -> list[Selection]:
        """Return the pattern."""
        return self.site.in_pass(model)

    def of(self, *values: Tensor) -> Tensor:
        """Return weights and positions [n, ..., rank, 2] of a pattern [n, ..., query, key], as many for any request.

        Past its keys weights are 0.
        """
        (pattern,) = values
        row = pattern[..., -1, :].float()
        if (missing := MOST_TOP - row.shape[-1]) > 0:
            row = torch.nn.functional.pad(row, (0, missing))
        return pack(*row.topk(MOST_TOP))


def pack(values: Tensor, indices: Tensor) -> Tensor:
    """Return values and indices as one tensor [..., 2]; float32 has every index below 2^24."""
    return torch.stack([values.float(), indices.float()], -1)


def unpack(packed: list[Tensor]) -> Top:
    """Return what was packed of each token."""
    values, indices = torch.stack(packed).unbind(-1)
    return Top(values, indices.long())
