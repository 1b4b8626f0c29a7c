"""Sampling and beam-search parameters of a request, validated on construction."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from numbers import Integral, Real
from typing import Any

from glasshouse import hints
from glasshouse.config import did_you_mean
from glasshouse.errors import InputError
from glasshouse.generation.constraints.constraint import Constraint

MAX_FLOAT32 = (2 - 2.0**-23) * 2.0**127  # written out: parameters need no torch


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

    max_new_tokens: int = 64
    min_new_tokens: int = 0  # end tokens are not sampled before
    temperature: float = 0.0  # 0: greedy
    top_k: int | None = None  # sample from the k most probable tokens
    top_p: float | None = None  # nucleus sampling: the smallest set of tokens with total probability p
    min_p: float | None = None  # tokens at least this fraction as probable as the best
    repetition_penalty: float = 1.0  # for tokens in prompt or output: positive logits are divided, others multiplied
    frequency_penalty: float = 0.0  # subtracted from a logit for each time the token was generated
    presence_penalty: float = 0.0  # subtracted once from the logits of tokens that were generated
    logit_bias: Mapping[int, float] = field(default_factory=dict)  # added to the logits of these ids
    stop: tuple[str, ...] = ()  # stop strings; not part of the result
    stop_token_ids: tuple[int, ...] = ()  # in addition to the model's end tokens
    seed: int = 0
    top_logprobs: int = 0  # for each new token, also report this many of the most probable ones
    candidates: int = 0  # for each new token, also report this many of the candidates it was drawn from
    steer: Mapping[str, float] = field(default_factory=dict)  # scales of the engine's steering vectors, by name
    constraint: Constraint | None = None  # what the output may be, such as a Grammar: other tokens are not sampled

    beams: int = 1  # above 1: beam search, which samples nothing
    length_penalty: float = 1.0  # the score is the log-probability over the length to this power
    early_stopping: bool = False  # end beam search once there are `beams` finished hypotheses

    def __post_init__(self) -> None:
        whole = "a whole number of at least"
        self._require("max_new_tokens", _is_whole(self.max_new_tokens, 0), f"{whole} 0")
        self._require("min_new_tokens", _is_whole(self.min_new_tokens, 0), f"{whole} 0")
        self._require("temperature", _is_real(self.temperature) and self.temperature >= 0, "0 or above")
        self._require("top_k", self.top_k is None or _is_whole(self.top_k, 1), f"{whole} 1, or None")
        for name in ("top_p", "min_p"):
            value = getattr(self, name)
            self._require(
                name, value is None or (_is_real(value) and 0 < value <= 1), "above 0 and at most 1, or None"
            )
        self._require(
            "repetition_penalty", _is_real(self.repetition_penalty) and self.repetition_penalty > 0, "above 0"
        )
        for name in ("frequency_penalty", "presence_penalty"):
            self._require(name, _is_real(getattr(self, name)), "a number")
        legal = isinstance(self.logit_bias, Mapping) and all(
            _is_whole(token, 0) and isinstance(bias, Real) and not math.isnan(bias) and bias < math.inf
            for token, bias in self.logit_bias.items()
        )
        self._require("logit_bias", legal, "a dict of numbers by id, where -inf forbids a token")
        scales = self.steer.values() if isinstance(self.steer, Mapping) else [None]
        self._require("steer", all(map(_is_real, scales)), "a dict of numbers by the name of a steering vector")
        self._set("stop", (self.stop,) if isinstance(self.stop, str) else self.stop)
        self._require(
            "stop", _all(self.stop, lambda text: isinstance(text, str) and text != ""), "strings, none empty"
        )
        self._require("stop_token_ids", _all(self.stop_token_ids, lambda token: _is_whole(token, 0)), "ids")
        for name in ("stop", "stop_token_ids"):
            self._set(name, tuple(getattr(self, name)))
        self._require("seed", _is_whole(self.seed, -(2**63)) and self.seed < 2**63, "a whole number of 64 bits")
        self._require("top_logprobs", _is_whole(self.top_logprobs, 0), f"{whole} 0")
        self._require("candidates", _is_whole(self.candidates, 0), f"{whole} 0")
        self._require("beams", _is_whole(self.beams, 1), f"{whole} 1")
        self._require("length_penalty", _is_real(self.length_penalty), "a number")
        if self.beams > 1 and self.temperature > 0:
            raise InputError(
                f"beams is {self.beams} and temperature {self.temperature}; beam search does not sample, so "
                "leave one of them out."
            )
        if self.beams > 1 and self.constraint is not None:
            raise InputError(f"beams is {self.beams}, but beam search takes no constraint; leave one of them out.")
        for name in ("top_logprobs", "candidates"):
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


def _is_whole(value: object, least: int) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= least


def _is_real(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


def _all(values: object, ok: Callable[[object], bool]) -> bool:
    return isinstance(values, list | tuple | set | frozenset) and all(ok(value) for value in values)
