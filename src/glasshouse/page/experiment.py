"""Answers about an experiment: what the changes made inside cost, and what each part alone would cost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from glasshouse.config import JsonDict, Settings, require
from glasshouse.errors import InputError
from glasshouse.inspection import Recording, edit, record
from glasshouse.inspection.forward_pass import eval_mode
from glasshouse.inspection.logit_lens import has_position_logits
from glasshouse.models import Encoder
from glasshouse.models.heads import LMHead, NoHead, Pooler
from glasshouse.page import stream, wire
from glasshouse.page.following import logits_at, named
from glasshouse.page.question import Question
from glasshouse.page.trace import Trace, Traces, alike

MOST_SITES = 128  # in one answer
SHOWN = 8  # candidates, as in static/views/experiment/said.js


@dataclass(frozen=True)
class Loss(Settings):
    """How well does the model foretell this text?"""

    question: Question = field(default_factory=Question)


def loss(traces: Traces, ask: Loss) -> JsonDict:
    """Return the loss at each position in nats, NaN where no token is foretold, and its mean.

    Of a head that foretells no tokens there is none: then it is how far the last vectors have moved.
    """
    trace = traces.of(ask.question)
    values = _measure(trace)(_final(trace))
    counted = values[_counts(trace)]
    return {
        "measure": "loss" if _foretells(trace) else "moved",
        "values": wire.packed(values),
        "counted": "hidden" if _hides(trace) else "all",
        "count": len(counted),
        "mean": wire.number(counted.mean()),
    }


@dataclass(frozen=True)
class Without(Settings):
    """What would be lost without each of some parts, such as z.3[head=5], one at a time?"""

    question: Question = field(default_factory=Question)
    sites: tuple[str, ...] = ()


def without(traces: Traces, ask: Without) -> JsonDict:
    """Return how much the mean loss grows when each site alone is set to 0, besides the changes there are."""
    require(0 < len(ask.sites) <= MOST_SITES, "sites", len(ask.sites), f"1 to {MOST_SITES} of them")
    trace = traces.of(ask.question)
    measure, counts, final = _measure(trace), _counts(trace), f"{trace.prefix}final"
    before = measure(_final(trace))[counts].mean()

    def work() -> list[float | None]:
        grown = []
        for site in ask.sites:
            with edit(trace.model, {site: 0.0}), record(trace.model, final, stop=True) as seen:
                trace.model(*trace.inputs)
            grown.append(wire.number(measure(seen[final][0])[counts].mean() - before))
        return grown

    return {"before": wire.number(before), "growth": trace.run(work)}


@dataclass(frozen=True)
class Changed(Settings):
    """What is said at a position before and after the changes?"""

    question: Question = field(default_factory=Question)
    position: int = 0
    show: int = 8


def changed(traces: Traces, ask: Changed) -> JsonDict:
    """Return what is likeliest before or after, with both probabilities, and how far they are apart."""
    trace = traces.of(ask.question)
    length = len(trace.ids)
    require(0 <= ask.position < length, "position", ask.position, f"within 0 and {length - 1}")
    before, after = (_logs(one, ask.position) for one in (traces.of(ask.question.plain), trace))
    count = min(max(1, ask.show), len(before))
    top = [*before.topk(count).indices.tolist(), *after.topk(count).indices.tolist()]
    shown = list(dict.fromkeys(top))
    return {
        "candidates": [
            {**name, "before": float(before[one].exp()), "after": float(after[one].exp())}
            for one, name in zip(shown, named(trace, shown), strict=True)
        ],
        "divergence": wire.number((before.exp() * (before - after)).sum()),  # of before from after, in nats
    }


@dataclass(frozen=True)
class Patched(Settings):
    """What would be said at a position, were each of some sites alone as on the other text?"""

    question: Question = field(default_factory=Question)
    sites: tuple[str, ...] = ()
    position: int = 0


def patched(traces: Traces, ask: Patched) -> JsonDict:
    """Return how much of the way to the other text's answer each patch goes: 0 is none, 1 is all of it.

    It is measured in the logit of what the other text finds likeliest there, less that of what this one does.
    """
    require(0 < len(ask.sites) <= MOST_SITES, "sites", len(ask.sites), f"1 to {MOST_SITES} of them")
    if ask.question.other is None:
        raise InputError("there is no other text to patch from; write one.")
    here, there = traces.of(ask.question.without_patches()), traces.of(ask.question.source)
    length = min(len(here.ids), len(there.ids))
    require(0 <= ask.position < length, "position", ask.position, f"within 0 and {length - 1}, as both texts have it")
    logits = [logits_at(one, ask.position) for one in (here, there)]
    old, new = (int(one.argmax()) for one in logits)
    if old == new:
        (said,) = named(here, [old])
        raise InputError(
            f"on both texts {said['text']!r} is the likeliest there; choose another token, or write a text that "
            "leads elsewhere."
        )
    before, after = (float(one[new] - one[old]) for one in logits)

    def read() -> Recording:
        with record(there.model, *ask.sites, stop=True) as seen:
            there.model(*there.inputs)
        return seen

    values = there.run(read)
    final = f"{here.prefix}final"

    def work() -> list[float | None]:
        effects = []
        for site in ask.sites:
            put = partial(alike, site, values[site])
            with edit(here.model, {site: put}), record(here.model, final, stop=True) as seen:
                here.model(*here.inputs)
            said = logits_at(here, ask.position, seen[final][0])
            effects.append(wire.number((float(said[new] - said[old]) - before) / (after - before)))
        return effects

    effects = here.run(work)
    names = named(here, [old, new])
    return {"effect": effects, "here": names[0], "there": names[1], "before": before, "after": after}


def opening(traces: Traces, question: Question, state: JsonDict) -> list[tuple[str, JsonDict]]:
    """Return what the view asks when it opens."""
    trace, place = traces.of(question), state["token"]
    both = [question.plain.table()] + ([question.table()] if question.edits else [])
    asks: list[tuple[str, JsonDict]] = [("loss", {"question": each}) for each in both]
    if not isinstance(trace.model.head, NoHead | Pooler):
        asks.append(("changed", {"question": question.table(), "position": place, "show": SHOWN}))
    if has_position_logits(trace.model):
        asks += [("lens", {"question": each, "start": place, "stop": place + 1}) for each in both]
    return asks


def _logs(trace: Trace, position: int) -> Tensor:
    return logits_at(trace, position).log_softmax(-1)


def _final(trace: Trace) -> Tensor:
    return trace.site(f"{trace.prefix}final")


def _foretells(trace: Trace) -> bool:
    """Whether what is right is known: the tokens of a text are, labels are not."""
    return isinstance(trace.model.head, LMHead)


def _hides(trace: Trace) -> bool:
    return _foretells(trace) and isinstance(trace.model, Encoder) and bool(trace.question.asked.hidden)


def _measure(trace: Trace) -> Callable[[Tensor], Tensor]:
    """Return what makes one number for each position [S] of the last vectors [S, D]."""
    if not _foretells(trace):
        before = _final(trace.traces.of(trace.question.plain))
        return lambda final: (final - before).norm(dim=-1) / before.norm(dim=-1)
    true = stream.goals(trace)

    def measured(final: Tensor) -> Tensor:
        with eval_mode(trace.model):
            return stream.read(trace, final, true).loss

    return measured


def _counts(trace: Trace) -> Tensor:
    """Return which positions the mean is taken over [S]: those that hide a token, or where none does, all."""
    true = stream.goals(trace)
    counts = true >= 0 if _foretells(trace) else torch.ones_like(true, dtype=torch.bool)
    if _hides(trace):
        places = torch.arange(len(counts), device=counts.device)
        counts = counts & torch.isin(places, places.new_tensor(trace.question.asked.hidden))
    return counts
