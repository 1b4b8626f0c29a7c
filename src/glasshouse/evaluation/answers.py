"""Generates the answers of an evaluation: one after each prompt, beside its reference."""

from __future__ import annotations

from collections.abc import Sequence

from glasshouse.generation import Request, SamplingParams
from glasshouse.generation.generate import generate_requests
from glasshouse.models import Model
from glasshouse.objectives.objective import Pair
from glasshouse.objectives.report import Example
from glasshouse.text import Tokenizer
from glasshouse.text.bpe.training import ProgressCallback


def generate_answers(
    model: Model,
    tok: Tokenizer,
    pairs: Sequence[Pair],
    max_new_tokens: int,
    *,
    end: int,
    show_special: bool,
    max_len: int,
    beams: int,
    n_best: int,
    progress: ProgressCallback,
) -> list[Example]:
    """Generate after each prompt, greedily or by beam search; `show_special` keeps the role tokens of a chat."""
    if not pairs:
        return []
    ends = {reference[-1] for _, reference in pairs if reference} & tok.special_ids | {end}
    done, total = 0, max_new_tokens * len(pairs)

    def on_tokens(new: int) -> None:
        nonlocal done
        done += new
        progress("generating", done, total)

    found = generate_requests(
        model,
        tok,
        [prompt for prompt, _ in pairs],
        SamplingParams(max_new_tokens=max_new_tokens, beams=beams, stop_token_ids=tuple(sorted(ends))),
        n=n_best,
        max_len=max_len,
        progress=on_tokens,
    )
    progress("generating", total, total)
    return [
        _example(
            tok.decode(prompt, skip_special_tokens=not show_special),
            tok.decode(reference, skip_special_tokens=True),
            request,
            n_best,
        )
        for (prompt, reference), request in zip(pairs, found, strict=True)
    ]


def _example(prompt: str, reference: str, request: Request, n_best: int) -> Example:
    best = request.completions()
    listed = tuple((one.score, one.text) for one in best if one.score is not None) if n_best > 1 else ()
    return Example(prompt, reference, best[0].text, listed)
