"""Answers about what follows: the next token at any position, how it is drawn, and the text that the model writes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from glasshouse import spec
from glasshouse.config import JsonDict, Settings, require
from glasshouse.errors import InputError
from glasshouse.escaping import show_whitespace
from glasshouse.generation import Engine, SamplingParams
from glasshouse.generation.sampling import Sampler
from glasshouse.inspection.forward_pass import layout_of
from glasshouse.models import Decoder, Seq2Seq
from glasshouse.models.heads import Classifier, LMHead, NoHead, Pooler
from glasshouse.page import wire
from glasshouse.page.question import Question
from glasshouse.page.trace import Trace, Traces

MOST_WRITTEN = 256  # tokens at once


@dataclass(frozen=True)
class Next(Settings):
    """What comes after, or stands at, a position?"""

    question: Question = field(default_factory=Question)
    position: int = -1
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    show: int = 12


def next_tokens(traces: Traces, ask: Next) -> JsonDict:
    """Return the likeliest tokens or labels: the model's own probabilities, and those that are drawn from."""
    trace = traces.of(ask.question)
    ids = trace.ids
    require(-len(ids) <= ask.position < len(ids), "position", ask.position, f"within 0 and {len(ids) - 1}")
    position = ask.position % len(ids)
    logits = logits_at(trace, position)
    own = logits.softmax(-1)
    drawn = shaped(logits, ask.temperature, ask.top_k, ask.top_p)
    top = own.topk(min(max(1, ask.show), len(own))).indices.tolist()
    foretells = isinstance(trace.model, Decoder | Seq2Seq) and isinstance(trace.model.head, LMHead)
    following = ids[position + 1] if foretells and position + 1 < len(ids) else None
    if following is not None and following not in top:
        top.append(following)
    names = named(trace, top)
    return {
        "position": position,
        "candidates": [
            {**name, "probability": float(own[one]), "drawn": float(drawn[one]), "logit": float(logits[one])}
            for one, name in zip(top, names, strict=True)
        ],
        "following": following,
        "entropy": float(torch.special.entr(own).sum()),
        "drawn_entropy": float(torch.special.entr(drawn).sum()),
        "drawn_from": int((drawn > 0).sum()),
    }


def shaped(logits: Tensor, temperature: float, top_k: int | None, top_p: float | None) -> Tensor:
    """Return the probabilities by which generation draws from logits [V]."""
    sampler = Sampler(1, len(logits), logits.device)
    sampler.set_slot(0, SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p), prompt=[0], end_ids=[])
    return sampler.distribution(logits[None])[0]


def logits_at(trace: Trace, position: int, final: Tensor | None = None) -> Tensor:
    """Return the logits at a position [V], or of the whole text where the head pools it.

    They are read off the last vectors `final` [S, D]: the trace's own, unless others are given.
    """
    head = trace.model.head
    if isinstance(head, NoHead | Pooler):
        raise InputError(f"the head is {trace.model.spec.head.kind!r}, which says nothing of tokens or labels.")
    final = trace.site(f"{trace.prefix}final") if final is None else final
    pooled = isinstance(head, Classifier) and isinstance(head.pool, Pooler)
    vectors = (final if pooled else final[position : position + 1])[None]
    ids = trace.inputs[-1] if pooled else trace.inputs[-1][:, position : position + 1]
    with torch.no_grad():
        logits: Tensor = head.forward(
            vectors, layout_of(trace.model, ids, {}), trace.model.token_embedding.table.weight
        )
    return logits.flatten().to(torch.promote_types(logits.dtype, torch.float32))


def named(trace: Trace, numbers: Iterable[int]) -> list[JsonDict]:
    """Return what the page shows of some outputs: tokens, or labels by their names."""
    if not isinstance(trace.model.head, Classifier):
        return wire.tokens(numbers, trace.tok)
    labels: tuple[str, ...] = getattr(trace.model.spec.head, "labels", ())
    return [
        {"id": one, "text": show_whitespace(labels[one]) if one < len(labels) else f"label {one}"} for one in numbers
    ]


@dataclass(frozen=True)
class Write(Settings):
    """How would the model go on?"""

    question: Question = field(default_factory=Question)
    max_new_tokens: int = 20
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0


def write(traces: Traces, ask: Write) -> JsonDict:
    """Let the model go on with the text, and return what it adds."""
    require(0 < ask.max_new_tokens <= MOST_WRITTEN, "max_new_tokens", ask.max_new_tokens, f"1 to {MOST_WRITTEN}")
    trace = traces.of(ask.question)
    model = trace.model
    if not isinstance(model, Decoder | Seq2Seq):
        raise InputError("the model is an encoder, which does not write.")
    options = SamplingParams(
        max_new_tokens=ask.max_new_tokens,
        temperature=ask.temperature,
        top_k=ask.top_k,
        top_p=ask.top_p,
        seed=ask.seed,
    )
    pair, ids = isinstance(model, Seq2Seq), trace.ids
    opening = len(trace.sitter.start()) if pair else 0
    source = trace.inputs[0][0].tolist()

    # Only a learned table of positions ends somewhere.
    room = model.spec.max_len if isinstance(model.spec.position, spec.Learned) else len(ids) + ask.max_new_tokens

    def work() -> JsonDict:
        length = min(room, len(ids) + ask.max_new_tokens)
        source_len = len(source) if pair else None
        engine = Engine(model, trace.tok, slots=1, max_len=length, source_len=source_len, weights="own")
        request = engine.submit(source, options, target_prefix=ids[opening:]) if pair else engine.submit(ids, options)
        engine.run()
        (made,) = request.completions()
        return {
            "tokens": wire.tokens(made.ids, trace.tok),
            "logprobs": [wire.number(one) for one in made.logprobs],
            "text": made.text,
            "finish_reason": made.finish_reason,
        }

    return trace.run(work)
