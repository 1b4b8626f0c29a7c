"""Endpoints for interventions: loss under edits, ablation of each component, and activation patching."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from glasshouse.config import JsonDict, Settings, require
from glasshouse.errors import InputError
from glasshouse.inspection import Recording, attribution_patching, edit, record
from glasshouse.inspection.inputs.forward_pass import eval_mode
from glasshouse.inspection.logit_lens import has_position_logits
from glasshouse.inspection.patching.activation_patching import layers_at
from glasshouse.models import Encoder
from glasshouse.models.heads import LMHead, NoHead, Pooler
from glasshouse.page import serialization
from glasshouse.page.forward_pass import ForwardPass, PagePrompt
from glasshouse.page.trace import Trace, TraceCache, check_patch_shape
from glasshouse.page.view import Endpoint, View
from glasshouse.page.views import residual_stream
from glasshouse.page.views.next_token import describe_outputs, logits_at

MAX_SITES = 128  # per request
MAX_ESTIMATED = 1024  # tokens of a text of which a gradient is taken
STEPS = 5  # of the gradient between both texts, which alone misses what saturates
SHOWN = 8  # candidates, as in static/views/interventions/predictions.js


@dataclass(frozen=True)
class Loss(Settings):
    """Parameters of the loss per token."""

    forward_pass: ForwardPass = field(default_factory=ForwardPass)


def loss(traces: TraceCache, params: Loss) -> JsonDict:
    """Return the loss at each position in nats, NaN where there is no target, and its mean.

    For heads that predict no tokens it is the relative change of the final hidden states instead.
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
    """Parameters of an ablation sweep over sites such as z.3[head=5]."""

    forward_pass: ForwardPass = field(default_factory=ForwardPass)
    sites: tuple[str, ...] = ()


def ablate_each(traces: TraceCache, params: AblateEach) -> JsonDict:
    """Return the increase in mean loss when each site is zero-ablated, on top of the current edits."""
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
    """Parameters of a comparison of predictions before and after the edits."""

    forward_pass: ForwardPass = field(default_factory=ForwardPass)
    position: int = 0
    show: int = 8


def compare_predictions(traces: TraceCache, params: ComparePredictions) -> JsonDict:
    """Return the most likely outputs before and after, with both probabilities and the KL divergence."""
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
        ),  # KL(before || after) in nats
    }


@dataclass(frozen=True)
class PatchEach(Settings):
    """Parameters of a patching sweep over sites."""

    forward_pass: ForwardPass = field(default_factory=ForwardPass)
    sites: tuple[str, ...] = ()
    position: int = 0


def patch_each(traces: TraceCache, params: PatchEach) -> JsonDict:
    """Return the normalized effect of patching each site: 0 is the unpatched run, 1 the other prompt.

    The metric is the logit difference between the top predictions of the other and of this prompt.
    """
    require(0 < len(params.sites) <= MAX_SITES, "sites", len(params.sites), f"1 to {MAX_SITES} of them")
    here, there = _pair(traces, params.forward_pass)
    old, new, before, after = _targets(here, there, params.position)

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


@dataclass(frozen=True)
class EstimatePatches(Settings):
    """Parameters of the estimate for a site of all layers, such as z; patches come from another prompt."""

    forward_pass: ForwardPass = field(default_factory=ForwardPass)
    patch_from: PagePrompt | None = None
    site: str = "resid_post"
    position: int = 0


def estimate_patches(traces: TraceCache, params: EstimatePatches) -> JsonDict:
    """Estimate the effects of `patch_each` at all positions of all layers at once, and of all heads, by gradients."""
    here, there = _pair(traces, replace(params.forward_pass.unedited, patch_from=params.patch_from))
    longest = max(one.shape[1] for each in (here, there) for one in each.inputs)
    if longest > MAX_ESTIMATED:
        raise InputError(f"the text has {longest:,} tokens, but the limit of an estimate is {MAX_ESTIMATED:,}.")
    old, new, _, _ = _targets(here, there, params.position)
    axes = [one for one in ("head", "position") if one in layers_at(here.model, params.site)[0].axes]

    def metric(logits: Tensor) -> Tensor:
        said = logits[0] if logits.dim() == 2 else logits[0, params.position]  # of the text, or of each token
        return said[new] - said[old]

    found = here.run(
        lambda: attribution_patching(
            here.model, here.inputs, there.inputs, params.site, axis=axes, metric=metric, steps=STEPS
        )
    )
    names = describe_outputs(here, [old, new])
    return {"effect": serialization.encode_tensor(found.effect), "here": names[0], "there": names[1]}


def _pair(traces: TraceCache, forward_pass: ForwardPass) -> tuple[Trace, Trace]:
    """Return the trace that patches go into, and the one that they come from."""
    if forward_pass.patch_from is None:
        raise InputError("there is no second text to patch from; enter one.")
    return traces.trace(forward_pass.without_patches()), traces.trace(forward_pass.patch_pass)


def _targets(here: Trace, there: Trace, position: int) -> tuple[int, int, float, float]:
    """Return the top predictions here and there, and by how much the second's logit is larger on either text."""
    length = min(len(here.ids), len(there.ids))
    require(0 <= position < length, "position", position, f"within 0 and {length - 1}, the positions of both texts")
    # By one row each, as of a patched run: a patch that changes nothing has an effect of exactly 0.
    logits = [logits_at(one, position, _final(one)) for one in (here, there)]
    old, new = (int(one.argmax()) for one in logits)
    if old == new:
        (said,) = describe_outputs(here, [old])
        raise InputError(
            f"both texts predict {said['text']!r} there; choose another position, or a text with another prediction."
        )
    before, after = (float(one[new] - one[old]) for one in logits)
    return old, new, before, after


def initial_requests(traces: TraceCache, forward_pass: ForwardPass, state: JsonDict) -> list[tuple[str, JsonDict]]:
    """Return the requests that the view sends when opened."""
    trace, place = traces.trace(forward_pass), state["token"]
    both = [forward_pass.unedited.to_json()] + ([forward_pass.to_json()] if forward_pass.edits else [])
    requests: list[tuple[str, JsonDict]] = [("loss", {"forward_pass": each}) for each in both]
    if not isinstance(trace.model.head, NoHead | Pooler):
        requests.append(
            ("compare_predictions", {"forward_pass": forward_pass.to_json(), "position": place, "show": SHOWN})
        )
    if has_position_logits(trace.model):
        requests += [("lens", {"forward_pass": each, "start": place, "stop": place + 1}) for each in both]
    return requests


def _logs(trace: Trace, position: int) -> Tensor:
    return logits_at(trace, position).log_softmax(-1)


def _final(trace: Trace) -> Tensor:
    return trace.activation(f"{trace.prefix}final")


def _predicts_tokens(trace: Trace) -> bool:
    """Whether the head predicts tokens, so that targets are known."""
    return isinstance(trace.model.head, LMHead)


def _has_masked_tokens(trace: Trace) -> bool:
    return _predicts_tokens(trace) and isinstance(trace.model, Encoder) and bool(trace.forward_pass.prompt.masked)


def _measure(trace: Trace) -> Callable[[Tensor], Tensor]:
    """Return a function from final hidden states [S, D] to one number per position [S]."""
    if not _predicts_tokens(trace):
        before = _final(trace.traces.trace(trace.forward_pass.unedited))
        return lambda final: (final - before).norm(dim=-1) / before.norm(dim=-1)
    targets = residual_stream.target_token_ids(trace)

    def measured(final: Tensor) -> Tensor:
        with eval_mode(trace.model):
            return residual_stream.logit_lens_at(trace, final, targets).loss

    return measured


def _counts(trace: Trace) -> Tensor:
    """Return which positions count in the mean [S]: the masked ones, or all if none is masked."""
    targets = residual_stream.target_token_ids(trace)
    counts = targets >= 0 if _predicts_tokens(trace) else torch.ones_like(targets, dtype=torch.bool)
    if _has_masked_tokens(trace):
        places = torch.arange(len(counts), device=counts.device)
        counts = counts & torch.isin(places, places.new_tensor(trace.forward_pass.prompt.masked))
    return counts


VIEW = View(
    name="interventions",
    title="Interventions",
    endpoints={
        "loss": Endpoint(Loss, loss),
        "ablate_each": Endpoint(AblateEach, ablate_each),
        "compare_predictions": Endpoint(ComparePredictions, compare_predictions),
        "patch_each": Endpoint(PatchEach, patch_each),
        "estimate_patches": Endpoint(EstimatePatches, estimate_patches),
    },
    initial_requests=initial_requests,
    state_keys=("edit", "site", "stack"),
    applies=lambda loader: not loader.served,  # its sweeps would hold up the requests of others
)
