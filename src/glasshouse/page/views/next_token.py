"""Endpoints for next-token probabilities, sampling and generation."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from glasshouse.config import JsonDict, Settings, require
from glasshouse.errors import InputError
from glasshouse.escaping import show_whitespace
from glasshouse.generation import Engine, SamplingParams
from glasshouse.generation.sampling.sampler import Sampler
from glasshouse.inspection.inputs.forward_pass import layout_of
from glasshouse.inspection.logit_lens import MAX_LOGITS, n_logits
from glasshouse.models import Decoder, Seq2Seq
from glasshouse.models.heads import Classifier, LMHead, NoHead, Pooler
from glasshouse.page import serialization
from glasshouse.page.forward_pass import ForwardPass
from glasshouse.page.trace import Trace, TraceCache

MAX_NEW_TOKENS = 256  # per request


@dataclass(frozen=True)
class Next(Settings):
    """Parameters of the predictions at a position."""

    forward_pass: ForwardPass = field(default_factory=ForwardPass)
    position: int = -1
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    show: int = 12


def next_tokens(traces: TraceCache, params: Next) -> JsonDict:
    """Return the most likely tokens or labels, with model probabilities and sampling probabilities."""
    trace = traces.trace(params.forward_pass)
    ids = trace.ids
    require(-len(ids) <= params.position < len(ids), "position", params.position, f"within 0 and {len(ids) - 1}")
    position = params.position % len(ids)
    logits = logits_at(trace, position)
    own = logits.softmax(-1)
    sampling = sampling_distribution(logits, params.temperature, params.top_k, params.top_p)
    top = own.topk(min(max(1, params.show), len(own))).indices.tolist()
    predicts_next = isinstance(trace.model, Decoder | Seq2Seq) and isinstance(trace.model.head, LMHead)
    actual_next = ids[position + 1] if predicts_next and position + 1 < len(ids) else None
    if actual_next is not None and actual_next not in top:
        top.append(actual_next)
    names = describe_outputs(trace, top)
    return {
        "position": position,
        "candidates": [
            {
                **name,
                "probability": float(own[one]),
                "sampling_probability": float(sampling[one]),
                "logit": float(logits[one]),
            }
            for one, name in zip(top, names, strict=True)
        ],
        "actual_next": actual_next,
        "entropy": float(torch.special.entr(own).sum()),
        "sampling_entropy": float(torch.special.entr(sampling).sum()),
        "n_candidates": int((sampling > 0).sum()),
    }


def sampling_distribution(logits: Tensor, temperature: float, top_k: int | None, top_p: float | None) -> Tensor:
    """Return the distribution [V] that is sampled from, after temperature, top-k and top-p."""
    sampler = Sampler(1, len(logits), logits.device)
    sampler.slots.set(0, SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p), prompt=[0], end_ids=[])
    return sampler.distribution(logits[None])[0]


def logits_at(trace: Trace, position: int, final: Tensor | None = None) -> Tensor:
    """Return the logits at a position [V], or of the whole text if the head pools it.

    They are those of the forward pass, or are computed from other final hidden states `final` [S, D].
    """
    head = trace.model.head
    if isinstance(head, NoHead | Pooler):
        raise InputError(f"the head is {trace.model.spec.head.kind!r}, which predicts no tokens or labels.")
    if isinstance(head, Classifier) and isinstance(head.pool, Pooler):
        return apply_head(trace, trace.activation(f"{trace.prefix}final") if final is None else final).flatten()
    here = slice(position, position + 1)
    return (logits_of_pass(trace, here) if final is None else apply_head(trace, final, here))[0]


def logits_of_pass(trace: Trace, positions: slice) -> Tensor:
    """Return the logits at some positions of a forward pass [position, V], bit for bit those of `model(ids)`.

    A matmul over one row may round unlike the same row in a matmul over all: the head is applied to the whole text,
    and its logits are cached, unless they are more than MAX_LOGITS.
    """
    final = trace.activation(f"{trace.prefix}final")
    if len(final) * n_logits(trace.model) > MAX_LOGITS:
        return apply_head(trace, final, positions)
    with trace.traces.lock:
        logits = trace.traces.get(trace.forward_pass, "logits")
        if logits is None:
            logits = apply_head(trace, final)
            trace.traces.put(trace.forward_pass, "logits", logits)
    assert isinstance(logits, Tensor)
    return logits[positions]


def apply_head(trace: Trace, final: Tensor, positions: slice = slice(None)) -> Tensor:
    """Return the logits that the head computes from final hidden states [S, D] at some positions, in float32."""
    layout = layout_of(trace.model, trace.inputs[-1][:, positions], {})
    with torch.no_grad():
        logits: Tensor = trace.model.head.forward(
            final[None, positions], layout, trace.model.token_embedding.table.weight
        )
    return logits[0].to(torch.promote_types(logits.dtype, torch.float32))


def describe_outputs(trace: Trace, numbers: Iterable[int]) -> list[JsonDict]:
    """Describe outputs for the page: tokens, or labels by name."""
    if not isinstance(trace.model.head, Classifier):
        return serialization.describe_tokens(numbers, trace.tok)
    labels: tuple[str, ...] = getattr(trace.model.spec.head, "labels", ())
    return [
        {"id": one, "text": show_whitespace(labels[one]) if one < len(labels) else f"label {one}"} for one in numbers
    ]


@dataclass(frozen=True)
class Generate(Settings):
    """Parameters of generation."""

    forward_pass: ForwardPass = field(default_factory=ForwardPass)
    max_new_tokens: int = 20
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0


def generate_text(traces: TraceCache, params: Generate) -> JsonDict:
    """Generate a continuation of the prompt."""
    require(
        0 < params.max_new_tokens <= MAX_NEW_TOKENS, "max_new_tokens", params.max_new_tokens, f"1 to {MAX_NEW_TOKENS}"
    )
    trace = traces.trace(params.forward_pass)
    model = trace.model
    if not isinstance(model, Decoder | Seq2Seq):
        raise InputError("the model is an encoder, which does not generate.")
    options = SamplingParams(
        max_new_tokens=params.max_new_tokens,
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        seed=params.seed,
    )
    pair, ids = isinstance(model, Seq2Seq), trace.ids
    opening = len(trace.loaded.start()) if pair else 0
    source = trace.inputs[0][0].tolist()

    length, limit = len(ids) + params.max_new_tokens, model.spec.position_limit
    length = length if limit is None else min(length, limit)

    def work() -> JsonDict:
        source_len = len(source) if pair else None
        engine = Engine(model, trace.tok, slots=1, max_len=length, source_len=source_len, weights="own")
        request = engine.submit(source, options, target_prefix=ids[opening:]) if pair else engine.submit(ids, options)
        engine.run()
        (made,) = request.completions()
        return {
            "tokens": serialization.describe_tokens(made.ids, trace.tok),
            "logprobs": [serialization.finite_or_none(one) for one in made.logprobs],
            "text": made.text,
            "finish_reason": made.finish_reason,
        }

    return trace.run(work)
