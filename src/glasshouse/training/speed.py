"""How fast a run goes: tokens a second, and what share of the fastest matrix product that is."""

from __future__ import annotations

import sys
import time
from collections import deque

import torch
from torch import Tensor, nn

from glasshouse import device as machine
from glasshouse.data import Batch
from glasshouse.models import Model, Seq2Seq

WINDOW = 20  # steps over which speed is reckoned


class Work:
    """The operations of learning a batch: 6 a token for each number in a matrix, and attention's products.

    >>> import glasshouse as gh
    >>> model = gh.build(gh.preset("gpt2", n_layers=2, d_model=64, n_heads=4, vocab_size=100))
    >>> ids = torch.zeros(3, 32, dtype=torch.long)
    >>> matrices = 2 * 12 * 64**2 + 100 * 64
    >>> Work(model)(Batch(ids, ids, ids == 0)) == 3 * 32 * (6 * matrices + 12 * 2 * 64 * 32)
    True
    """

    def __init__(self, model: Model) -> None:
        s = model.spec
        reader = model.encoder if isinstance(model, Seq2Seq) else None
        self.reading = 0 if reader is None else _matrices(reader)
        self.writing = _matrices(model) - self.reading
        self.writing += s.vocab_size * s.d_model if getattr(s.head, "tied", False) else 0
        self.products = 12 * s.n_heads * s.d_head * s.n_layers  # for each token and each that it sees
        self.read_products = 0 if reader is None else 12 * s.n_heads * s.d_head * len(reader.blocks)

    def __call__(self, batch: Batch) -> int:
        """Count the operations of a batch, padding included."""
        length = batch.ids.shape[1]
        if batch.source is None:
            return batch.ids.numel() * (6 * self.writing + self.products * length)
        source = batch.source.shape[1]
        writes = batch.ids.numel() * (6 * self.writing + self.products * (length + source))
        return writes + batch.source.numel() * (6 * self.reading + self.read_products * source)


def _matrices(model: nn.Module) -> int:
    return sum(weight.numel() for name, weight in model.named_parameters() if _multiplies(name, weight))


def _multiplies(name: str, weight: Tensor) -> bool:
    return weight.dim() == 2 and not name.endswith("table.weight")


class Speed:
    """Counts tokens and operations by the clock."""

    def __init__(self, device: torch.device, compute: torch.dtype) -> None:
        self.device = device
        self.peak = machine.matmul_peak(device, compute, repeats=3)
        self._marks = deque([(time.perf_counter(), 0, 0)], maxlen=WINDOW + 1)

    def add(self, tokens: int, operations: int) -> None:
        """Count a step."""
        _, before, worked = self._marks[-1]
        self._marks.append((time.perf_counter(), before + tokens, worked + operations))

    def pause(self) -> None:
        """Leave out what was spent on something else since the last step."""
        late = time.perf_counter() - self._marks[-1][0]
        self._marks = deque([(at + late, tokens, work) for at, tokens, work in self._marks], maxlen=WINDOW + 1)

    @property
    def tokens_per_second(self) -> float:
        """The speed over the last steps."""
        return self._per_second(1)

    @property
    def share(self) -> float:
        """The share of the matmul peak."""
        return self._per_second(2) / self.peak

    def _per_second(self, what: int) -> float:
        first, last = self._marks[0], self._marks[-1]
        return (last[what] - first[what]) / max(last[0] - first[0], 1e-9)

    @property
    def memory(self) -> int:
        """The most bytes in use so far: of the device, or of the process."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        if sys.platform == "win32":
            return 0
        import resource  # which Windows lacks

        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
