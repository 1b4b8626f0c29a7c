"""/v1/completions: a prompt is continued, or translated by an encoder-decoder."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from glasshouse.config import JsonDict
from glasshouse.generation.prompt_logprobs import prompt_logprobs
from glasshouse.generation.request import Request, TopLogprobs
from glasshouse.models import Decoder
from glasshouse.serve.answers.answer import Answer, check_fan_out, respond
from glasshouse.serve.answers.internals import check_asked
from glasshouse.serve.answers.logprobs import TokenOffsets, completion_logprobs
from glasshouse.serve.api import KEY, Api
from glasshouse.serve.runtime.exchange import DisconnectedError, Piece
from glasshouse.serve.schema.errors import ApiError
from glasshouse.serve.schema.requests import COMPLETIONS, Values, sampling_params
from glasshouse.serve.served_model import ServedModel

DEFAULT_TOKENS = 16  # OpenAI's


@dataclass
class EchoedPrompt:
    """One prompt of a request, and its own log-probabilities where they are echoed."""

    text: str = ""
    ids: list[int] = field(default_factory=list)
    logprobs: list[float | None] = field(default_factory=list)
    top: list[TopLogprobs | None] = field(default_factory=list)


class CompletionAnswer(Answer):
    """The answer of this endpoint: each of the `n` samples of each prompt is a choice."""

    kind, object, chunk_object = "cmpl", "text_completion", "text_completion"

    def __init__(self, served: ServedModel, values: Values, prompts: list[EchoedPrompt]) -> None:
        super().__init__(served, values, sum(len(prompt.ids) for prompt in prompts))
        self.prompts = prompts
        self._offsets = [TokenOffsets(served.tok) for _ in range(len(prompts) * values["n"])]

    def choice(self, index: int, piece: Piece, *, first: bool, chunk: bool) -> JsonDict:
        values, tok = self.values, self.served.tok
        prompt = self.prompts[index // values["n"]] if first and values["echo"] else EchoedPrompt()
        logprobs = None
        if values["logprobs"] is not None:  # an end token has one as well: lm-eval counts on one per generated token
            told = piece.with_end_token()
            ids, own = [*prompt.ids, *told.ids], [*prompt.logprobs, *told.logprobs]
            top = [*prompt.top, *(told.top_logprobs or [[]] * len(told.ids))]
            logprobs = completion_logprobs(tok, self._offsets[index], ids, own, top)
        reason = piece.finish_reason
        return {"index": index, "text": prompt.text + piece.text, "logprobs": logprobs, "finish_reason": reason}


async def completions(api: Api, http: HttpRequest) -> Response:
    """Answer a request to /v1/completions."""
    answer, requests = await api.prepare(http, COMPLETIONS, partial(_read, api, http.scope[KEY]))
    top = answer.values["logprobs"]
    if answer.values["echo"] and top is not None:
        end = api.deadline()
        for prompt in answer.prompts:
            if await http.is_disconnected():
                raise DisconnectedError
            await _score(api, http.scope[KEY], answer.served, prompt, top, end)
    return await respond(api, http, answer, requests)


def _read(api: Api, key: str, values: Values) -> tuple[CompletionAnswer, list[Request]]:
    """Check a request, encode its prompts, and make the engine's requests: the samples of each prompt in turn."""
    check_asked(values, api.internals)
    served = api.model(values["model"])
    engine = served.generator()
    if values["best_of"] not in (None, values["n"]):
        message = "best_of is not supported; ask for n completions, and choose by log-probability."
        raise ApiError(message, param="best_of")
    given = values["prompt"]
    many = given if isinstance(given, list) and not isinstance(given[0], int) else [given]
    check_fan_out(api, len(many) * values["n"])
    if values["echo"] and values["logprobs"] is not None and not isinstance(served.model, Decoder):
        message = f"{served.name!r} is an encoder-decoder, whose prompt has no log-probabilities; leave out echo."
        raise ApiError(message, param="echo")
    if values["echo"] and values["logprobs"] is not None and any(values["steer"].values()):
        message = "steer was given, but the log-probabilities of a prompt are not steered; leave out echo."
        raise ApiError(message, param="steer")
    prompts, requests = [], []
    for one in many:
        ids = served.encode(one)
        limit = served.fit(ids, values["max_tokens"], DEFAULT_TOKENS)
        params = sampling_params(values, limit, values["logprobs"] or 0, api.candidates, served.rules)
        requests += [engine.make_request(ids, sample, namespace=key) for sample in params.with_seeds(values["n"])]
        text = one if isinstance(one, str) else served.tok.decode(ids) if served.tok and values["echo"] else ""
        prompts.append(EchoedPrompt(text, ids))
    api.recording_quota.add(key, requests)
    return CompletionAnswer(served, values, prompts), requests


async def _score(api: Api, key: str, served: ServedModel, prompt: EchoedPrompt, top: int, end: float) -> None:
    """Compute the log-probabilities of a prompt's own tokens; its first has none."""
    model = served.model
    assert isinstance(model, Decoder)
    (scored,) = await api.runner.call(lambda: prompt_logprobs(model, [prompt.ids], top), key, end)
    prompt.logprobs = [None, *scored.logprobs]
    prompt.top = [None, *(scored.top or [[]] * len(scored.logprobs))]
