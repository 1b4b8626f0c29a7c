"""Random requests to /v1/completions, and the same for the library."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from serve.conftest import WORDS

Choices = list[tuple[str, list[int], str]]  # text, ids, finish reason


@dataclass(frozen=True)
class RandomRequest:
    """A request with settings that both understand."""

    number: int
    prompt: str
    max_tokens: int
    temperature: float
    seed: int
    n: int
    extra: dict[str, Any]

    def settings(self) -> dict[str, Any]:
        """Return the arguments of the client's call."""
        names = ("prompt", "max_tokens", "temperature", "seed", "n")
        extra = dict(self.extra)
        body = {name: extra.pop(name) for name in ("top_k", "min_p", "repetition_penalty") if name in extra}
        return {
            "model": "decoder",
            **{name: getattr(self, name) for name in names},
            **extra,
            "logprobs": 1,
            "extra_body": {**body, "return_token_ids": True},
        }

    def library_settings(self) -> dict[str, Any]:
        """Return the arguments of `gh.generate`."""
        return {
            "prompts": self.prompt,
            "max_new_tokens": self.max_tokens,
            "temperature": self.temperature,
            "seed": self.seed,
            "n": self.n,
            **self.extra,
        }

    def answer(self, completion: Any) -> Choices:  # noqa: ANN401 - the client's type
        """Return the choices of a whole answer."""
        return [(one.text, one.token_ids, one.finish_reason) for one in completion.choices]

    def joined(self, chunks: Sequence[Any]) -> Choices:
        """Return the choices of a streamed answer."""
        found: Choices = [("", [], "")] * self.n
        for chunk in chunks:
            for one in chunk.choices:
                text, ids, reason = found[one.index]
                assert not reason, "a chunk after the last"
                found[one.index] = (text + one.text, ids + one.token_ids, one.finish_reason or "")
                told = len(one.logprobs.tokens)
                assert len(one.logprobs.token_logprobs) == told
                assert told - len(one.token_ids) in ((0, 1) if one.finish_reason == "stop" else (0,))  # an end token
        return found


def random_requests(seed: int, count: int) -> Iterator[RandomRequest]:
    """Yield requests: greedy and seeded, with filters, penalties, stop strings, and several samples."""
    draw = random.Random(seed)
    for number in range(count):
        prompt = " ".join(draw.choices(WORDS, k=draw.randint(1, 12)))
        temperature = draw.choice((0.0, 0.7, 1.0))
        extra = {}
        if draw.random() < 0.3:
            extra["stop"] = draw.choice((" ", "e", ["or", "be"], "\n"))
        if draw.random() < 0.3:
            extra["top_p"] = draw.choice((0.5, 0.9))
        if draw.random() < 0.3:
            extra["top_k"] = draw.randint(1, 50)
        if draw.random() < 0.2:
            extra["min_p"] = 0.1
        if draw.random() < 0.2:
            extra["frequency_penalty"] = 0.5
        if draw.random() < 0.2:
            extra["presence_penalty"] = -0.5
        if draw.random() < 0.1:
            extra["repetition_penalty"] = 1.2
        n = draw.choice((1, 1, 1, 2)) if temperature else 1
        yield RandomRequest(number, prompt, draw.randint(1, 16), temperature, draw.randint(0, 999), n, extra)
