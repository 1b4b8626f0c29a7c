"""The results of a beam search: its hypotheses, and the tree of all candidates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Outcome = Literal["kept", "ended", "pruned"]


@dataclass(frozen=True)
class Hypothesis:
    """A result of beam search."""

    ids: list[int]  # the new tokens, without the end token
    logprobs: list[float]  # the model's own, one for each id
    score: float
    finish_reason: Literal["stop", "length"]
    node: int | None = None  # index of its last token in the tree, the end token included


@dataclass(frozen=True, slots=True)
class Node:
    """One candidate continuation of a search."""

    parent: int | None  # index of the node it continues; None for the prompt
    token: int
    logprob: float  # the model's own
    total: float  # summed since the prompt, with biases and penalties
    score: float
    step: int  # 1 for the first new token
    outcome: Outcome
