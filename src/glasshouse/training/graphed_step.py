"""Training steps by CUDA graphs: one launch for all kernels of the forward and the backward pass.

For small models, whose kernels take less time than the host needs to launch them one by one.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor, nn

from glasshouse.data import Batch
from glasshouse.device import is_out_of_memory
from glasshouse.errors import GlasshouseError
from glasshouse.training.step import LONGEST, TrainStep

MOST_GRAPHS = 32  # shapes with a graph; a graph takes as much memory as its kernel arguments, besides a shared pool
Shape = tuple[object, ...]


@dataclass
class StepGraph:
    """The captured kernels of one shape, and the tensors that they read and write."""

    graph: torch.cuda.CUDAGraph
    batch: Batch
    n_targets: Tensor
    loss: Tensor
    norm: Tensor
    trained: list[nn.Parameter]  # those that get a gradient

    def replay(self, batch: Batch, n_targets: Tensor) -> None:
        """Run the kernels on another batch of the same shape."""
        _copy_batch(batch, self.batch)
        self.n_targets.copy_(n_targets)
        self.graph.replay()


class GraphedTrainStep(TrainStep):
    """Updates a model as `TrainStep` does, with the same results, bit by bit, and fewer launches.

    The first step with a shape is an ordinary one, the second is captured as a CUDA graph, and later ones replay it.
    A graph has kernels and no Python: neither the loss nor the model may depend on anything but the batch, the
    weights and random numbers. The optimizer stays outside: its few launches run while the GPU computes gradients.
    Batches of packed documents are always ordinary steps.
    """

    def __init__(self, *given: Any, **settings: Any) -> None:  # noqa: ANN401 - those of TrainStep
        super().__init__(*given, **settings)
        self._graphs: dict[Shape, StepGraph] = {}
        self._seen: Counter[Shape] = Counter()
        self._pool: Any = torch.cuda.graph_pool_handle() if self.runs_ahead else None  # of all graphs
        # One for all captures: the allocator keeps what was freed on a stream for that stream.
        self._side: Any = torch.cuda.Stream(self.device) if self.runs_ahead else None
        # Graphs write the gradients here: in tensors of their own, each graph would hold as much memory as the model.
        self._gradients: dict[nn.Parameter, Tensor] = {}
        self._captures, self._grad_accum = False, 0

    def _compute_gradients(self, batch: Batch, grad_accum: int, n_targets: Tensor) -> tuple[Tensor, Tensor]:
        if grad_accum != self._grad_accum:
            self._start_over(grad_accum)
        shape = tuple((name, tensor.shape) for name, tensor in _tensors(batch).items())
        self._seen[shape] += 1
        # Packed documents attend by FlexAttention, whose masks were not seen to be captured.
        captures = self._captures and batch.documents is None
        if shape not in self._graphs and self._seen[shape] > 1 and captures:
            self._capture(shape, batch, grad_accum, n_targets)
        if shape not in self._graphs:
            return super()._compute_gradients(batch, grad_accum, n_targets)
        self.on_micro_batch()
        found = self._graphs[shape]
        found.replay(batch, n_targets)
        for weight in found.trained:
            weight.grad = self._gradients[weight]
        return found.loss, found.norm

    def _start_over(self, grad_accum: int) -> None:
        """Drop the graphs, for so many micro-batches: more are made where there was too little memory."""
        self._grad_accum, self._captures = grad_accum, self._side is not None
        self._seen.clear()
        if self._graphs:
            torch.cuda.synchronize(self.device)  # the last one may still run
            self._graphs.clear()
            self._pool = torch.cuda.graph_pool_handle()  # that of graphs that are gone cannot be used again
            torch.cuda.empty_cache()

    def _capture(self, shape: Shape, batch: Batch, grad_accum: int, n_targets: Tensor) -> None:
        """Capture a graph for a shape; out of memory, none is captured while there are as many micro-batches."""
        graph, side = torch.cuda.CUDAGraph(), self._side
        try:
            self._gradients = self._gradients or {weight: torch.empty_like(weight) for weight in self._weights}
            batch = replace(batch, **{name: tensor.clone() for name, tensor in _tensors(batch).items()})
            n_targets = n_targets.clone()
            side.wait_stream(torch.cuda.current_stream(self.device))
            with torch.cuda.stream(side):
                # Other threads may use the GPU meanwhile: one writes checkpoints, others pin batches.
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    loss, norm = super()._compute_gradients(batch, grad_accum, n_targets)
                    trained = [weight for weight in self._weights if weight.grad is not None]
                    torch._foreach_copy_(
                        [self._gradients[weight] for weight in trained], [weight.grad for weight in trained]
                    )
                finally:
                    graph.capture_end()
        except RuntimeError as error:
            reason = " ".join(str(error).split())[:LONGEST]
            if not is_out_of_memory(error):  # after which neither allocator nor generator can be used
                raise GlasshouseError(
                    f"no CUDA graph of the step can be made: {reason}; set train.compile=no."
                ) from None
            self._captures = False
            self.on_fallback(f"no more CUDA graphs: {reason}")
            return
        finally:
            torch.cuda.current_stream(self.device).wait_stream(side)
            self.optimizer.zero_grad(set_to_none=True)
        self._graphs[shape] = StepGraph(graph, batch, n_targets, loss, norm, trained)
        self._captures = len(self._graphs) < MOST_GRAPHS


def _tensors(batch: Batch) -> dict[str, Tensor]:
    found = {each.name: getattr(batch, each.name) for each in fields(batch)}
    return {name: tensor for name, tensor in found.items() if tensor is not None}


def _copy_batch(source: Batch, target: Batch) -> None:
    """Copy the tensors of a batch into those of another."""
    into = _tensors(target)
    torch._foreach_copy_(list(into.values()), [_tensors(source)[name] for name in into])
