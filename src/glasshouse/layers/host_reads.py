"""Whether a forward pass may read the values of a tensor, for checks and shortcuts that depend on them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

_recorded = threading.local()


def can_read(tensor: Tensor) -> bool:
    """Return whether the host may read a tensor now.

    Not on a GPU, which it would wait for, nor in code that is compiled or recorded, where the value would be fixed.
    """
    return tensor.is_cpu and not torch.compiler.is_compiling() and not getattr(_recorded, "now", False)


@contextmanager
def no_host_reads() -> Iterator[None]:
    """Let the code of this thread read no values while the context is open.

    >>> with no_host_reads():
    ...     can_read(torch.zeros(1))
    False
    """
    before = getattr(_recorded, "now", False)
    _recorded.now = True
    try:
        yield
    finally:
        _recorded.now = before
