"""Shared by all built-in datasets: the split names, the assignment to splits, and stateless random numbers."""

from __future__ import annotations

import hashlib
import random

SPLITS = ("train", "validation", "test")


def split_of(key: str) -> str:
    """Return the split of a key: one in twenty is in validation, one in twenty in test.

    It depends on the key alone, so that nothing is in two splits and new keys do not move old ones.

    >>> split_of("territory:FR"), split_of("1999-12-31")
    ('train', 'train')
    """
    number = int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big") % 20
    return {0: "validation", 1: "test"}.get(number, "train")


def item_rng(name: str, split: str, index: int) -> random.Random:
    """Return the random generator of one item; a string seed gives the same in every process.

    >>> item_rng("dates", "train", 7).random() == item_rng("dates", "train", 7).random()
    True
    """
    return random.Random(f"{name}/{split}/{index}")
