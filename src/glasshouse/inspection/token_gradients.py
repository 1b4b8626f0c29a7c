"""Predictions as functions of the token embeddings, and their gradients integrated along a line."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from glasshouse.errors import InputError
from glasshouse.inspection.editing import edit
from glasshouse.inspection.inputs.call_arguments import CallArguments
from glasshouse.inspection.inputs.forward_pass import final_stack, layout_of
from glasshouse.inspection.inputs.targets import Targets
from glasshouse.inspection.logit_lens import MAX_LOGITS, n_logits
from glasshouse.inspection.recording import record
from glasshouse.inspection.sites import unwrap_compiled
from glasshouse.layers.attend.backends import Flex
from glasshouse.layers.linear.int8 import QuantizedLinear
from glasshouse.layers.linear.int8_gpu import WeightOnlyInt8Linear
from glasshouse.layers.linear.prepacked import PrepackedLinear
from glasshouse.models import Model
from glasshouse.models.stack import Stack

Of = Literal["logit", "log_prob"]

MAX_STORED = 2**26  # activations that the gradients of one forward pass need, as estimated


@dataclass(frozen=True, eq=False)
class Predictions:
    """Some predictions of a model for a prompt, as functions of its token embeddings.

    Embeddings are given by site, [N * B, S, D]: N copies of the prompt, one after the other.
    """

    model: Model
    call: CallArguments
    targets: Targets
    of: Of

    def vectors(self, embeddings: Mapping[str, Tensor]) -> Tensor:
        """Return what the head receives: [N * B, T, D], or if it pools, at all positions, [N * B, S, D]."""
        copies = self._copies(next(iter(embeddings.values())))
        site = f"{final_stack(self.model)[0]}final"
        with edit(self.model, embeddings), record(self.model, site, grad=True, stop=True) as seen:
            self.call.repeated(copies).run(self.model)
        x = seen[site]
        if self.targets.columns is None:
            return x
        return x.gather(1, self.targets.columns.repeat(copies, 1)[..., None].expand(-1, -1, x.shape[-1]))

    def top(self, vectors: Tensor) -> Tensor:
        """Return the most probable token or label of each prediction, [N * B, T]."""
        return torch.cat([logits.argmax(-1) for _, logits in self._logits(vectors)]).view(-1, self.n_targets)

    @property
    def n_targets(self) -> int:
        """The number of predictions of each sequence."""
        return self.targets.chosen.shape[1]

    def values(self, vectors: Tensor) -> tuple[Tensor, Tensor]:
        """Return the value of each prediction [N * B, T], and its gradient at the vectors that the head received."""
        values, slopes = [], []
        classes = torch.stack([one for one in (self.targets.chosen, self.targets.incorrect) if one is not None], -1)
        left = classes.repeat(self._copies(vectors), 1, 1).flatten(0, 1)  # [N * B * T, 1 or 2]
        with torch.enable_grad():
            for given, logits in self._logits(vectors):
                here, left = left[: len(logits)], left[len(logits) :]
                scores = logits.log_softmax(-1) if self.of == "log_prob" else logits
                one, *incorrect = scores.gather(-1, here).unbind(-1)
                value = one - incorrect[0] if incorrect else one
                slopes.append(torch.autograd.grad(value.sum(), given)[0])
                values.append(value.detach())
        return torch.cat(values).view(-1, self.n_targets), torch.cat(slopes).view_as(vectors)

    def _logits(self, vectors: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield inputs of the head, detached, and their logits [n, classes], as many at a time as memory allows."""
        head, table = unwrap_compiled(self.model.head), self.model.token_embedding.table.weight
        call = self.call.repeated(self._copies(vectors))
        layout = layout_of(self.model, call.inputs[-1], call.model_kwargs)
        parts: Sequence[Tensor] = [vectors]
        if self.targets.columns is not None:
            parts = vectors.flatten(0, 1).split(max(1, MAX_LOGITS // n_logits(self.model)))
        for part in parts:
            given = part.detach().requires_grad_()
            # By `forward`, which bypasses hooks: this is not part of a forward pass of the model.
            logits = head.forward(given, layout, table)
            yield given, logits.to(torch.promote_types(logits.dtype, torch.float32))

    def _copies(self, x: Tensor) -> int:
        return len(x) // len(self.targets.chosen)


def midpoints(steps: int) -> list[float]:
    """Return the midpoints of equal parts of the line from 0 to 1.

    >>> midpoints(2)
    [0.25, 0.75]
    """
    return [(step + 0.5) / steps for step in range(steps)]


def integrate(
    predictions: Predictions,
    start: Mapping[str, Tensor],
    stop: Mapping[str, Tensor],
    shares: Sequence[float],
    progress: Callable[[int, int], None] | None = None,
) -> list[Tensor]:
    """Return the mean gradient of each prediction over points between two token embeddings, times their difference.

    The points are at some shares of the way. The result has for each stack [B, T, S]: it is summed over the width.

    One forward pass of several points, and on its graph one backward pass for each prediction. For many points that
    is as fast as batched gradients, which not every kernel has; a copy of the prompt for each prediction would take
    half as long again.
    """
    n_targets = predictions.n_targets
    totals = {name: x.new_zeros(len(x), n_targets, x.shape[1]) for name, x in stop.items()}
    step, done = _points_at_once(predictions), 0
    for first in range(0, len(shares), step):
        some = torch.tensor(shares[first : first + step], dtype=torch.float64)
        points = {
            name: start[name].lerp(x, some.to(x)[:, None, None, None]).flatten(0, 1).requires_grad_()
            for name, x in stop.items()
        }
        with torch.enable_grad():
            vectors = predictions.vectors(points)
            _, slopes = predictions.values(vectors)
            pairs = [(vectors, slopes)]
            if predictions.targets.columns is not None:
                pairs = list(zip(vectors.unbind(1), slopes.unbind(1), strict=True))
        for number, (output, slope) in enumerate(pairs):
            found = torch.autograd.grad(output, list(points.values()), slope, retain_graph=number + 1 < n_targets)
            for name, gradient in zip(points, found, strict=True):
                gradient = gradient.unflatten(0, (len(some), -1)).sum(0)
                totals[name][:, number] += (gradient * (stop[name] - start[name])).sum(-1)
            done += len(some)
            if progress is not None:
                progress(done, len(shares) * n_targets)
    return [total / len(shares) for total in totals.values()]


def _points_at_once(predictions: Predictions) -> int:
    """Return how many copies of the prompt one forward pass may have, so that its graph fits in memory."""
    s, inputs = predictions.model.spec, predictions.call.inputs
    n_layers = s.n_layers + getattr(s, "n_encoder_layers", 0)
    # Of a block: residual stream, norms, queries, keys and values; neurons; weights, where no fused kernel attends.
    stored = n_layers * (8 * s.d_model + 3 * s.d_ff + s.n_heads * max(ids.shape[1] for ids in inputs))
    return max(1, MAX_STORED // (stored * sum(ids.numel() for ids in inputs)))


@contextmanager
def repeatable_backward(model: Model) -> Iterator[None]:
    """Attend without FlexAttention, whose compiled backward pass frees the graph: torch refuses a second one."""
    stacks = [module for module in model.modules() if isinstance(module, Stack)]
    before = [stack.backends for stack in stacks]
    try:
        for stack in stacks:
            stack.backends = tuple(one for one in stack.backends if not issubclass(one, Flex))
        yield
    finally:
        for stack, backends in zip(stacks, before, strict=True):
            stack.backends = backends


def check_differentiable(model: Model) -> None:
    """Raise InputError where no gradient reaches the token embeddings, or only a part of it."""
    if torch.is_inference_mode_enabled():
        raise InputError("inference_mode is on, in which torch computes no gradients; call this outside of it.")
    for module in map(unwrap_compiled, model.modules()):
        if isinstance(module, QuantizedLinear | PrepackedLinear | WeightOnlyInt8Linear):
            raise InputError(
                f"{type(module).__name__} is for inference and has no gradient; use the model before quantization."
            )
