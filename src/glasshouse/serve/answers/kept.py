"""A bounded store of the last answers, for /v1/answers and the page; each is visible only to its API key."""

from __future__ import annotations

import time
from array import array
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from glasshouse.generation import SamplingParams
from glasshouse.generation.request import Request
from glasshouse.generation.rules import Firing
from glasshouse.generation.sampling.candidates import Draws

CANDIDATES = 12  # kept of each token
OVERHEAD = 2048  # bytes of a choice beside its tokens, roughly
BIAS = 100  # bytes of an entry of logit_bias


@dataclass(frozen=True)
class KeptChoice:
    """One sequence of an answer, as it was generated."""

    source: array[int]  # the input of an encoder
    prompt: array[int]
    ids: array[int]
    draws: Draws  # of each id, and of the token that ended it
    options: SamplingParams
    finish_reason: str | None
    scores: Mapping[str, array[float]] = field(default_factory=dict)  # of the ids by probes that the client asked for
    firings: tuple[Firing, ...] = ()

    @classmethod
    def of(cls, request: Request) -> KeptChoice:
        """Return what is kept of a finished request."""
        source, prompt, ids = (array("i", row) for row in (request.source, request.prompt, request.ids))
        options = replace(request.options, constraint=None)  # a compiled grammar has a megabyte, and is not shown
        scores = {name: array("f", request.scores[name]) for name in request.options.probes}
        draws, firings = request.draws or Draws(0), tuple(request.firings)
        return cls(source, prompt, ids, draws, options, request.finish_reason, scores, firings)

    @property
    def n_bytes(self) -> int:
        """Roughly the bytes it takes."""
        ids = sum(4 * len(row) for row in (self.source, self.prompt, self.ids))
        settings = BIAS * len(self.options.logit_bias) + sum(4 * len(stop) for stop in self.options.stop)
        scores = sum(4 * len(row) for row in self.scores.values())
        return OVERHEAD + ids + settings + scores + self.draws.n_bytes


@dataclass(frozen=True)
class KeptAnswer:
    """An answer, by the id that its client got."""

    id: str
    model: str
    created: int
    choices: tuple[KeptChoice, ...]

    @property
    def n_bytes(self) -> int:
        """Roughly the bytes it takes."""
        return sum(choice.n_bytes for choice in self.choices)


class KeptAnswers:
    """The last answers of a server; the oldest are evicted first, and one larger than `max_bytes` is not kept.

    An answer is found by its id and the name of its API key: an id alone opens nothing.

    >>> kept = KeptAnswers(max_answers=2, max_bytes=10**6)
    >>> for number in range(3):
    ...     kept.keep("key-1", KeptAnswer(f"cmpl-{number}", "tiny", 0, ()))
    >>> kept.find("key-1", "cmpl-0"), kept.find("key-1", "cmpl-2").id, kept.find("key-2", "cmpl-2")
    (None, 'cmpl-2', None)
    """

    def __init__(self, max_answers: int, max_bytes: int) -> None:
        self.max_answers, self.max_bytes = max_answers, max_bytes
        self.n_bytes = 0
        self._answers: OrderedDict[tuple[str, str], KeptAnswer] = OrderedDict()

    def __len__(self) -> int:
        return len(self._answers)

    def keep_requests(self, key: str, answer: str, model: str, requests: Sequence[Request]) -> None:
        """Keep the finished requests of an answer."""
        choices = tuple(KeptChoice.of(request) for request in requests)
        self.keep(key, KeptAnswer(answer, model, int(time.time()), choices))

    def keep(self, key: str, answer: KeptAnswer) -> None:
        """Keep an answer, in place of the oldest ones."""
        size = answer.n_bytes
        if size > self.max_bytes:
            return
        self._answers[key, answer.id] = answer
        self.n_bytes += size
        while len(self) > self.max_answers or self.n_bytes > self.max_bytes:
            self.n_bytes -= self._answers.popitem(last=False)[1].n_bytes

    def find(self, key: str, answer: str) -> KeptAnswer | None:
        """Return an answer that this key asked for."""
        return self._answers.get((key, answer))
