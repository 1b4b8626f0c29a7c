"""One step of training: the gradient of a whole batch, in whatever parts, and one update of the weights."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from glasshouse.data import Batch
from glasshouse.errors import InputError
from glasshouse.evaluation.eval_loop import autocast
from glasshouse.training.memory import is_out_of_memory
from glasshouse.training.objective import compute_loss


class NonFiniteError(ArithmeticError):
    """A loss or a gradient is infinite or not a number, and no weight has changed."""


@dataclass(frozen=True)
class StepMetrics:
    """What a step came to."""

    loss: float  # nats for each target
    n_targets: int
    grad_norm: float  # of the whole gradient, before it is clipped


def alone(total: Tensor) -> Tensor:
    """Return a sum over all processes, where there is only one."""
    return total


class TrainStep:
    """Teaches a model one batch at a time.

    Each target counts the same, whichever part of the batch, or process, it is in: the loss is the sum over all of
    them over their number. `reduce` sums a number over processes, the one place where they meet before gradients do.
    `before` is called before each part of a batch; what it raises leaves the weights as they were.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        grad_clip: float | None = 1.0,
        label_smoothing: float = 0.0,
        autocast_dtype: torch.dtype = torch.float32,
        reduce: Callable[[Tensor], Tensor] = alone,
        on_micro_batch: Callable[[], None] = lambda: None,
    ) -> None:
        self.model, self.optimizer = model, optimizer
        self.grad_clip, self.label_smoothing, self.autocast_dtype, self.reduce = (
            grad_clip,
            label_smoothing,
            autocast_dtype,
            reduce,
        )
        self.on_micro_batch = on_micro_batch
        self._weights = [one for group in optimizer.param_groups for one in group["params"]]
        self._device = self._weights[0].device
        # Gradients in float16 vanish unless they are made larger on the way; in the wider types this does nothing.
        self._scaler = torch.amp.GradScaler(self._device.type, enabled=autocast_dtype == torch.float16)

    def __call__(self, batch: Batch, grad_accum: int = 1) -> StepMetrics:
        """Take a step by a batch that is computed in so many parts; gradients and loss are those of the whole."""
        total = self.reduce(batch.loss_mask.sum())
        if int(total) == 0:
            raise InputError("no place of the batch counts, so there is nothing to learn from it; leave it out.")
        self.optimizer.zero_grad(set_to_none=True)
        loss = torch.zeros((), device=self._device)
        for part in batch.microbatches(grad_accum):
            self.on_micro_batch()
            part = part.to(self._device)
            with autocast(self._device, self.autocast_dtype):
                mean = compute_loss(self.model, part, self.label_smoothing) / total
            self._scaler.scale(mean).backward()
            loss = loss + mean.detach()
        try:
            return self._apply(self.reduce(loss), int(total))
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            raise InputError(  # weights may have moved already, so this step cannot be taken again in smaller parts
                "the memory is too small for what the optimizer keeps; choose a smaller model, or train.lora."
            ) from None

    def _apply(self, loss: Tensor, targets: int) -> StepMetrics:
        """Let the gradients meet the weights, unless one of them is no number."""
        self._scaler.unscale_(self.optimizer)
        limit = torch.inf if self.grad_clip is None else self.grad_clip
        norm = nn.utils.clip_grad_norm_(self._weights, limit)
        outcome = StepMetrics(float(loss), targets, float(norm))
        finite = outcome.loss < float("inf") and outcome.grad_norm < float("inf")  # false of what is no number, too
        # With float16 a gradient that overflowed is an ordinary thing, until scaling it less does not help.
        if not finite and not (self._scaler.is_enabled() and math.isfinite(outcome.loss) and self._scale() > 1):
            if self._scaler.is_enabled():
                self._scaler.update()  # which makes ready for the next step
            raise NonFiniteError(f"the loss is {outcome.loss} and the gradient's norm {outcome.grad_norm}.")
        self._scaler.step(self.optimizer)  # with float16, a step that overflowed is left out and the next scaled less
        self._scaler.update()
        return outcome

    def _scale(self) -> float:
        return float(self._scaler.get_scale())

    def state_dict(self) -> dict[str, Any]:
        """Return what is carried from step to step, for JSON."""
        return self._scaler.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on with what `state` returned."""
        if state_dict:
            self._scaler.load_state_dict(state_dict)
