"""Log-probabilities of the tokens of a given text."""

from __future__ import annotations

from typing import NamedTuple

import torch

from glasshouse.generation.request import TopLogprobs
from glasshouse.generation.sampling.logits_kernels import token_logprobs, top_logprobs
from glasshouse.models import Decoder

CHUNK = 256  # tokens whose logits are in memory at a time


class PromptLogprobs(NamedTuple):
    """The log-probability of each token but the first, given those before it, and the most probable ones instead."""

    logprobs: list[float]
    top: list[TopLogprobs]


@torch.inference_mode()
def prompt_logprobs(model: Decoder, ids: list[int], top: int = 0) -> PromptLogprobs:
    """Return the log-probabilities of a text's own tokens, by a decoder in eval mode.

    >>> import glasshouse as gh
    >>> model = gh.build(gh.preset("tiny-decoder")).eval()
    >>> scored = prompt_logprobs(model, [1, 2, 3], top=2)
    >>> len(scored.logprobs), [len(one) for one in scored.top]
    (2, [2, 2])
    """
    result = PromptLogprobs([], [])
    device = model.token_embedding.table.weight.device
    cache = model.make_cache(1, len(ids), chunk=CHUNK)
    for start in range(0, len(ids) - 1, CHUNK):
        stop = min(start + CHUNK, len(ids) - 1)
        logits = model(torch.tensor([ids[start:stop]], device=device), cache=cache)[0]
        targets = torch.tensor(ids[start + 1 : stop + 1], device=device)
        result.logprobs.extend(token_logprobs(logits, targets).tolist())
        if top:
            values, best = (one.tolist() for one in top_logprobs(logits, top))
            result.top.extend([list(zip(*row, strict=True)) for row in zip(best, values, strict=True)])
    return result
