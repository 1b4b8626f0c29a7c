"""One training step of a model that is sharded over processes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from glasshouse.models.heads import LMHead
from glasshouse.models.stack import Stack
from glasshouse.training.mixed_precision import LowPrecisionCopy
from glasshouse.training.parallel import clip_grad_norm_
from glasshouse.training.step import TrainStep


class ShardedTrainStep(TrainStep):
    """Updates a sharded model; every process calls it with its share of the batch.

    Gradients are communicated once per step, after the last micro-batch. bfloat16 needs no copy of the model: shards
    are cast as they are gathered. Blocks are compiled one by one, as what gathers them is not compiled.
    """

    def _low_precision_copy(self, defer_logits: bool, float8: bool) -> LowPrecisionCopy | None:
        self._defer_logits = defer_logits and self.precision == torch.bfloat16
        self._eager: dict[nn.Module, Any] = {}  # the forward functions of compiled blocks
        return None

    def compile(self) -> None:
        """Compile every block; a step that fails to compile is repeated in eager mode, as are all later ones."""
        for stack in self.model.modules():
            if isinstance(stack, Stack):
                for block in stack.blocks:
                    self._eager[block] = block.forward
                    block.forward = torch.compile(block.forward)

    def uncompile(self) -> None:
        """Return to eager mode."""
        for block, forward in self._eager.items():
            block.forward = forward
        self._eager.clear()

    @property
    def compiled(self) -> bool:
        """Whether the blocks are compiled."""
        return bool(self._eager)

    @contextmanager
    def eager(self) -> Iterator[None]:
        """Run the blocks in eager mode while the context is open."""
        compiled = {block: block.forward for block in self._eager}
        for block, forward in self._eager.items():
            block.forward = forward
        yield
        for block, forward in compiled.items():
            block.forward = forward

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
