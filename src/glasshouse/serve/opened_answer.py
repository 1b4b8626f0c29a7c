"""/v1/answers/{id}: an answer with the candidates that each of its tokens was drawn from."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from glasshouse.config import JsonDict
from glasshouse.generation.candidates import Candidate
from glasshouse.generation.detokenizer import Detokenizer
from glasshouse.models import Seq2Seq
from glasshouse.page.serialization import describe_tokens
from glasshouse.serve.api import KEY, Api
from glasshouse.serve.api_errors import ApiError, json_response
from glasshouse.serve.kept_answers import KeptAnswer, KeptChoice
from glasshouse.serve.served_model import ServedModel
from glasshouse.text import Tokenizer

SETTINGS = (
    "max_new_tokens",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "frequency_penalty",
    "presence_penalty",
)


async def opened_answer(api: Api, http: HttpRequest) -> Response:
    """Answer a request to /v1/answers/{id}: one choice of it."""
    kept = find_answer(api, http.scope[KEY], http.path_params["id"])
    index = _number(http, "choice", len(kept.choices) - 1)
    choice = kept.choices[index]
    start = _number(http, "start", len(choice.prompt), default=len(choice.prompt))
    opened = await api.in_thread(http, lambda: open_choice(kept, index, api.model(kept.model), start))
    return json_response(opened)


def find_answer(api: Api, key: str, answer: str) -> KeptAnswer:
    """Return a kept answer of this key; one of another key is not told from one that never was."""
    assert api.answers is not None
    kept = api.answers.find(key, answer)
    if kept is None:
        message = (
            f"there is no answer {answer[:100]!r} of this key; the last {api.answers.max_answers} answers are kept, "
            f"up to {api.answers.max_bytes / 2**20:g} MiB, of all keys."
        )
        raise ApiError(message, 404, code="answer_not_found", param="id")
    return kept


def open_choice(kept: KeptAnswer, index: int, served: ServedModel, start: int) -> JsonDict:
    """Return a choice: its ids, what each was drawn from, and the text of each from the position `start` on."""
    choice = kept.choices[index]
    drawn = [{**_drawn(draw.token), "candidates": [list(one) for one in draw.candidates]} for draw in choice.draws]
    seen = {
        *choice.source,
        *choice.prompt,
        *(one for draw in choice.draws for one in _ids(draw.token, draw.candidates)),
    }
    tokens = describe_tokens(sorted(seen), served.tok)
    return {
        "id": kept.id,
        "object": "answer",
        "created": kept.created,
        "model": kept.model,
        "choice": index,
        "n_choices": len(kept.choices),
        "source": list(choice.source),
        "prompt": list(choice.prompt),
        "output": drawn[: len(choice.ids)],
        "end": drawn[len(choice.ids)] if len(drawn) > len(choice.ids) else None,
        "start": start,
        "pieces": pieces(served.tok, [*choice.prompt[start:], *choice.ids]),
        "finish_reason": choice.finish_reason,
        # A seed has more digits than a number of JavaScript.
        "settings": {name: getattr(choice.options, name) for name in SETTINGS}
        | {"seed": str(choice.options.seed), "steer": dict(choice.options.steer)},
        "stop": list(choice.options.stop),
        "stop_token_ids": list(choice.options.stop_token_ids),
        "end_ids": sorted({*served.model.spec.end_ids, *choice.options.stop_token_ids}),
        "tokens": {str(one["id"]): one for one in tokens},
        "state": page_state(choice, served),
    }


def pieces(tok: Tokenizer | None, ids: Sequence[int]) -> list[str]:
    r"""Return the text that each token adds to those before; a part of a character adds none.

    >>> tok = Tokenizer.train(texts=["to be"], vocab_size=263)
    >>> pieces(tok, tok.encode("né"))
    ['n', '', 'é']
    """
    if tok is None:
        return [""] * len(ids)
    detokenizer = Detokenizer(tok)
    found = [detokenizer.add(token) for token in ids]
    if rest := detokenizer.finish():
        found[-1] += rest
    return found


def page_state(choice: KeptChoice, served: ServedModel) -> JsonDict | None:
    """Return the state in which the page shows exactly these tokens; None where a source is not that of a text."""
    if not isinstance(served.model, Seq2Seq):
        return {"text": "", "appended": [*choice.prompt, *choice.ids]}
    if served.tok is None:
        text = " ".join(map(str, choice.source))
    else:
        text = served.tok.decode([one for one in choice.source if one not in served.tok.special_ids])
        if served.encode(text) != list(choice.source):
            return None
    return {"text": text, "target": "", "appended": list(choice.ids)}


def _drawn(token: Candidate) -> JsonDict:
    return {"id": token.id, "probability": token.probability, "logprob": token.logprob}


def _ids(token: Candidate, candidates: Iterable[Candidate]) -> list[int]:
    return [token.id, *(one.id for one in candidates)]


def _number(http: HttpRequest, name: str, most: int, default: int = 0) -> int:
    given = http.query_params.get(name, str(default))
    if not (given.isascii() and given.isdigit() and len(given) < 10 and int(given) <= most):
        raise ApiError(f"{name} is {given[:20]!r}, but it must be a whole number from 0 to {most}.", param=name)
    return int(given)
