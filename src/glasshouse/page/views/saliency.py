"""Endpoint for saliency: how much each token moved one prediction."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from glasshouse.config import JsonDict, Settings, require
from glasshouse.inspection import Saliency, saliency
from glasshouse.inspection.logit_lens import has_position_logits
from glasshouse.inspection.saliency import Method
from glasshouse.models import count_parameters
from glasshouse.models.heads import LMHead
from glasshouse.page import serialization
from glasshouse.page.forward_pass import ForwardPass
from glasshouse.page.trace import Trace, TraceCache
from glasshouse.page.views.next_token import describe_outputs, logits_at

# Steps of integrated gradients: as many as fit in about a second of two cores, within limits.
MIN_STEPS, MAX_STEPS = 8, 100
WORK = 2e10  # parameters x tokens x steps


@dataclass(frozen=True)
class TokenSaliency(Settings):
    """Parameters of saliency: of the top prediction, of a given token or label, or of one token over another."""

    forward_pass: ForwardPass = field(default_factory=ForwardPass)
    position: int = 0
    method: Method = "integrated_gradients"
    output: int | None = None  # a token, or a label
    incorrect_token: int | None = None


def token_saliency(traces: TraceCache, params: TokenSaliency) -> JsonDict:
    """Return how much each token moved a logit: of the text, or of source and target."""
    trace = traces.trace(params.forward_pass)
    length = len(trace.ids)
    require(0 <= params.position < length, "position", params.position, f"within 0 and {length - 1}")
    output = params.output
    if output is None:
        output = int(logits_at(trace, params.position).argmax())
    incorrect = {} if params.incorrect_token is None else {"incorrect_token": params.incorrect_token}
    options: dict[str, Any] = {
        "method": params.method,
        "steps": _steps(trace),
        ("token" if isinstance(trace.model.head, LMHead) else "label"): output,
        **({"positions": [params.position]} if has_position_logits(trace.model) else {}),
        **incorrect,
    }
    found: Saliency = trace.run(lambda: saliency(trace.model, *trace.inputs, **options))
    gap, start = found.completeness_gap, found.baseline_value
    return {
        "output": describe_outputs(trace, [output])[0],
        "incorrect_token": describe_outputs(trace, incorrect.values())[0] if incorrect else None,
        "value": float(found.target_value),
        "baseline": None if start is None else float(start),
        "gap": None if gap is None else float(gap),
        "steps": options["steps"],
        "scores": serialization.encode_tensor(found.scores[0, 0]),
        "source_scores": None
        if found.source_scores is None
        else serialization.encode_tensor(found.source_scores[0, 0]),
    }


def _steps(trace: Trace) -> int:
    """Return the steps of integrated gradients, fewer for a large model and a long text."""
    tokens = sum(one.shape[1] for one in trace.inputs)
    return int(min(MAX_STEPS, max(MIN_STEPS, WORK / (count_parameters(trace.model.spec) * tokens))))


def saliency_request(forward_pass: ForwardPass, state: JsonDict, method: str) -> tuple[str, JsonDict]:
    """Return the request of a method at the selected token, as the page sends it."""
    chosen = {"output": state.get("tokens_output"), "incorrect_token": state.get("tokens_incorrect_token")}
    given = {name: value for name, value in chosen.items() if value is not None}
    body: JsonDict = {"forward_pass": forward_pass.to_json(), "position": state["token"], "method": method}
    return "token_saliency", {**body, **given}
