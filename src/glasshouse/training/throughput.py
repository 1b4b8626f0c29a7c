"""Throughput: tokens and FLOPs per second, and MFU."""

from __future__ import annotations

import sys
import time
from collections import deque

import torch

from glasshouse import device as machine

WINDOW = 20  # steps over which throughput is averaged


class Throughput:
    """Measures tokens and FLOPs per second over the last steps."""

    def __init__(self, device: torch.device, autocast_dtype: torch.dtype) -> None:
        self.device = device
        self.peak_flops = machine.measure_peak_flops(device, autocast_dtype, repeats=3)
        self._marks = deque([(time.perf_counter(), 0, 0)], maxlen=WINDOW + 1)

    def add(self, tokens: int, flops: int) -> None:
        """Add a step."""
        _, tokens_before, flops_before = self._marks[-1]
        self._marks.append((time.perf_counter(), tokens_before + tokens, flops_before + flops))

    def exclude_elapsed(self) -> None:
        """Exclude the time since the last step, spent on something else."""
        elapsed = time.perf_counter() - self._marks[-1][0]
        self._marks = deque([(at + elapsed, tokens, flops) for at, tokens, flops in self._marks], maxlen=WINDOW + 1)

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second over the last steps."""
        return self._per_second(1)

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization: FLOPs per second over the measured matmul peak."""
        return self._per_second(2) / self.peak_flops

    def _per_second(self, what: int) -> float:
        first, last = self._marks[0], self._marks[-1]
        return (last[what] - first[what]) / max(last[0] - first[0], 1e-9)

    @property
    def peak_memory(self) -> int:
        """Peak memory in bytes: of the device, or of the process."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        if sys.platform == "win32":
            return 0
        import resource  # which Windows lacks

        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
