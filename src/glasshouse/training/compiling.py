"""torch.compile with a fallback to eager mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeVar

import torch
from torch import nn

from glasshouse import device as machine
from glasshouse.training.step import TrainStep

T = TypeVar("T")
LONGEST = 200  # characters of the compiler's message, which can be very long


class Compiled:
    """A model, compiled if possible; "auto" compiles on CUDA only, as it takes a minute on a CPU."""

    def __init__(
        self, model: nn.Module, mode: Literal["auto", "yes", "no"], device: torch.device, log: Callable[[str], None]
    ) -> None:
        self.eager, self.log = model, log
        obstacle = machine.compile_obstacle(device)
        self.on = mode == "yes" or (mode == "auto" and device.type == "cuda")
        if self.on and obstacle is not None:
            self._give_up(obstacle)
        self.model: Any = torch.compile(model) if self.on else model

    def _give_up(self, why: str) -> None:
        self.on = False
        self.log(f"not compiled: {why}")

    def run_or_fall_back(self, step: Callable[[], T], step_fn: TrainStep) -> T:
        """Run a step; if compilation fails, rerun it and all later steps in eager mode."""
        if not self.on:
            return step()
        from torch._dynamo.exc import TorchDynamoException
        from torch._inductor.exc import InductorError

        try:
            return step()
        except (TorchDynamoException, InductorError) as error:
            self._give_up(" ".join(str(error).split())[:LONGEST])
            step_fn.model = self.model = self.eager
            return step()
