"""The glossary: terms of the field, each in one to three sentences, for the documentation and the page."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from glasshouse import config
from glasshouse.config import Settings


@dataclass(frozen=True)
class Entry(Settings):
    """A term and what it means."""

    term: str
    text: str  # one to three sentences; names of the program in backquotes
    also: tuple[str, ...] = ()  # other names of it, and terms that it explains besides

    @property
    def anchor(self) -> str:
        """The anchor of the term in docs/glossary.md.

        >>> Entry("KV cache", "").anchor
        'kv-cache'
        """
        return re.sub(r"\W+", "-", self.term.lower())


@dataclass(frozen=True)
class _File(Settings):
    entries: tuple[Entry, ...]


@cache
def glossary() -> tuple[Entry, ...]:
    """Return the entries in alphabetical order.

    >>> next(entry.text for entry in glossary() if entry.term == "Logits")
    'The scores that a model gives to all tokens or labels; a softmax turns them into probabilities.'
    """
    return config.parse(_File, config.read(Path(__file__).with_name("glossary.toml"))).entries
