r"""Protection against regular expression denial of service (ReDoS) in a tokenizer.json.

The tokenizers library runs a file's expressions in Oniguruma, which backtracks: `(a+)+$` takes exponential time on
forty letters. So an expression is parsed first, and its steps on a text of a hundred characters are bounded from
above. An unbounded quantifier may apply only to what matches in one way and counts as a hundred; two of them that
fail together reach the limit. A search, which starts at every character, is then quadratic at worst.

What cannot be bounded (back references, calls, conditions), and what Oniguruma might parse differently than this file
does (comments, `(?x)`, a lone `]`), is refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple, NoReturn

from glasshouse.errors import StoreError

MAX_LENGTH = 10_000
MAX_DEPTH = 20
UNBOUNDED = 100
MAX_COST = UNBOUNDED**2

_ESCAPE = r"\\(?:[pP]\{\^?[\w -]+\}|x\{[\da-fA-F]{1,8}\}|x[\da-fA-F]{2}|u[\da-fA-F]{4}|[dDwWsShHnrtfvae]|[^a-zA-Z\d])"
_CLASS = r"(?P<class>\[\^?+(?![]:]))"
_OUTSIDE = re.compile(
    r"(?P<group>\((?:\?(?:[:=!>]|<[=!]|<[a-zA-Z_]\w*>|[im-]+[:)])|(?![?*])))|(?P<end>\))|(?P<or>\|)"
    r"|(?P<anchor>\\[bBAzZG]|[\^$])|(?P<repeat>[*+?][?+]?|\{(?:\d{1,6}(?:,\d{0,6})?|,\d{1,6})\}\??)"
    rf"|{_CLASS}|(?P<character>{_ESCAPE}|[^][()*+?\\])",
    re.ASCII,
)
_INSIDE = re.compile(
    rf"(?P<posix>\[:\^?[a-z]+:\])|{_CLASS}|(?P<close>\])|(?P<member>{_ESCAPE}|\\b|[^][\\])", re.ASCII
)

_IGNORE_CASE = re.compile(r"\(\?m*i")


class _Cost(NamedTuple):
    ways: int = 1  # in how many ways it can match at one position; backtracking may try them all
    first: int = 1  # steps to its first match, or to failure
    certain: bool = False  # it cannot fail, so nothing before it is retried
    character: bool = False  # it matches exactly one character
    empty: bool = False  # it can match the empty string


def check_regex(expression: str) -> None:
    r"""Raise StoreError for an expression whose search could take more than quadratic time, or is not supported.

    >>> check_regex(r" ?\p{L}+|\s+(?!\S)")
    >>> check_regex("(a+)+$")
    Traceback (most recent call last):
    ...
    glasshouse.errors.StoreError: the pattern '(a+)+$' repeats without end what matches in several ways; find another.
    """
    _read(expression)


def may_be_empty(expression: str) -> bool:
    r"""Return whether an expression that passes `check_regex` can match the empty string.

    >>> may_be_empty(r"\s+"), may_be_empty(r"\s*"), may_be_empty("(?=a)")
    (False, True, True)
    """
    return _read(expression).empty


def _read(expression: str) -> _Cost:
    if len(expression) > MAX_LENGTH:
        _refuse(expression, f"is longer than {MAX_LENGTH} characters")
    reader = _Reader(expression)
    cost = reader.alternatives()
    if reader.kind:
        _refuse(expression, "closes a bracket that is not open")
    if cost.first >= MAX_COST:
        _refuse(expression, "repeats in too many ways at once")
    return cost


def _refuse(expression: str, reason: str) -> NoReturn:
    shown = expression if len(expression) <= 60 else expression[:57] + "..."
    raise StoreError(f"the pattern {shown!r} {reason}; find another.")


def _parts(expression: str) -> Iterator[tuple[str, str]]:
    """Yield the kind and the text of each token; a character class, with all nested in it, is one."""
    at = depth = 0
    while at < len(expression):
        match = (_INSIDE if depth else _OUTSIDE).match(expression, at)
        if not match:
            _refuse(expression, f"is not supported at character {at + 1} ({expression[at]!r})")
        kind, at = match.lastgroup, match.end()
        depth += (kind == "class") - (kind == "close")
        if kind == "close" and not depth:
            yield "character", "[]"
        elif kind and not depth:
            yield kind, match.group()
        if depth > MAX_DEPTH:
            _refuse(expression, f"has brackets more than {MAX_DEPTH} deep")
    if depth:
        _refuse(expression, "opens a bracket that is not closed")
    yield "", ""


class _Reader:
    """Computes the cost of an expression; `kind` and `text` are the current token."""

    def __init__(self, expression: str) -> None:
        self.expression, self.depth, self.ignore_case, self.parts = expression, 0, False, _parts(expression)
        self.kind, self.text = next(self.parts)

    def step(self) -> str:
        text = self.text
        self.kind, self.text = next(self.parts)
        return text

    def alternatives(self) -> _Cost:
        costs = [self.sequence()]
        while self.kind == "or":
            self.step()
            costs.append(self.sequence())
        certain, empty = any(c.certain for c in costs), any(c.empty for c in costs)
        return _Cost(sum(c.ways for c in costs), sum(c.first for c in costs), certain, empty=empty)

    def sequence(self) -> _Cost:
        ways, first, certain, empty = 1, 1, True, True
        while self.kind not in ("", "or", "end"):
            part = self.part()
            first = min(MAX_COST, part.first * (first if part.certain else ways))
            ways = min(MAX_COST, part.ways * ways)
            certain = certain and part.certain
            empty = empty and part.empty
        return _Cost(ways, first, certain, empty=empty)

    def part(self) -> _Cost:
        kind, text = self.kind, self.step()
        if kind == "repeat":
            _refuse(self.expression, f"has nothing before {text!r} to repeat")
        if kind == "group":
            cost = self.group(text)
        elif self.ignore_case and kind == "character" and text[0] in "[\\":
            cost = _Cost(ways=2)  # such a class also matches the letters of a ligature in it: (?i:[ﬀ]) matches ff
        else:
            cost = _Cost(character=kind == "character", empty=kind == "anchor")
        while self.kind == "repeat":
            cost = self.repeat(cost, self.step())
        return cost

    def group(self, opening: str) -> _Cost:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            _refuse(self.expression, f"has brackets more than {MAX_DEPTH} deep")
        outside, self.ignore_case = self.ignore_case, self.ignore_case or bool(_IGNORE_CASE.match(opening))
        cost = self.alternatives()
        self.ignore_case = outside
        self.depth -= 1
        if opening.endswith(")"):  # (?i) applies to the end of its group, alternatives included
            return cost
        if self.kind != "end":
            _refuse(self.expression, "opens a bracket that is not closed")
        self.step()
        if opening in ("(?=", "(?!"):
            return _Cost(cost.ways, cost.ways, empty=True)
        if opening in ("(?<=", "(?<!"):  # tried from every position where it could start
            return _Cost(cost.ways**2, cost.ways**2, empty=True)
        return cost

    def repeat(self, cost: _Cost, text: str) -> _Cost:
        low, high = _bounds(text)
        # To Oniguruma a{2}? is (?:a{2})?, one way more, and a{1,3}+ is (?:a{1,3})+, handled by the next call.
        more = int(text.endswith("}?"))
        empty = cost.empty or low == 0 or more == 1
        if high is None:
            if cost.ways > 1:
                _refuse(self.expression, "repeats without end what matches in several ways")
            return _Cost(UNBOUNDED + low, 1 if cost.character else 1 + low, low == 0, empty=empty)
        if cost.character:
            return _Cost(min(UNBOUNDED, high - low + 1 + more), 1, low == 0, empty=empty)
        ways, power = more + int(low == 0), 1
        for _ in range(high):
            power *= cost.ways
            ways += power
            if ways >= MAX_COST:
                _refuse(self.expression, "repeats in too many ways at once")
        return _Cost(ways, cost.first if high == 1 else ways, low == 0, empty=empty)


def _bounds(text: str) -> tuple[int, int | None]:
    if text[0] != "{":
        return int(text[0] == "+"), 1 if text[0] == "?" else None
    low, comma, high = text.rstrip("?")[1:-1].partition(",")
    if comma and not high:
        return int(low), None
    bounds = sorted((int(low or 0), int(high or low)))  # Oniguruma takes {3,1} for {1,3}
    return bounds[0], bounds[1]
