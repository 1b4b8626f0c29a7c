"""One training step: forward and backward with gradient accumulation, clipping and the update; EMA of the weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from glasshouse.data import Batch
from glasshouse.device import is_out_of_memory
from glasshouse.errors import InputError
from glasshouse.objectives.loss import LossFn, autocast, compute_loss

LONGEST = 200  # characters of the compiler's message, which can be very long


class NonFiniteError(ArithmeticError):
    """The loss or a gradient is NaN or infinite; no weight was updated."""


@dataclass(frozen=True)
class StepMetrics:
    """Metrics of one step."""

    loss: float  # mean over targets, in nats
    n_targets: int
    grad_norm: float  # before clipping


def single_process(total: Tensor) -> Tensor:
    """Reduce over a single process: the identity."""
    return total


class TrainStep:
    """Updates a model, one batch at a time.

    Every target has the same weight, in any micro-batch or process: the loss is the sum over all targets divided by
    their number. `reduce` sums a tensor over processes, before gradients are reduced. `on_micro_batch` is called
    before each micro-batch; if it raises, the weights are unchanged. `loss_fn` is the loss of the objective.
    `on_fallback` is told why a compiled model falls back to eager mode.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        grad_clip: float | None = 1.0,
        loss_fn: LossFn = compute_loss,
        label_smoothing: float = 0.0,
        autocast_dtype: torch.dtype = torch.float32,
        reduce: Callable[[Tensor], Tensor] = single_process,
        on_micro_batch: Callable[[], None] = lambda: None,
        on_fallback: Callable[[str], None] = lambda reason: None,
    ) -> None:
        self.model: Any = model
        self._eager, self.optimizer, self.loss_fn = model, optimizer, loss_fn
        self.grad_clip, self.label_smoothing, self.autocast_dtype, self.reduce = (
            grad_clip,
            label_smoothing,
            autocast_dtype,
            reduce,
        )
        self.on_micro_batch, self.on_fallback = on_micro_batch, on_fallback
        self._weights = [one for group in optimizer.param_groups for one in group["params"]]
        self.device = self._weights[0].device
        # float16 gradients underflow without loss scaling; other types need none.
        self._scaler = torch.amp.GradScaler(self.device.type, enabled=autocast_dtype == torch.float16)

    def compile(self) -> None:
        """Compile the model; a step that fails to compile is repeated in eager mode, as are all later ones."""
        self.model = torch.compile(self._eager)

    @property
    def compiled(self) -> bool:
        """Whether the model is compiled."""
        return self.model is not self._eager

    def __call__(self, batch: Batch, grad_accum: int = 1) -> StepMetrics:
        """Run a step with `grad_accum` micro-batches; loss and gradients are those of the whole batch."""
        if not self.compiled:
            return self._run(batch, grad_accum)
        from torch._dynamo.exc import TorchDynamoException
        from torch._inductor.exc import InductorError

        try:
            return self._run(batch, grad_accum)
        except (TorchDynamoException, InductorError) as error:
            self.on_fallback(" ".join(str(error).split())[:LONGEST])
            self.model = self._eager
            return self._run(batch, grad_accum)

    def _run(self, batch: Batch, grad_accum: int) -> StepMetrics:
        total = self.reduce(batch.loss_mask.sum())
        if int(total) == 0:
            raise InputError("the loss mask of the batch is empty, so it has no target; leave it out.")
        self.optimizer.zero_grad(set_to_none=True)
        loss = torch.zeros((), device=self.device)
        for micro_batch in batch.to(self.device).microbatches(grad_accum):
            self.on_micro_batch()
            with autocast(self.device, self.autocast_dtype):
                mean = self.loss_fn(self.model, micro_batch, self.label_smoothing) / total
            self._scaler.scale(mean).backward()
            loss = loss + mean.detach()
        try:
            return self._apply(self.reduce(loss), int(total))
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            raise InputError(  # weights may be partly updated, so the step cannot be retried with more micro-batches
                "out of memory for the optimizer's state; choose a smaller model, or train.lora."
            ) from None

    def _apply(self, loss: Tensor, targets: int) -> StepMetrics:
        """Clip the gradients and update the weights, unless the loss or a gradient is NaN or infinite."""
        self._scaler.unscale_(self.optimizer)
        limit = torch.inf if self.grad_clip is None else self.grad_clip
        norm = nn.utils.clip_grad_norm_(self._weights, limit)
        outcome = StepMetrics(float(loss), targets, float(norm))
        finite = outcome.loss < float("inf") and outcome.grad_norm < float("inf")  # false for NaN, too
        # With float16, gradients overflow now and then; it is an error once the loss scale cannot go lower.
        if not finite and not (self._scaler.is_enabled() and math.isfinite(outcome.loss) and self._scale() > 1):
            if self._scaler.is_enabled():
                self._scaler.update()  # resets it for the next step
            raise NonFiniteError(f"the loss is {outcome.loss} and the gradient norm {outcome.grad_norm}.")
        self._scaler.step(self.optimizer)  # with float16, skips a step that overflowed and lowers the scale
        self._scaler.update()
        return outcome

    def _scale(self) -> float:
        return float(self._scaler.get_scale())

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the gradient scaler, as JSON values."""
        return self._scaler.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        if state_dict:
            self._scaler.load_state_dict(state_dict)


class EMA:
    """Exponential moving average of a model's weights, updated after each step.

    The decay is at most (1 + n) / (10 + n) after n updates, so that the initial weights are forgotten quickly.

    >>> model = nn.Linear(1, 1, bias=False)
    >>> nn.init.zeros_(model.weight).item()
    0.0
    >>> ema = EMA(model, decay=0.5)
    >>> for value in (4.0, 8.0):
    ...     _ = nn.init.constant_(model.weight, value)
    ...     ema.update()
    >>> with ema.applied():
    ...     print(round(model.weight.item(), 3))
    6.818
    >>> model.weight.item()
    8.0
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        if not 0 <= decay < 1:
            raise InputError(f"the decay of the EMA is {decay}, but it must be at least 0 and below 1.")
        self.model, self.decay, self.updates = model, decay, 0
        self.weights = {name: weight.detach().clone() for name, weight in model.named_parameters()}

    @torch.no_grad()
    def update(self) -> None:
        """Update the average with the current weights."""
        self.updates += 1
        decay = min(self.decay, (1 + self.updates) / (10 + self.updates))
        current = dict(self.model.named_parameters())
        torch._foreach_lerp_(
            list(self.weights.values()), [current[name].detach() for name in self.weights], 1 - decay
        )

    def restore(self, weights: dict[str, Tensor], updates: int) -> None:
        """Restore a saved average."""
        self.updates = updates
        for name, weight in self.weights.items():
            weight.copy_(weights[name])

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Swap the average into the model while the context is open."""
        own = {name: weight.detach().clone() for name, weight in self.model.named_parameters()}
        self._copy_to_model(self.weights)
        try:
            yield
        finally:
            self._copy_to_model(own)

    @torch.no_grad()
    def _copy_to_model(self, weights: dict[str, Tensor]) -> None:
        for name, weight in self.model.named_parameters():
            weight.copy_(weights[name])
