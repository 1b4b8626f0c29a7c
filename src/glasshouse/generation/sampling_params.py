"""Sampling and beam-search parameters of a request, validated on construction."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from numbers import Integral, Real
from typing import Any, Literal, get_args

from glasshouse import hints
from glasshouse.config import did_you_mean
from glasshouse.errors import InputError
from glasshouse.generation.constraints.constraint import Constraint
from glasshouse.generation.rules import Rule

SteerAt = Literal["all", "prompt", "new"]

MAX_FLOAT32 = (2 - 2.0**-23) * 2.0**127  # written out: parameters need no torch


@dataclass(frozen=True)
class Bounds:
    """The range of a number.

    >>> Bounds(1, whole=True).rule, Bounds(0, 1, above=True).rule, Bounds(0).rule, Bounds().rule
    ('a whole number of at least 1', 'above 0 and at most 1', '0 or above', 'a number')
    """

    low: float = -math.inf
    high: float = math.inf
    above: bool = False  # low itself is excluded
    whole: bool = False

    @property
    def rule(self) -> str:
        """What a number must be."""
        if self.whole:
            return "a whole number of 64 bits" if self.low < 0 else f"a whole number of at least {self.low:g}"
        if self.low == -math.inf:
            return "a number"
        low = f"above {self.low:g}" if self.above else f"{self.low:g} or above"
        return low if self.high == math.inf else f"{low} and at most {self.high:g}"

    def hold(self, value: object) -> bool:
        """Whether a value is a finite number within the bounds."""
        if not isinstance(value, Integral if self.whole else Real) or isinstance(value, bool):
            return False
        given: Any = value
        return math.isfinite(given) and self.low <= given <= self.high and not (self.above and given == self.low)


COUNT, POSITIVE, NUMBER = Bounds(0, whole=True), Bounds(1, whole=True), Bounds()
PROBABILITY = Bounds(0, 1, above=True)
MOST_TOP = 20  # tokens or positions of one list


def number(default: Any, bounds: Bounds, help: str) -> Any:  # noqa: ANN401, A002 - as dataclasses.field
    """Return a field with bounds and a help text, which the server and the command line show too.

    Where the default is None, None is allowed and switches the setting off.
    """
    return field(default=default, metadata={"bounds": bounds, "help": help})


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    r"""How tokens are sampled, and when to stop.

    >>> SamplingParams(temperature=0.8, top_p=0.9, stop="\n").stop
    ('\n',)
    >>> SamplingParams(top_k=0.5)
    Traceback (most recent call last):
    ...
    glasshouse.errors.InputError: top_k is 0.5, but it must be a whole number of at least 1, or None.
    """

    max_new_tokens: int = number(64, COUNT, "Maximum number of tokens to generate.")
    min_new_tokens: int = number(0, COUNT, "Minimum number of tokens to generate: end tokens are not sampled before.")
    temperature: float = number(0.0, Bounds(0), "Sampling temperature; 0 is greedy decoding.")
    top_k: int | None = number(None, POSITIVE, "Sample from the k most probable tokens.")
    top_p: float | None = number(
        None,
        PROBABILITY,
        "Sample from the most probable tokens whose probabilities add up to p (nucleus sampling).",
    )
    min_p: float | None = number(
        None, PROBABILITY, "Sample from tokens with at least p times the highest probability."
    )
    # Positive logits are divided by it, others multiplied.
    repetition_penalty: float = number(
        1.0, Bounds(0, above=True), "Above 1, tokens of the prompt and the completion become less likely."
    )
    frequency_penalty: float = number(0.0, NUMBER, "Subtracted from a token's logit for each time it was generated.")
    presence_penalty: float = number(0.0, NUMBER, "Subtracted once from the logits of tokens that were generated.")
    logit_bias: Mapping[int, float] = field(default_factory=dict)  # added to the logits of these ids
    stop: tuple[str, ...] = ()  # stop strings; not part of the result
    stop_token_ids: tuple[int, ...] = ()  # in addition to the model's end tokens
    seed: int = number(0, Bounds(-(2**63), 2**63 - 1, whole=True), "Random seed.")
    top_logprobs: int = number(0, COUNT, "For each new token, also report this many of the most probable ones.")
    candidates: int = number(
        0, COUNT, "For each new token, also report this many of the candidates it was drawn from."
    )
    steer: Mapping[str, float] = field(default_factory=dict)  # scales of the engine's steering vectors, by name
    steer_at: SteerAt = "all"  # which tokens are steered: all, those of the prompt, or the new ones
    record: tuple[str, ...] = ()  # sites whose activations are kept, as for gh.record: resid_post.2[position=new]
    probes: tuple[str, ...] = ()  # names of the engine's linear probes, which score each new token
    rules: tuple[Rule, ...] = ()  # what the scores of probes do
    lens: int = 0  # for each new token, also report so many of the most probable ones after each layer
    attended: Mapping[str, int] = field(default_factory=dict)  # and so many of the most attended positions, by site
    edits: Mapping[str, Any] = field(default_factory=dict)  # of activations by site, as for gh.edit
    constraint: Constraint | None = None  # what the output may be, such as a Grammar: other tokens are not sampled

    beams: int = number(1, POSITIVE, "Beam width of beam search, which samples nothing; 1 is no search.")
    length_penalty: float = number(1.0, NUMBER, "Beam search scores are log-probability / length ** length_penalty.")
    early_stopping: bool = False  # end beam search once there are `beams` finished hypotheses

    def __post_init__(self) -> None:
        for name, bounds in BOUNDS.items():
            value, optional = getattr(self, name), DEFAULTS[name] is None
            fits = bounds.hold(value) or (optional and value is None)
            self._require(name, fits, bounds.rule + ", or None" * optional)
        legal = isinstance(self.logit_bias, Mapping) and all(
            COUNT.hold(token) and isinstance(bias, Real) and not math.isnan(bias) and bias < math.inf
            for token, bias in self.logit_bias.items()
        )
        self._require("logit_bias", legal, "a dict of numbers by id, where -inf forbids a token")
        scales = self.steer.values() if isinstance(self.steer, Mapping) else [None]
        self._require("steer", all(map(NUMBER.hold, scales)), "a dict of numbers by the name of a steering vector")
        self._require("steer_at", self.steer_at in get_args(SteerAt), f"one of {', '.join(get_args(SteerAt))}")
        self._set("stop", (self.stop,) if isinstance(self.stop, str) else self.stop)
        self._require(
            "stop", _all(self.stop, lambda text: isinstance(text, str) and text != ""), "strings, none empty"
        )
        self._require("stop_token_ids", _all(self.stop_token_ids, COUNT.hold), "ids")
        for name in ("record", "probes"):
            self._set(name, (given,) if isinstance(given := getattr(self, name), str) else given)
            self._require(name, _all(getattr(self, name), lambda one: isinstance(one, str)), "names")
        self._set("rules", (self.rules,) if isinstance(self.rules, Rule) else self.rules)
        self._require("edits", isinstance(self.edits, Mapping), "a dict of edits by site")
        counts = self.attended.values() if isinstance(self.attended, Mapping) else [None]
        few = Bounds(1, MOST_TOP, whole=True)
        self._require("lens", COUNT.hold(self.lens) and self.lens <= MOST_TOP, f"a whole number up to {MOST_TOP}")
        self._require("attended", all(map(few.hold, counts)), f"a dict of numbers of 1 to {MOST_TOP} by site")
        self._require("rules", _all(self.rules, lambda one: isinstance(one, Rule)), "of gh.generation.Rule")
        for name in ("stop", "stop_token_ids", "record", "probes", "rules"):
            self._set(name, tuple(getattr(self, name)))
        if self.steer_at == "prompt" and any(one.then == "steer" for one in self.rules):
            raise InputError("steer_at is 'prompt', but a rule steers new tokens; leave one of them out.")
        if self.beams > 1 and self.temperature > 0:
            raise InputError(
                f"beams is {self.beams} and temperature {self.temperature}; beam search does not sample, so "
                "leave one of them out."
            )
        if self.beams > 1 and self.constraint is not None:
            raise InputError(f"beams is {self.beams}, but beam search takes no constraint; leave one of them out.")
        for name in ("top_logprobs", "candidates", "record", "probes", "rules", "lens", "attended"):
            if self.beams > 1 and getattr(self, name):
                raise InputError(f"beams is {self.beams}, but {name} are not kept in a beam search; leave one out.")

    @classmethod
    def parse(cls, settings: Mapping[str, Any]) -> SamplingParams:
        """Make parameters from a dict; an unknown name is an error that suggests the nearest one."""
        known = {one.name for one in fields(cls)}
        for name in settings:
            if name not in known and name in hints.GENERATION:
                raise InputError(hints.renamed(name, hints.GENERATION[name]))
            if name not in known:
                raise InputError(f"there is no setting {name!r}; {did_you_mean(name, known)}")
        return cls(**settings)

    @property
    def changes_logits(self) -> bool:
        """Whether penalties or biases change the model's logits."""
        penalties = self.repetition_penalty != 1 or self.frequency_penalty or self.presence_penalty
        return bool(penalties or self.logit_bias)

    @property
    def scored(self) -> tuple[str, ...]:
        """The probes that score each new token: those asked for, and those of rules."""
        return tuple(dict.fromkeys((*self.probes, *(rule.probe for rule in self.rules))))

    @property
    def vectors(self) -> tuple[str, ...]:
        """The steering vectors that are added, or would be by a rule."""
        return tuple(dict.fromkeys((*self.steer, *(name for rule in self.rules for name in rule.steer))))

    @property
    def forbidden_ids(self) -> frozenset[int]:
        """The tokens whose bias is -inf in float32: they are sampled only if no other is allowed."""
        return frozenset(token for token, bias in self.logit_bias.items() if bias < -MAX_FLOAT32)

    def with_suppressed(self, ids: Iterable[int]) -> SamplingParams:
        """Return parameters that suppress these tokens, except those whose bias the caller has set.

        >>> SamplingParams(logit_bias={5: 0.5}).with_suppressed((3, 5)).logit_bias
        {3: -inf, 5: 0.5}
        """
        suppressed = dict.fromkeys(ids, -math.inf)
        return replace(self, logit_bias=suppressed | dict(self.logit_bias)) if suppressed else self

    def with_seeds(self, count: int) -> list[SamplingParams]:
        """Return `count` copies with consecutive seeds."""
        return [replace(self, seed=self.seed + number) for number in range(count)]

    def _require(self, name: str, ok: bool, rule: str) -> None:
        if not ok:
            raise InputError(f"{name} is {getattr(self, name)!r}, but it must be {rule}.")

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)


NUMBERS = {one.name: one for one in fields(SamplingParams) if "bounds" in one.metadata}
BOUNDS: dict[str, Bounds] = {name: one.metadata["bounds"] for name, one in NUMBERS.items()}
HELP: dict[str, str] = {name: one.metadata["help"] for name, one in NUMBERS.items()}
DEFAULTS: dict[str, Any] = {name: one.default for name, one in NUMBERS.items()}


def _all(values: object, ok: Callable[[object], bool]) -> bool:
    return isinstance(values, list | tuple | set | frozenset) and all(ok(value) for value in values)
