"""/v1/answers: an answer with the candidates of each token, and the answers of two models compared."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from glasshouse.config import JsonDict
from glasshouse.errors import GlasshouseError
from glasshouse.generation.detokenizer import Detokenizer
from glasshouse.generation.sampling.candidates import Candidate
from glasshouse.inspection.comparison import Comparison, compare
from glasshouse.models import Seq2Seq
from glasshouse.page.serialization import describe_tokens, encode_tensor, finite_or_none
from glasshouse.serve.answers.internals import describe_firing
from glasshouse.serve.answers.kept import KeptAnswer, KeptChoice
from glasshouse.serve.api import KEY, Api
from glasshouse.serve.schema.errors import ApiError
from glasshouse.serve.schema.requests import ANSWER_COMPARISON, Values
from glasshouse.serve.served_model import ServedModel
from glasshouse.text import Tokenizer
from glasshouse.web import json_response

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
    served = api.model(kept.model)
    opened = await api.in_thread(http, lambda: open_choice(kept, index, served, start, internals=api.internals))
    return json_response(opened)


def find_answer(api: Api, key: str, answer: str) -> KeptAnswer:
    """Return a kept answer of this API key; that of another key is the same 404 as an unknown id."""
    assert api.answers is not None
    kept = api.answers.find(key, answer)
    if kept is None:
        message = (
            f"there is no answer {answer[:100]!r} of this API key; the server keeps the last "
            f"{api.answers.max_answers} answers of all keys, up to {api.answers.max_bytes / 2**20:g} MiB."
        )
        raise ApiError(message, 404, code="answer_not_found", param="id")
    return kept


def open_choice(
    kept: KeptAnswer, index: int, served: ServedModel, start: int, *, internals: bool = False
) -> JsonDict:
    """Return a choice: its ids, the candidates of each, and the text of each from the position `start` on."""
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
        "scores": {name: [finite_or_none(one) for one in scores] for name, scores in choice.scores.items()},
        "firings": [describe_firing(one) for one in choice.firings if internals],
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
    """Return the state in which the page shows exactly these tokens; None where no text encodes to the source."""
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


async def answer_comparison(api: Api, http: HttpRequest) -> Response:
    """Answer a request to /v1/answers/comparison."""
    values: Values = await api.prepare(http, ANSWER_COMPARISON, lambda values: values)
    kept = [find_answer(api, http.scope[KEY], values[name]) for name in ("a", "b")]
    first, second = (api.model(one.model) for one in kept)
    a, b = (one.choices[0] for one in kept)
    check_tokenizers(first, second)
    at = parting_position(a, b)
    found = await api.runner.call(lambda: _compare(first, second, a), http.scope[KEY], api.deadline())
    return json_response(_table(first, a, b, at, found))


def check_tokenizers(first: ServedModel, second: ServedModel) -> None:
    """Raise for two models whose ids do not mean the same."""
    prints = [None if one.tok is None else one.tok.fingerprint for one in (first, second)]
    if prints[0] != prints[1]:
        raise ApiError(
            f"{first.name!r} and {second.name!r} have different tokenizers, so their tokens cannot be compared.",
            param="b",
        )


def parting_position(a: KeptChoice, b: KeptChoice) -> int | None:
    """Return the first output token in which two choices differ; None where they are equal."""
    for number, (one, other) in enumerate(zip(a.ids, b.ids, strict=False)):
        if one != other:
            return number
    return None if len(a.ids) == len(b.ids) else min(len(a.ids), len(b.ids))


def _compare(first: ServedModel, second: ServedModel, a: KeptChoice) -> Comparison | str:
    """Compare the models on a's prompt and output; return why that is not possible, where it is not."""
    device = first.model.token_embedding.table.weight.device
    rows = [list(a.source)] if a.source else []
    rows.append([*a.prompt, *a.ids])
    try:
        with torch.no_grad():
            return compare(first.model, second.model, *(torch.tensor([row], device=device) for row in rows))
    except GlasshouseError as error:
        return str(error)


def _table(first: ServedModel, a: KeptChoice, b: KeptChoice, at: int | None, found: Comparison | str) -> JsonDict:
    ids = [*a.prompt, *a.ids]
    table: JsonDict = {
        "parts_at": at,
        "same_prompt": (a.prompt, a.source) == (b.prompt, b.source),
        "ids": ids,
        "start": len(a.prompt),
        "tokens": {str(one["id"]): one for one in describe_tokens(sorted({*ids, *b.ids}), first.tok)},
        "reason": found if isinstance(found, str) else None,
    }
    if isinstance(found, Comparison):
        table |= {
            "kl_divergence": encode_tensor(found.kl_divergence[0]),
            "loss_a": encode_tensor(found.loss_a[0]),
            "loss_b": encode_tensor(found.loss_b[0]),
            "residual_distance": encode_tensor(found.residual_distance[:, 0]),
        }
    return table
