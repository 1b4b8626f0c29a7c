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
from glasshouse.page import residual_stream, serialization
from glasshouse.page.forward_pass import ForwardPass
from glasshouse.page.next_token import describe_outputs, logits_at
from glasshouse.page.trace import Trace, TraceCache, check_patch_shape

MAX_SITES = 128  # in one answer
SHOWN = 8  # candidates, as in static/views/experiment/said.js


@dataclass(frozen=True)
class Loss(Settings):
    """How well does the model foretell this text?"""

    forward_pass: ForwardPass = field(default_factory=ForwardPass)


def loss(traces: TraceCache, params: Loss) -> JsonDict:
    """Return the loss at each position in nats, NaN where no token is foretold, and its mean.

    Of a head that foretells no tokens there is none: then it is how far the last vectors have moved.
    """
    trace = traces.trace(params.forward_pass)
    values = _measure(trace)(_final(trace))
    counted = values[_counts(trace)]
    return {
        "measure": "loss" if _predicts_tokens(trace) else "relative_change",
        "values": serialization.encode_tensor(values),
        "counted": "masked" if _has_masked_tokens(trace) else "all",
        "count": len(counted),
        "mean": serialization.finite_or_none(counted.mean()),
    }


@dataclass(frozen=True)
class AblateEach(Settings):
    """What would be lost without each of some parts, such as z.3[head=5], one at a time?"""

    forward_pass: ForwardPass = field(default_factory=ForwardPass)
    sites: tuple[str, ...] = ()


def ablate_each(traces: TraceCache, params: AblateEach) -> JsonDict:
    """Return how much the mean loss grows when each site alone is set to 0, besides the changes there are."""
    require(0 < len(params.sites) <= MAX_SITES, "sites", len(params.sites), f"1 to {MAX_SITES} of them")
    trace = traces.trace(params.forward_pass)
    measure, counts, final = _measure(trace), _counts(trace), f"{trace.prefix}final"
    before = measure(_final(trace))[counts].mean()

    def work() -> list[float | None]:
        grown = []
        for site in params.sites:
            with edit(trace.model, {site: 0.0}), record(trace.model, final, stop=True) as seen:
                trace.model(*trace.inputs)
            grown.append(serialization.finite_or_none(measure(seen[final][0])[counts].mean() - before))
        return grown

    return {"before": serialization.finite_or_none(before), "loss_increase": trace.run(work)}


@dataclass(frozen=True)
class ComparePredictions(Settings):
    """What is said at a position before and after the changes?"""

    forward_pass: ForwardPass = field(default_factory=ForwardPass)
    position: int = 0
    show: int = 8


def compare_predictions(traces: TraceCache, params: ComparePredictions) -> JsonDict:
    """Return what is likeliest before or after, with both probabilities, and how far they are apart."""
    trace = traces.trace(params.forward_pass)
    length = len(trace.ids)
    require(0 <= params.position < length, "position", params.position, f"within 0 and {length - 1}")
    before, after = (_logs(one, params.position) for one in (traces.trace(params.forward_pass.unedited), trace))
    count = min(max(1, params.show), len(before))
    top = [*before.topk(count).indices.tolist(), *after.topk(count).indices.tolist()]
    shown = list(dict.fromkeys(top))
    return {
        "candidates": [
            {**name, "before": float(before[one].exp()), "after": float(after[one].exp())}
            for one, name in zip(shown, describe_outputs(trace, shown), strict=True)
        ],
        "divergence": serialization.finite_or_none(
            (before.exp() * (before - after)).sum()
        ),  # of before from after, in nats
    }


@dataclass(frozen=True)
class PatchEach(Settings):
    """What would be said at a position, were each of some sites alone as on the other text?"""

    forward_pass: ForwardPass = field(default_factory=ForwardPass)
    sites: tuple[str, ...] = ()
    position: int = 0


def patch_each(traces: TraceCache, params: PatchEach) -> JsonDict:
    """Return how much of the way to the other text's answer each patch goes: 0 is none, 1 is all of it.

    It is measured in the logit of what the other text finds likeliest there, less that of what this one does.
    """
    require(0 < len(params.sites) <= MAX_SITES, "sites", len(params.sites), f"1 to {MAX_SITES} of them")
    if params.forward_pass.patch_from is None:
        raise InputError("there is no other text to patch from; write one.")
    here, there = traces.trace(params.forward_pass.without_patches()), traces.trace(params.forward_pass.patch_pass)
    length = min(len(here.ids), len(there.ids))
    require(
        0 <= params.position < length,
        "position",
        params.position,
        f"within 0 and {length - 1}, as both texts have it",
    )
    logits = [logits_at(one, params.position) for one in (here, there)]
    old, new = (int(one.argmax()) for one in logits)
    if old == new:
        (said,) = describe_outputs(here, [old])
        raise InputError(
            f"on both texts {said['text']!r} is the likeliest there; choose another token, or write a text that "
            "leads elsewhere."
        )
    before, after = (float(one[new] - one[old]) for one in logits)

    def read() -> Recording:
        with record(there.model, *params.sites, stop=True) as seen:
            there.model(*there.inputs)
        return seen

    values = there.run(read)
    final = f"{here.prefix}final"

    def work() -> list[float | None]:
        effects = []
        for site in params.sites:
            put = partial(check_patch_shape, site, values[site])
            with edit(here.model, {site: put}), record(here.model, final, stop=True) as seen:
                here.model(*here.inputs)
            said = logits_at(here, params.position, seen[final][0])
            effects.append(serialization.finite_or_none((float(said[new] - said[old]) - before) / (after - before)))
        return effects

    effects = here.run(work)
    names = describe_outputs(here, [old, new])
    return {"effect": effects, "here": names[0], "there": names[1], "before": before, "after": after}


def initial_requests(traces: TraceCache, forward_pass: ForwardPass, state: JsonDict) -> list[tuple[str, JsonDict]]:
    """Return what the view asks when it opens."""
    trace, place = traces.trace(forward_pass), state["token"]
    both = [forward_pass.unedited.to_json()] + ([forward_pass.to_json()] if forward_pass.edits else [])
    asks: list[tuple[str, JsonDict]] = [("loss", {"forward_pass": each}) for each in both]
    if not isinstance(trace.model.head, NoHead | Pooler):
        asks.append(
            ("compare_predictions", {"forward_pass": forward_pass.to_json(), "position": place, "show": SHOWN})
        )
    if has_position_logits(trace.model):
        asks += [("lens", {"forward_pass": each, "start": place, "stop": place + 1}) for each in both]
    return asks


def _logs(trace: Trace, position: int) -> Tensor:
    return logits_at(trace, position).log_softmax(-1)


def _final(trace: Trace) -> Tensor:
    return trace.activation(f"{trace.prefix}final")


def _predicts_tokens(trace: Trace) -> bool:
    """Whether what is right is known: the tokens of a text are, labels are not."""
    return isinstance(trace.model.head, LMHead)


def _has_masked_tokens(trace: Trace) -> bool:
    return _predicts_tokens(trace) and isinstance(trace.model, Encoder) and bool(trace.forward_pass.prompt.masked)


def _measure(trace: Trace) -> Callable[[Tensor], Tensor]:
    """Return what makes one number for each position [S] of the last vectors [S, D]."""
    if not _predicts_tokens(trace):
        before = _final(trace.traces.trace(trace.forward_pass.unedited))
        return lambda final: (final - before).norm(dim=-1) / before.norm(dim=-1)
    targets = residual_stream.targets_of(trace)

    def measured(final: Tensor) -> Tensor:
        with eval_mode(trace.model):
            return residual_stream.logit_lens_at(trace, final, targets).loss

    return measured


def _counts(trace: Trace) -> Tensor:
    """Return which positions the mean is taken over [S]: those that hide a token, or where none does, all."""
    targets = residual_stream.targets_of(trace)
    counts = targets >= 0 if _predicts_tokens(trace) else torch.ones_like(targets, dtype=torch.bool)
    if _has_masked_tokens(trace):
        places = torch.arange(len(counts), device=counts.device)
        counts = counts & torch.isin(places, places.new_tensor(trace.forward_pass.prompt.masked))
    return counts
