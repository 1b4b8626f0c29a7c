"""/v1/answers/comparison: where the answers of two models part, and how much the models differ on the first."""

from __future__ import annotations

import torch
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from glasshouse.config import JsonDict
from glasshouse.errors import GlasshouseError
from glasshouse.inspection.comparison import Comparison, compare
from glasshouse.page.serialization import describe_tokens, encode_tensor
from glasshouse.serve.api import KEY, Api
from glasshouse.serve.api_errors import ApiError, json_response
from glasshouse.serve.kept_answers import KeptChoice
from glasshouse.serve.opened_answer import find_answer
from glasshouse.serve.protocol import ANSWER_COMPARISON, Values
from glasshouse.serve.served_model import ServedModel


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
