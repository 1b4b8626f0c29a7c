"""The experiments by name, with the statements that they are about and the run in which these must not hold."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import glasshouse as gh
from trained_claims import (
    attention_patterns,
    copying,
    experiment,
    key_value_heads,
    norm_placement,
    positions,
    pretraining,
    recall,
    tokens,
)
from trained_claims.experiment import Result

# What experiments run on; the page, the server and the notes change no figure.
PACKAGES = ("data", "inspection", "layers", "models", "objectives", "spec", "text", "training")


@dataclass(frozen=True)
class Part:
    """An experiment."""

    run: Callable[..., Result]
    statements: tuple[str, ...]
    # Arguments of a small run without what the statements are about: mostly without training, else without the
    # mechanism. An experiment that passes with them shows nothing.
    null: Mapping[str, Any]

    @property
    def key(self) -> str:
        """A hash of the code that its figures come from."""
        files = [Path(inspect.getfile(one)) for one in (inspect.getmodule(self.run), experiment) if one is not None]
        package = Path(inspect.getfile(gh)).parent
        files += sorted(path for name in PACKAGES for path in (package / name).rglob("*.py"))
        texts = [path.read_bytes() for path in files]
        return hashlib.sha256(b"\0".join([torch.__version__.encode(), *texts])).hexdigest()


# The longest first, so that none is left alone at the end.
PARTS: dict[str, Part] = {
    "l1": Part(
        pretraining.fine_tuning,
        ("L1",),
        {"pretrainings": 1, "seeds": 2, "steps": 0, "unlabelled": 300, "fine_tune_steps": 20, "tests": 200},
    ),
    "a13": Part(key_value_heads.compare_heads, ("A13", "A16"), {"seeds": 2, "steps": 0, "cached": 64}),
    "t6": Part(tokens.bits_per_byte, ("T6",), {"seeds": 1, "steps": 0, "vocabularies": (512,)}),
    "m8": Part(recall.recurrent_recall, ("M8",), {"seeds": 1, "steps": 0, "sizes": 1}),
    "m10": Part(copying.by_length, ("M10",), {"seeds": 1, "steps": 0, "longest": 4}),
    "m7": Part(recall.attention_recall, ("M7",), {"seeds": 1, "steps": 0, "context": 16}),
    "b6": Part(norm_placement.stability, ("B6",), {"seeds": 1, "steps": 0, "rates": (3e-3,), "warm_ups": (False,)}),
    "a11": Part(attention_patterns.patterns, ("A11",), {"seeds": 1, "steps": 0, "library_steps": 1}),
    "p4": Part(positions.longer_texts, ("P4",), {"seeds": 1, "steps": 0}),
    "p9": Part(positions.naive_positions, ("P9",), {"seeds": 1, "steps": 0}),
    "b8": Part(norm_placement.trained_range, ("B8",), {"seeds": 1, "steps": 0, "norms": False}),
    "p6": Part(positions.position_norms, ("P6",), {"seeds": 1, "steps": 0, "embed_scale": False}),
}
