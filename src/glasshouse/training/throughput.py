"""Throughput: tokens per second, FLOPs and MFU."""

from __future__ import annotations

import sys
import time
from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from glasshouse import device as machine
from glasshouse.data import Batch
from glasshouse.layers.attention import Attention, CrossAttention
from glasshouse.layers.feedforward import GatedFeedForward
from glasshouse.layers.lora import LoRALinear
from glasshouse.models import Encoder, Model, Seq2Seq
from glasshouse.spec import Pooled, SequenceClassification

WINDOW = 20  # steps over which throughput is averaged


class FlopEstimator:
    """FLOPs of the matrix products in the forward and backward pass of a batch; other operations are negligible.

    A weight matrix costs 2 FLOPs per token and element in the forward pass, 2 more for its own gradient if it is
    trained, and 2 more for that of its input if anything before it is trained: 6 if everything is trained.

    >>> import glasshouse as gh
    >>> model = gh.build(gh.preset("gpt2", n_layers=2, d_model=64, n_heads=4, vocab_size=100))
    >>> ids = torch.zeros(3, 32, dtype=torch.long)
    >>> matrices = 2 * 12 * 64**2 + 100 * 64
    >>> FlopEstimator(model)(Batch(ids, ids, ids == 0)) == 3 * 32 * (6 * matrices + 12 * 2 * 64 * 32)
    True
    """

    def __init__(self, model: Model) -> None:
        s = model.spec
        width = s.n_heads * s.d_head
        self.source_stack, self.stack, self.head = _StackFlops(width), _StackFlops(width), _StackFlops(width)
        embedded = _is_trained(model.token_embedding)
        if isinstance(model, Seq2Seq):
            memory = self.source_stack.add(model.encoder, embedded)
            vectors = self.stack.add(model.decoder, embedded, memory)
        else:
            if isinstance(model, Encoder):
                embedded = embedded or _is_trained(model.segment)
            vectors = self.stack.add(model.stack, embedded)
        vectors = self.head.add(model.head, vectors)
        if getattr(s.head, "tied", False):
            self.head.maps += _product(model.token_embedding.table.weight, vectors)
        self.pools = isinstance(s.head, Pooled | SequenceClassification)  # the head then sees one vector per sequence

    def __call__(self, batch: Batch) -> int:
        """Return the FLOPs of a batch, padding included."""
        (batch_size, length), source = batch.ids.shape, 0 if batch.source is None else batch.source.shape[1]
        count = (
            batch_size * length * (self.stack.maps + self.stack.scores * length + self.stack.cross_scores * source)
        )
        count += (
            batch_size * source * (self.stack.cross_maps + self.source_stack.maps + self.source_stack.scores * source)
        )
        return count + batch_size * (1 if self.pools else length) * self.head.maps


@dataclass
class _StackFlops:
    """Sums over the modules of a stack, in the order of execution."""

    width: int  # of all heads
    maps: int = 0  # FLOPs per token
    scores: int = 0  # per query and key
    cross_maps: int = 0  # per source token, for the keys and values of cross-attention
    cross_scores: int = 0  # per query and source token

    def add(self, module: nn.Module, trained: bool, memory: bool = False) -> bool:
        """Add a module; return whether its output needs a gradient, as it does if its input is `trained`."""
        match module:
            case Attention() | CrossAttention():
                return self._add_attention(module, trained, memory)
            case GatedFeedForward():
                gate, up = (self.add(one, trained) for one in (module.gate, module.up))
                return self.add(module.down, gate or up)
            case LoRALinear():
                self.add(module.base, trained)
                self.maps += _product(module.lora_a, trained) + _product(module.lora_b, True)
                return True
            case nn.Embedding():  # a lookup, not a product
                return trained or module.weight.requires_grad
        for child in module.children():
            trained = self.add(child, trained, memory)
        own = list(module.parameters(recurse=False))
        self.maps += sum(_product(weight, trained) for weight in own if weight.dim() == 2)
        return trained or any(weight.requires_grad for weight in own)

    def _add_attention(self, module: Attention | CrossAttention, trained: bool, memory: bool) -> bool:
        crosses = isinstance(module, CrossAttention)
        keys = _StackFlops(self.width) if crosses else self
        keys_trained = memory if crosses else trained
        needs_grad = [self.add(module.query, trained)]
        needs_grad += [keys.add(module.key, keys_trained), keys.add(module.value, keys_trained)]
        needs_grad += [_is_trained(module.q_norm), _is_trained(module.k_norm)]
        flops = (12 if any(needs_grad) else 4) * self.width  # two products, and two gradients of each
        if crosses:
            self.cross_maps += keys.maps
            self.cross_scores += flops
        else:
            self.scores += flops
        return self.add(module.out, any(needs_grad))


def _product(weight: Tensor, trained: bool) -> int:
    """Return the FLOPs of a weight matrix per token."""
    return weight.numel() * (2 + 2 * weight.requires_grad + 2 * trained)


def _is_trained(module: nn.Module) -> bool:
    return any(weight.requires_grad for weight in module.parameters())


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
