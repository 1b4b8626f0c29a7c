"""Rules on the scores of linear probes: end, withhold or steer an answer where one is above a threshold."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Real
from typing import Literal, NamedTuple, get_args

from glasshouse.errors import InputError

RuleAction = Literal["stop", "refuse", "steer"]

_TEXT = re.compile(
    r"(?P<probe>.+?)\s*>\s*(?P<above>[^\s:x]+)(\s*x\s*(?P<times>\d+))?\s*:\s*(?P<then>\w+)\s*(?P<steer>.*)"
)


@dataclass(frozen=True)
class Rule:
    """What happens where the scores of a probe are above a threshold, for `consecutive` tokens in a row.

    "stop" ends the answer after that token, "refuse" withholds all of it, and "steer" adds the engine's steering
    vectors at the scales of `steer`, to the tokens that follow while the scores stay above.

    >>> Rule("anger", above=2.5, then="steer", steer={"calm": 1.0}).consecutive
    1
    >>> Rule("anger", above=2.5, then="halt")
    Traceback (most recent call last):
    ...
    glasshouse.errors.InputError: then is 'halt', but a rule can stop, refuse, steer.
    """

    probe: str
    above: float
    then: RuleAction
    consecutive: int = 1
    steer: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.then not in get_args(RuleAction):
            raise InputError(f"then is {self.then!r}, but a rule can {', '.join(get_args(RuleAction))}.")
        if not isinstance(self.above, Real) or not math.isfinite(self.above):
            raise InputError(f"above is {self.above!r}, but the threshold of a rule must be a number.")
        if not isinstance(self.consecutive, int) or self.consecutive < 1:
            raise InputError(f"consecutive is {self.consecutive!r}, but it must be a whole number of at least 1.")
        if bool(self.steer) != (self.then == "steer"):
            raise InputError(
                f"then is {self.then!r} and steer {dict(self.steer)!r}, but rules that steer, and no others, have "
                "scales by the name of a steering vector."
            )

    @classmethod
    def parse(cls, text: str) -> Rule:
        """Read a rule of the command line.

        >>> Rule.parse("anger > 2.5 x 3: stop")
        Rule(probe='anger', above=2.5, then='stop', consecutive=3, steer={})
        >>> Rule.parse("anger>0:steer calm=1.5 glad=-1").steer
        {'calm': 1.5, 'glad': -1.0}
        """
        try:
            found = _TEXT.fullmatch(text.strip())
            if found is None:
                raise ValueError
            pairs = (one.rpartition("=") for one in found["steer"].split())
            scales = {name: float(scale) for name, _, scale in pairs}
            above, times = float(found["above"]), int(found["times"] or 1)
        except ValueError:
            raise InputError(
                f"the rule is {text!r}, but it must be like 'PROBE > 2.5: stop', 'PROBE > 2.5 x 3: refuse' (three "
                "tokens in a row), or 'PROBE > 2.5: steer VECTOR=1.0'."
            ) from None
        return cls(found["probe"], above, found["then"], times, scales)  # type: ignore[arg-type]  # checked there


class Firing(NamedTuple):
    """Where a rule began to apply."""

    rule: Rule
    token: int  # its index among the new tokens
    score: float


class RuleState:
    """A rule in one answer: how many scores in a row were above its threshold.

    >>> state = RuleState(Rule("anger", above=0.0, then="stop", consecutive=2))
    >>> [state.add(score) for score in (1.0, -1.0, 1.0, 1.0, 1.0)], state.applies
    ([False, False, False, True, False], True)
    """

    def __init__(self, rule: Rule) -> None:
        self.rule = rule
        self._in_a_row = 0

    @property
    def applies(self) -> bool:
        """Whether the last scores were above."""
        return self._in_a_row >= self.rule.consecutive

    def add(self, score: float) -> bool:
        """Take the score of the next token; return whether the rule begins to apply there."""
        self._in_a_row = self._in_a_row + 1 if score > self.rule.above else 0
        return self._in_a_row == self.rule.consecutive
