"""What all built-in sets share: the names of the splits, what belongs to which, and chance without state."""

from __future__ import annotations

import hashlib
import random

SPLITS = ("train", "validation", "test")


def split_of(key: str) -> str:
    """Say which split a thing belongs to: one in twenty to validation, one in twenty to test.

    It depends on the thing's own name alone, so that nothing can be in two splits and new things move no old ones.

    >>> split_of("territory:FR"), split_of("1999-12-31")
    ('train', 'train')
    """
    number = int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big") % 20
    return {0: "validation", 1: "test"}.get(number, "train")


def item_rng(name: str, split: str, index: int) -> random.Random:
    """Return the dice that make one item; a string seeds them alike in every process.

    >>> chance("dates", "train", 7).random() == chance("dates", "train", 7).random()
    True
    """
    return random.Random(f"{name}/{split}/{index}")
