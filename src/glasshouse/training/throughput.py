"""How fast a run goes: tokens a second, and what share of the fastest matrix product that is."""

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

WINDOW = 20  # steps over which speed is reckoned


class FlopEstimator:
    """The operations of learning a batch, in matrix products; what else a model computes is small beside them.

    A matrix costs 2 operations a token for each of its numbers on the way forward, 2 more for its own gradient if it
    is trained, and 2 more for that of its input if anything before it is trained. Where all is trained that is 6.

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
        self.reads, self.writes, self.head = _StackFlops(width), _StackFlops(width), _StackFlops(width)
        embedded = _is_trained(model.token_embedding)
        if isinstance(model, Seq2Seq):
            memory = self.reads.add(model.encoder, embedded)
            vectors = self.writes.add(model.decoder, embedded, memory)
        else:
            if isinstance(model, Encoder):
                embedded = embedded or _is_trained(model.segment)
            vectors = self.writes.add(model.stack, embedded)
        vectors = self.head.add(model.head, vectors)
        if getattr(s.head, "tied", False):
            self.head.maps += _product(model.token_embedding.table.weight, vectors)
        self.pools = isinstance(s.head, Pooled | SequenceClassification)  # then the head sees one vector a row

    def __call__(self, batch: Batch) -> int:
        """Count the operations of a batch, padding included."""
        (rows, length), source = batch.ids.shape, 0 if batch.source is None else batch.source.shape[1]
        count = rows * length * (self.writes.maps + self.writes.scores * length + self.writes.cross_scores * source)
        count += rows * source * (self.writes.cross_maps + self.reads.maps + self.reads.scores * source)
        return count + rows * (1 if self.pools else length) * self.head.maps


@dataclass
class _StackFlops:
    """Sums over the modules of a stack, in the order in which they compute."""

    width: int  # of all heads together
    maps: int = 0  # operations for each token
    scores: int = 0  # for each token and each that it attends to
    cross_maps: int = 0  # for each token of the source, which the keys and values of cross-attention read
    cross_scores: int = 0  # for each token and each of the source

    def add(self, module: nn.Module, trained: bool, memory: bool = False) -> bool:
        """Add a module; say whether a gradient flows back from it, as one does if what it reads is `trained`."""
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
            case nn.Embedding():  # it is looked up, not multiplied
                return trained or module.weight.requires_grad
        for child in module.children():
            trained = self.add(child, trained, memory)
        own = list(module.parameters(recurse=False))
        self.maps += sum(_product(weight, trained) for weight in own if weight.dim() == 2)
        return trained or any(weight.requires_grad for weight in own)

    def _add_attention(self, module: Attention | CrossAttention, trained: bool, memory: bool) -> bool:
        crosses = isinstance(module, CrossAttention)
        read = _StackFlops(self.width) if crosses else self
        seen = memory if crosses else trained
        learns = [self.add(module.query, trained), read.add(module.key, seen), read.add(module.value, seen)]
        learns += [_is_trained(module.q_norm), _is_trained(module.k_norm)]
        operations = (12 if any(learns) else 4) * self.width  # two products, and two gradients of each
        if crosses:
            self.cross_maps += read.maps
            self.cross_scores += operations
        else:
            self.scores += operations
        return self.add(module.out, any(learns))


def _product(weight: Tensor, trained: bool) -> int:
    """Count the operations of a matrix for each token."""
    return weight.numel() * (2 + 2 * weight.requires_grad + 2 * trained)


def _is_trained(module: nn.Module) -> bool:
    return any(weight.requires_grad for weight in module.parameters())


class Throughput:
    """Counts tokens and operations by the clock."""

    def __init__(self, device: torch.device, compute: torch.dtype) -> None:
        self.device = device
        self.peak_flops = machine.measure_peak_flops(device, compute, repeats=3)
        self._marks = deque([(time.perf_counter(), 0, 0)], maxlen=WINDOW + 1)

    def add(self, tokens: int, flops: int) -> None:
        """Count a step."""
        _, before, worked = self._marks[-1]
        self._marks.append((time.perf_counter(), before + tokens, worked + flops))

    def exclude_elapsed(self) -> None:
        """Leave out what was spent on something else since the last step."""
        late = time.perf_counter() - self._marks[-1][0]
        self._marks = deque([(at + late, tokens, work) for at, tokens, work in self._marks], maxlen=WINDOW + 1)

    @property
    def tokens_per_second(self) -> float:
        """The speed over the last steps."""
        return self._per_second(1)

    @property
    def mfu(self) -> float:
        """The share of the matmul peak."""
        return self._per_second(2) / self.peak_flops

    def _per_second(self, what: int) -> float:
        first, last = self._marks[0], self._marks[-1]
        return (last[what] - first[what]) / max(last[0] - first[0], 1e-9)

    @property
    def peak_memory(self) -> int:
        """The most bytes in use so far: of the device, or of the process."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        if sys.platform == "win32":
            return 0
        import resource  # which Windows lacks

        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
