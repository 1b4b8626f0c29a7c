"""One training step: forward and backward with gradient accumulation, clipping and the update.

In mixed precision, with a model that is sharded over processes, and with an EMA of the weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from glasshouse.data import Batch
from glasshouse.device import is_out_of_memory
from glasshouse.errors import InputError
from glasshouse.layers.linear.float8 import convert_to_float8
from glasshouse.layers.linear.frozen_quantized import copy_sharing_quantized
from glasshouse.layers.position import LearnedPosition
from glasshouse.models.heads import DeferredHead, LMHead
from glasshouse.models.stack import Stack
from glasshouse.objectives.loss.cross_entropy import LossFn, autocast, compute_loss
from glasshouse.training.distributed.fsdp import clip_grad_norm_
from glasshouse.training.optimizer import skips_nonfinite

ALIGNED = 8  # a multiple of it as the width of a padded batch: 16 bytes of a row in 16 bits
RECOMPILE_LIMIT = 64
LONGEST = 200  # characters of the compiler's message, which can be very long


class NonFiniteError(ArithmeticError):
    """The loss or a gradient is NaN or infinite; no weight was updated."""


@dataclass(frozen=True)
class StepMetrics:
    """Metrics of one step."""

    loss: float  # mean over targets, in nats
    n_targets: int
    grad_norm: float  # before clipping

    @property
    def is_finite(self) -> bool:
        """Whether neither loss nor gradient is NaN or infinite."""
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)

    def error(self) -> NonFiniteError:
        """Return the error of a step whose loss or gradient is NaN or infinite."""
        return NonFiniteError(f"the loss is {self.loss} and the gradient norm {self.grad_norm}.")


class StepFuture:
    """A step that a GPU may still be running; `result` waits for its metrics."""

    def __init__(self, loss: Tensor, grad_norm: Tensor, n_targets: int, nonfinite: Tensor | None = None) -> None:
        self._n_targets, self._nonfinite = n_targets, nonfinite
        values = torch.stack([loss.double(), grad_norm.double()])
        self._event: torch.cuda.Event | None = None
        if values.is_cuda:  # the copy starts now, so that reading it does not wait for later steps
            values = torch.empty_like(values, device="cpu", pin_memory=True).copy_(values, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()
        self._values = values

    def result(self) -> StepMetrics:
        """Return the metrics; raise `NonFiniteError` if no weight was updated, and let later steps update again."""
        if self._event is not None:
            self._event.synchronize()
        metrics = StepMetrics(float(self._values[0]), self._n_targets, float(self._values[1]))
        if self._nonfinite is not None and not metrics.is_finite:
            self._nonfinite.zero_()
            raise metrics.error()
        return metrics


def single_process(total: Tensor) -> Tensor:
    """Reduce over a single process: the identity."""
    return total


class TrainStep:
    """Updates a model, one batch at a time.

    Every target has the same weight, in any micro-batch or process: the loss is the sum over all targets divided by
    their number. `reduce` sums a tensor over processes, before gradients are reduced. `on_micro_batch` is called
    before each micro-batch; if it raises, the weights are unchanged. `loss_fn` is the loss of the objective; with
    `defer_logits` it may be given the inputs of the head's last matmul instead of logits, and with `aligns` batches
    that are padded further on a GPU. `precision` is the dtype of matrix products: bfloat16 computes with a copy of
    the model, in which linear layers multiply in fp8 if `float8`; float16 computes by autocast, as its residual
    stream would overflow. `on_fallback` is called with the reason when a compiled model falls back to eager mode.

    If the loss or a gradient is NaN or infinite, no weight is updated.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        grad_clip: float | None = 1.0,
        loss_fn: LossFn = compute_loss,
        defer_logits: bool = False,
        aligns: bool = True,
        label_smoothing: float = 0.0,
        precision: torch.dtype = torch.float32,
        float8: bool = False,
        reduce: Callable[[Tensor], Tensor] = single_process,
        on_micro_batch: Callable[[], None] = lambda: None,
        on_fallback: Callable[[str], None] = lambda reason: None,
    ) -> None:
        self.model, self.optimizer, self.loss_fn = model, optimizer, loss_fn
        self.grad_clip, self.label_smoothing, self.precision, self.reduce = (
            grad_clip,
            label_smoothing,
            precision,
            reduce,
        )
        self.on_micro_batch, self.on_fallback = on_micro_batch, on_fallback
        self._weights = [one for group in optimizer.param_groups for one in group["params"]]
        self.device = self._weights[0].device
        self._compiled: dict[nn.Module, Any] = {}  # blocks, and their compiled forward functions
        # Padding is masked, and on a GPU aligned rows are faster, and few widths are few shapes to launch or compile.
        self._multiple = ALIGNED if aligns and self.device.type == "cuda" else 1
        self._max_len = min(
            (one.max_len for one in model.modules() if isinstance(one, LearnedPosition)), default=None
        )
        self._low = self._low_precision_copy(defer_logits, float8)
        # float16 gradients underflow without loss scaling; other types need none.
        self._scaler = torch.amp.GradScaler(self.device.type, enabled=precision == torch.float16)
        # Whether the device itself leaves out updates, so that the host need not wait for it.
        self.runs_ahead = self.device.type == "cuda" and skips_nonfinite(optimizer) and not self._scaler.is_enabled()
        self._nonfinite = torch.zeros((), device=self.device)  # 1 from a NaN or infinite step on, until it is read

    def _low_precision_copy(self, defer_logits: bool, float8: bool) -> LowPrecisionCopy | None:
        if self.precision != torch.bfloat16:
            return None
        return LowPrecisionCopy(self.model, self.precision, defer_logits=defer_logits, float8=float8)

    def compile(self) -> None:
        """Compile every block; a step that fails to compile is repeated in eager mode, as are all later ones.

        Blocks and not the whole model: alike as they are, they share compiled code, so that compiling takes a third
        of the time, and steps are as fast within 1%. Only steps are compiled: hooks on the model work between them.
        """
        model = self.model if self._low is None else self._low.model
        for stack in model.modules():
            if isinstance(stack, Stack):
                self._compiled |= {block: torch.compile(block.forward) for block in stack.blocks}

    @property
    def compiled(self) -> bool:
        """Whether steps run compiled blocks."""
        return bool(self._compiled)

    @contextmanager
    def _compiled_blocks(self) -> Iterator[None]:
        """Let the blocks run their compiled code, while the context is open."""
        for block, forward in self._compiled.items():
            block.forward = forward
        try:
            # One code for all blocks: kinds of blocks times shapes, where torch's limit is 8 for one function.
            with torch._dynamo.config.patch(recompile_limit=RECOMPILE_LIMIT):
                yield
        finally:
            for block in self._compiled:
                del block.forward

    def __call__(self, batch: Batch, grad_accum: int = 1) -> StepMetrics:
        """Run a step with `grad_accum` micro-batches; loss and gradients are those of the whole batch."""
        return self.launch(batch, grad_accum).result()

    def launch(self, batch: Batch, grad_accum: int = 1, n_targets: int | None = None) -> StepFuture:
        """Start a step; where `runs_ahead`, the next may be started before the result is read.

        `n_targets` is the number of targets in all processes, where it is known.
        From a step with a NaN or infinite loss or gradient on, no step updates the weights until its result is read.
        """
        if not self.compiled:
            return self._run(batch, grad_accum, n_targets)
        from torch._dynamo.exc import TorchDynamoException
        from torch._inductor.exc import InductorError

        try:
            with self._compiled_blocks():
                return self._run(batch, grad_accum, n_targets)
        except (TorchDynamoException, InductorError) as error:
            self.on_fallback(f"not compiled: {' '.join(str(error).split())[:LONGEST]}")
            self._compiled.clear()
            return self._run(batch, grad_accum, n_targets)

    def _run(self, batch: Batch, grad_accum: int, n_targets: int | None) -> StepFuture:
        if n_targets is None:
            n_targets = int(self.reduce(batch.loss_mask.sum()))
        if n_targets == 0:
            raise InputError("the loss mask of the batch is empty, so it has no target; leave it out.")
        self.optimizer.zero_grad(set_to_none=True)
        batch = batch.padded(self._multiple, self._max_len).to(self.device)
        loss, norm = self._compute_gradients(batch, grad_accum, torch.full((), float(n_targets), device=self.device))
        try:
            return self._update(loss, norm, n_targets)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            raise InputError(  # weights may be partly updated, so the step cannot be retried with more micro-batches
                "out of memory for the optimizer's state; choose a smaller model, or train.lora."
            ) from None

    def _compute_gradients(self, batch: Batch, grad_accum: int, n_targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return the loss of a batch on the device, and the norm of the gradients before they are clipped."""
        model = self.model
        if self._low is not None:
            self._low.update()
            model = self._low.model
        loss = torch.zeros((), device=self.device)
        micro_batches = batch.microbatches(grad_accum)
        for number, micro_batch in enumerate(micro_batches, 1):
            self.on_micro_batch()
            with self._forward_context(is_last=number == len(micro_batches)):
                mean = self.loss_fn(model, micro_batch, self.label_smoothing) / n_targets
            self._scaler.scale(mean).backward()
            if self._low is not None:
                self._low.add_gradients()
            loss = loss + mean.detach()
        self._scaler.unscale_(self.optimizer)
        return self.reduce(loss), self._clip_gradients(torch.inf if self.grad_clip is None else self.grad_clip)

    def _forward_context(self, *, is_last: bool) -> AbstractContextManager[object]:
        """Return the context of the forward pass of a micro-batch."""
        return autocast(self.device, self.precision) if self._low is None else nullcontext()

    def _clip_gradients(self, max_norm: float) -> Tensor:
        """Clip the gradients, and return their norm before."""
        return nn.utils.clip_grad_norm_(self._weights, max_norm)

    def _update(self, loss: Tensor, norm: Tensor, targets: int) -> StepFuture:
        """Update the weights, unless the loss or a gradient is NaN or infinite."""
        if self.runs_ahead:
            self._nonfinite.logical_or_(~(loss.isfinite() & norm.isfinite()))
            self.optimizer.found_inf = self._nonfinite  # type: ignore[attr-defined]
            self.optimizer.step()
            return StepFuture(loss, norm, targets, self._nonfinite)
        outcome = StepFuture(loss, norm, targets)
        metrics = outcome.result()
        # With float16, gradients overflow now and then; it is an error once the loss scale cannot go lower.
        scaled_down = self._scaler.is_enabled() and math.isfinite(metrics.loss) and self._scale() > 1
        if not metrics.is_finite and not scaled_down:
            if self._scaler.is_enabled():
                self._scaler.update()  # resets it for the next step
            raise metrics.error()
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
        self._current: list[Tensor] = [weight for _, weight in model.named_parameters()]

    @torch.no_grad()
    def update(self) -> None:
        """Update the average with the current weights."""
        self.updates += 1
        decay = min(self.decay, (1 + self.updates) / (10 + self.updates))
        torch._foreach_lerp_(list(self.weights.values()), self._current, 1 - decay)

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


class LowPrecisionCopy:
    """A copy of a model in low precision, for the forward and the backward pass.

    The weights are cast once per step, and not in every forward pass as by autocast, and activations are in low
    precision from the embedding on. Quantized weights are shared with the model. Gradients are summed over
    micro-batches in the precision of the master weights. With `float8`, linear layers multiply in fp8.

    >>> import glasshouse as gh
    >>> model = gh.build(gh.preset("tiny-decoder"))
    >>> low = LowPrecisionCopy(model, torch.bfloat16)
    >>> low.model(torch.tensor([[1, 2, 3]])).sum().backward()
    >>> low.add_gradients()
    >>> model.head.weight.grad.dtype
    torch.float32
    """

    def __init__(
        self, master: nn.Module, dtype: torch.dtype, *, defer_logits: bool = False, float8: bool = False
    ) -> None:
        self.model = copy_sharing_quantized(master).to(dtype).train()
        if float8:
            convert_to_float8(self.model)
        self._master: list[Tensor] = [weight for weight in master.parameters() if weight.requires_grad]
        self._low: list[Tensor] = [weight for weight in self.model.parameters() if weight.requires_grad]
        head = getattr(self.model, "head", None)
        if defer_logits and isinstance(head, LMHead):
            self.model.head = DeferredHead(head)

    @torch.no_grad()
    def update(self) -> None:
        """Copy the master weights, after they have changed, and drop gradients that a failed backward pass left."""
        torch._foreach_copy_(self._low, self._master)
        for low in self._low:
            low.grad = None

    @torch.no_grad()
    def add_gradients(self) -> None:
        """Move the gradients of one backward pass to the master weights, added to those that are there."""
        sums, terms = list[Tensor](), list[Tensor]()
        first, copies = list[Tensor](), list[Tensor]()
        for master, low in zip(self._master, self._low, strict=True):
            if low.grad is None:
                continue
            if master.grad is None:
                master.grad = torch.empty_like(master)
                first.append(master.grad)
                copies.append(low.grad)
            else:
                sums.append(master.grad)
                terms.append(low.grad)
            low.grad = None
        if first:
            torch._foreach_copy_(first, copies)
        if sums:
            torch._foreach_add_(sums, terms)


class ShardedTrainStep(TrainStep):
    """Updates a sharded model; every process calls it with its share of the batch.

    Gradients are communicated once per step, after the last micro-batch. bfloat16 needs no copy of the model: shards
    are cast as they are gathered.
    """

    def _low_precision_copy(self, defer_logits: bool, float8: bool) -> LowPrecisionCopy | None:
        self._defer_logits = defer_logits and self.precision == torch.bfloat16
        return None

    def _forward_context(self, *, is_last: bool) -> AbstractContextManager[object]:
        model: Any = self.model
        model.set_requires_gradient_sync(is_last)
        return _deferred_logits(model.head, self._defer_logits)

    def _clip_gradients(self, max_norm: float) -> Tensor:
        return clip_grad_norm_(self._weights, max_norm)


@contextmanager
def _deferred_logits(head: nn.Module, defer: bool) -> Iterator[None]:
    """Let the head leave its last matmul to the loss, while the context is open; modules and names do not change."""
    if not (defer and isinstance(head, LMHead)) or "forward" in vars(head):  # split: the loss is on its shards
        yield
        return
    head.forward = lambda x, layout, table: head.unprojected(x, table)  # type: ignore[method-assign,assignment,return-value]
    try:
        yield
    finally:
        del head.forward
