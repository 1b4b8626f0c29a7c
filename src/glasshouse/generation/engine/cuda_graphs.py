"""CUDA graphs: one host call launches all kernels of a step; and copies to a GPU that the host does not wait for."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

# Other threads, such as that of another engine, may run kernels and allocate meanwhile, but not capture.
_capturing = threading.Lock()
WARM_UPS = 2  # runs before a capture: libraries and compilers initialise in the first


class Graphs:
    """Runs functions without arguments that read and write tensors in place, each captured at its first run.

    A captured function uses the tensors of its capture, so callers update those in place. Its results are overwritten
    by the next run of any function.
    """

    def __init__(self, state: Callable[[], Sequence[Tensor]]) -> None:
        self._state = state  # tensors that a run changes, restored after warm-up
        self._captured: dict[Hashable, tuple[torch.cuda.CUDAGraph, tuple[Tensor, ...]]] = {}
        self._pool: Any = None  # the memory pool of all graphs

    def run(self, key: Hashable, function: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """Run a function; `key` identifies it and everything its kernels depend on."""
        if key not in self._captured:
            self._captured[key] = self._capture(function)
        graph, results = self._captured[key]
        graph.replay()
        return results

    def _capture(self, function: Callable[[], tuple[Tensor, ...]]) -> tuple[torch.cuda.CUDAGraph, tuple[Tensor, ...]]:
        with _capturing:
            stream = _capture_stream(torch.cuda.current_device())
            before = [(tensor, tensor.clone()) for tensor in self._state()]
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(WARM_UPS):
                    function()
                    for tensor, saved in before:
                        tensor.copy_(saved)
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"):
                results = function()
            self._pool = graph.pool()
        return graph, results


@functools.cache
def _capture_stream(device: int) -> torch.cuda.Stream:
    """Return the stream of all captures: torch has few streams, and hands one to several callers."""
    return torch.cuda.Stream(device)


def copy_to_device(values: Sequence[Any], device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Return nested lists of numbers as a tensor; on a GPU without waiting for its work, as torch.tensor would.

    >>> copy_to_device([[1, 2]], torch.device("cpu"))
    tensor([[1, 2]])
    """
    tensor = torch.tensor(values, dtype=dtype)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def bucket(count: int) -> int:
    """Return the size that a count is padded to, so that few sizes need a graph of their own.

    >>> [bucket(count) for count in (1, 3, 6, 20, 65, 300, 700)]
    [1, 4, 8, 24, 72, 320, 704]
    """
    step = 1
    while step * 16 < count or (step < 8 and step * 2 <= count):
        step *= 2
    return -(-count // step) * step
