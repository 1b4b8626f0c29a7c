"""Constrained decoding: a request may limit, token by token, which tokens can come next."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor


TOO_COMPLEX = "the constraint takes too much work after this output"  # how such an error begins


class ConstraintState(Protocol):
    """Where one sequence is in what its constraint allows."""

    complete: bool  # nothing but an end token may follow

    def allowed(self) -> Tensor:
        """Return which tokens may come next, as bool [V] on the CPU; raise InputError where that takes too much."""

    def accept(self, token: int) -> bool:
        """Advance by a token; return False if it was not allowed; raise InputError where that takes too much."""


class Constraint(Protocol):
    """What the output of a request may be, such as a `Grammar`; it has no state, so that requests can share it."""

    def start(self, vocab_size: int, end_ids: Collection[int]) -> ConstraintState:
        """Return the state before the first token; `end_ids` end the output, where that may end."""
