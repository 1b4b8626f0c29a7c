"""Compiled where it can be; where it cannot, it says why and goes on without."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeVar

import torch
from torch import nn

from glasshouse import device as machine
from glasshouse.training.step import TrainStep

T = TypeVar("T")
LONGEST = 200  # characters of the compiler's own words; pages may follow


class Compiled:
    """A model, compiled unless something stands in the way; "auto" does not on a CPU, where it takes a minute."""

    def __init__(
        self, model: nn.Module, wanted: Literal["auto", "yes", "no"], device: torch.device, say: Callable[[str], None]
    ) -> None:
        self.plain, self.say = model, say
        obstacle = machine.compile_obstacle(device)
        self.on = wanted == "yes" or (wanted == "auto" and device.type == "cuda")
        if self.on and obstacle is not None:
            self._give_up(obstacle)
        self.model: Any = torch.compile(model) if self.on else model

    def _give_up(self, why: str) -> None:
        self.on = False
        self.say(f"not compiled: {why}")

    def run_or_fall_back(self, step: Callable[[], T], update: TrainStep) -> T:
        """Take a step; if compiling fails, take it again without, as all steps to come."""
        if not self.on:
            return step()
        from torch._dynamo.exc import TorchDynamoException
        from torch._inductor.exc import InductorError

        try:
            return step()
        except (TorchDynamoException, InductorError) as error:
            self._give_up(" ".join(str(error).split())[:LONGEST])
            update.model = self.model = self.plain
            return step()
