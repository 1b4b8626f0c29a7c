"""Log-probabilities of given texts, by a decoder: texts of similar lengths in one forward pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from glasshouse.generation.engine.prefill import NewPrompt, for_any_shape, group_by_length, max_padding
from glasshouse.generation.request import TopLogprobs
from glasshouse.generation.sampling.logits_kernels import token_logprobs, top_logprobs
from glasshouse.models import Decoder

CHUNK = 256  # tokens whose logits are in memory at a time


class PromptLogprobs(NamedTuple):
    """The log-probability of each token but the first, given those before it, and the most probable ones instead."""

    logprobs: list[float]
    top: list[TopLogprobs]


@torch.inference_mode()
def prompt_logprobs(
    model: Decoder,
    prompts: Sequence[list[int]],
    top: int = 0,
    *,
    starts: Sequence[int] | None = None,
    chunk: int = CHUNK,
    progress: Callable[[int], None] = lambda new: None,
) -> list[PromptLogprobs]:
    """Return the log-probabilities of the own tokens of texts, by a decoder in eval mode.

    With `starts` only the tokens of each text from that position on, which is at least 1. Up to `chunk` tokens go
    through the model at a time. Texts that differ in their last token alone, such as a question
    with the letters of its answers, are one. `progress` is called with the number of texts after each pass.

    >>> import glasshouse as gh
    >>> model = gh.build(gh.preset("tiny-decoder")).eval()
    >>> one, two = prompt_logprobs(model, [[1, 2, 3], [1, 2, 3, 4, 5]], top=2, starts=[1, 3])
    >>> len(one.logprobs), len(two.logprobs), [len(best) for best in two.top]
    (2, 2, [2, 2])
    """
    starts = [1] * len(prompts) if starts is None else starts
    texts_of: dict[tuple[int, ...], list[int]] = {}  # by what goes through the model: all but the last token
    for text, ids in enumerate(prompts):
        texts_of.setdefault(tuple(ids[:-1]), []).append(text)
    members = list(texts_of.values())
    inputs = [NewPrompt(number, list(ids)) for number, ids in enumerate(texts_of) if ids]
    results = [PromptLogprobs([], []) for _ in prompts]
    device = model.token_embedding.table.weight.device
    for group in group_by_length(inputs, max_padding(device), chunk):
        rows = [members[one.slot] for one in group]
        width, first = len(group[0].ids), min(starts[text] for texts in rows for text in texts)
        cache = model.make_cache(len(group), width, chunk=chunk)
        for begin in range(0, width, chunk):
            end = min(begin + chunk, width)
            read = max(begin, min(first - 1, end))  # the first position whose logits are needed
            # Padding needs no mask: no token attends to what is on its right.
            padded = torch.tensor(
                [(one.ids + [0] * (width - len(one.ids)))[begin:end] for one in group], device=device
            )
            kept = torch.arange(read - begin, end - begin, device=device)
            with for_any_shape(device):
                logits = model(padded, cache=cache, logits_to_keep=kept)
            if read < end:
                _read_logits(logits, rows, prompts, starts, read, top, results)
        progress(sum(map(len, rows)))
    return results


def _read_logits(
    logits: Tensor,
    rows: Sequence[Sequence[int]],
    prompts: Sequence[list[int]],
    starts: Sequence[int],
    read: int,
    top: int,
    results: Sequence[PromptLogprobs],
) -> None:
    """Add to the results what logits [B, S, V] from position `read` on say of the texts of each row."""
    targets = torch.zeros(*logits.shape[:2], max(map(len, rows)), dtype=torch.long)
    for row, texts in enumerate(rows):
        for column, text in enumerate(texts):
            own = torch.tensor(prompts[text][read + 1 : read + 1 + logits.shape[1]])
            targets[row, : len(own), column] = own
    flat = logits.flatten(0, 1)
    found = token_logprobs(flat, targets.to(logits.device).flatten(0, 1)).view(targets.shape).tolist()
    best: list[list[TopLogprobs]] = [[]] * len(rows)
    if top:
        values, ids = (one.unflatten(0, targets.shape[:2]).tolist() for one in top_logprobs(flat, top))
        best = [
            [[*zip(*one, strict=True)] for one in zip(*row, strict=True)] for row in zip(ids, values, strict=True)
        ]
    for row, texts in enumerate(rows):
        for column, text in enumerate(texts):
            span = slice(max(starts[text] - 1 - read, 0), max(len(prompts[text]) - 1 - read, 0))
            results[text].logprobs.extend(one[column] for one in found[row][span])
            results[text].top.extend(best[row][span])
