"""Statements, the parts of the lectures they belong to, and questions to test oneself."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

from glasshouse import config
from glasshouse.config import Settings, did_you_mean
from glasshouse.errors import InputError

# From text to text, as the lectures go; each is the name of a TOML file beside this one.
ORDER = ("text", "vectors", "attention", "block", "models", "training", "inspection")


@dataclass(frozen=True)
class Threshold(Settings):
    """What a figure must reach for its statement to hold."""

    figure: str  # as the experiment names it
    at_least: float | None = None
    at_most: float | None = None
    holds: bool = True  # False: the statement is not true at this size, and says so


@dataclass(frozen=True)
class Statement(Settings):
    """A statement of the notes, and what shows it true."""

    number: str  # its letter and number, such as A3
    title: str  # a few words
    why: str  # one sentence for a student: what it matters for
    says: str  # the statement
    shown_by: str  # tests by name, or a part of benchmarks/claims.py
    measured: str  # what they measured; empty if they are exact
    try_it: str  # what to do with the live figure
    code: str  # module:name of what does it in this package
    line: str = ""  # the line of that which does it
    read: tuple[str, ...] = ()  # sections of the paper and of the textbook that it belongs to, where there are any
    slip: str = ""  # what is often said or written of it and is wrong or loose, and why
    curves: str = ""  # what the curves that `make claims` measured are of
    thresholds: tuple[Threshold, ...] = ()  # of the figures of `make claims`, where it needs training


@dataclass(frozen=True)
class Question(Settings):
    """A question to test oneself, which a card answers."""

    ask: str
    answer: str
    card: str  # number of the statement that shows it


@dataclass(frozen=True)
class Part(Settings):
    """A part of the lectures."""

    name: str  # of its file
    title: str  # on the page
    heading: str  # in docs/claims.md
    measured_on: str  # date of the measured figures
    about: str  # before the table in docs/claims.md
    details: str  # after it
    statements: tuple[Statement, ...] = ()
    questions: tuple[Question, ...] = ()


@dataclass(frozen=True)
class Example:
    """An example of the lectures, which a card works through: a text, or ids."""

    text: str
    card: str
    title: str = ""  # where the text is too long for a button
    ids: tuple[int, ...] = ()


EXAMPLES = (
    Example("thanks for all the fish", "M4"),
    Example("Thinking Machines", "A6"),
    Example(
        "Sarah was walking in the park with her cat, Alex. She was wearing a beautiful gold watch.",
        "V4",
        "Sarah, her cat, and She",
    ),
    Example("", "E2", "ids 5, 4000, 10532, 2224", (5, 4000, 10532, 2224)),
)


@cache
def parts() -> tuple[Part, ...]:
    """Return the parts of the lectures in their order.

    >>> [part.name for part in parts()][:3]
    ['text', 'vectors', 'attention']
    """
    return tuple(config.parse(Part, config.read(Path(__file__).parent / f"{name}.toml")) for name in ORDER)


def statement(number: str) -> Statement:
    """Return a statement by its number.

    >>> statement("A3").title
    "Divided by the root of the head's width"
    """
    found = {one.number: one for part in parts() for one in part.statements}
    if number not in found:
        raise InputError(f"there is no statement {number!r}; {did_you_mean(number, found)}")
    return found[number]
