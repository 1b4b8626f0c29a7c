"""Endpoints for the overview: what every head and feed-forward layer adds to the residual stream, and from where."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from glasshouse.config import JsonDict, Settings, require
from glasshouse.inspection.parameters.linear_weights import weight_and_bias
from glasshouse.inspection.sites import PARTS, parts_of, sites, sublayer_of
from glasshouse.layers.attend.kernel import repeat_kv
from glasshouse.layers.sublayer import Sublayer
from glasshouse.models import Seq2Seq
from glasshouse.models.heads import LMHead, NoHead, Pooler
from glasshouse.page import serialization
from glasshouse.page.forward_pass import ForwardPass
from glasshouse.page.trace import Trace, TraceCache
from glasshouse.page.view import Endpoint, View
from glasshouse.page.views.attention.layer_map import LayerParams

WINDOW = 64  # positions of a stack that are drawn at once
CANDIDATES = 6  # as in static/views/overview/: tokens that are drawn at the top
PATTERNS = {"attention": "pattern", "cross": "cross_pattern"}  # the site of a part's attention weights


@dataclass(frozen=True)
class Overview(Settings):
    """Parameters: the forward pass, and the first position that is drawn of the text or the target."""

    forward_pass: ForwardPass = field(default_factory=ForwardPass)
    start: int = 0


def overview(traces: TraceCache, params: Overview) -> JsonDict:
    """Return, for each stack, how much each part adds at each position, relative to the stream that it is added to.

    Of a head, `source` is the key of which it moves most: the largest product of an attention weight and the norm
    of the key's value after the output projection, which a weight alone does not tell (Kobayashi et al. 2020).
    """
    trace = traces.trace(params.forward_pass)
    length = len(trace.ids)
    require(0 <= params.start < length, "start", params.start, f"within 0 and {length - 1}")
    names = ["encoder", "decoder"] if isinstance(trace.model, Seq2Seq) else [trace.model.spec.kind]
    stacks = []
    for name in names:
        start = params.start if name == names[-1] else 0
        stacks.append(_describe_stack(trace, name, f"{name}." if len(names) > 1 else "", start))
    return {"stacks": stacks}


def _describe_stack(trace: Trace, name: str, prefix: str, start: int) -> JsonDict:
    stack = getattr(trace.model, name) if prefix else trace.stack
    inputs = trace.inputs[0 if name == "encoder" else -1]
    stop = min(start + WINDOW, inputs.shape[1])
    places = slice(start, stop)
    wanted = [f"{prefix}embed"]
    for layer, block in enumerate(stack.blocks):
        wanted += [f"{prefix}{site}.{layer}" for part in parts_of(block) for site in PARTS[part]]
    seen = trace.activations(wanted)
    norms = {one: value[places].float().norm(dim=-1) for one, value in seen.items()}
    added: dict[str, list[Tensor]] = {part: [] for part in parts_of(stack.blocks[0])}
    heads: dict[str, list[_Moved]] = {part: [] for part in added if part in PATTERNS}
    stream = [norms[f"{prefix}embed"]]
    for layer, block in enumerate(stack.blocks):
        before = stream[-1]
        for part in added:
            out, after = (norms[f"{prefix}{site}.{layer}"] for site in PARTS[part])
            added[part].append(out / before)
            if part in heads:
                site = f"{prefix}{PATTERNS[part]}.{layer}"
                heads[part].append(_moved(trace, site, sublayer_of(block, part), places, out, before))
            before = after
        stream.append(before)
    return {
        "name": name,
        "start": start,
        "stop": stop,
        "of": inputs.shape[1],
        "stream": serialization.encode_tensor(torch.stack(stream)),
        "added": {part: serialization.encode_tensor(torch.stack(each)) for part, each in added.items()},
        "heads": {part: _Moved.encode(each) for part, each in heads.items()},
    }


@dataclass(frozen=True)
class _Moved:
    """What each head of a layer adds at some queries, [head, query]."""

    norm: Tensor  # relative to the stream that it is added to
    source: Tensor  # the key of which most comes
    weight: Tensor  # the attention weight of that key

    @staticmethod
    def encode(layers: list[_Moved]) -> JsonDict:
        """Return tensors [layer, head, query]."""
        return {
            name: serialization.encode_tensor(torch.stack([getattr(one, name).float() for one in layers]))
            for name in ("norm", "source", "weight")
        }


def _moved(trace: Trace, site: str, layer: Sublayer, queries: slice, out: Tensor, stream: Tensor) -> _Moved:
    """Return what the heads of a layer add, whose output and the stream before it have these norms [query]."""
    found = trace.attention_map(site)
    weights = found.weights(query=queries)[0]
    values = _projected_values(found.kernel.v[0], layer, found.shape[1])
    _, bias = weight_and_bias(layer.residual_projection, weights)
    amounts = weights * values.norm(dim=-1)[:, None]
    source = amounts.argmax(-1)
    outputs = weights @ values
    total = (outputs.sum(0) + bias).norm(dim=-1)  # which a norm after the heads scales to `out`
    return _Moved(
        norm=outputs.norm(dim=-1) * (out / total / stream),
        source=source,
        weight=weights.gather(-1, source[..., None])[..., 0],
    )


def _projected_values(v: Tensor, layer: Sublayer, n_heads: int) -> Tensor:
    """Return the values [head, key, d_model] as they are added to the stream: after a head's output projection."""
    exact = torch.promote_types(v.dtype, torch.float32)
    weight, _ = weight_and_bias(layer.residual_projection, v.to(exact))
    by_head = weight.view(len(weight), n_heads, -1).permute(1, 2, 0)  # [head, d_head, d_model]
    return repeat_kv(v[None].to(exact), n_heads)[0] @ by_head


@dataclass(frozen=True)
class LayerHeads(LayerParams):
    """Parameters of one layer at one position."""

    position: int = 0


def layer_heads(traces: TraceCache, params: LayerHeads) -> JsonDict:
    """Return the attention weight of each key in each head [head, key], and the norm of what is moved from it."""
    trace = traces.trace(params.forward_pass)
    found = params.map(traces)
    _, n_heads, queries, _ = found.shape
    require(0 <= params.position < queries, "position", params.position, f"within 0 and {queries - 1}")
    weights = found.weights(query=params.position)[0]
    part = next(part for part, site in PATTERNS.items() if params.attention.rpartition(".")[2] == site)
    stack = getattr(trace.model, params.attention.partition(".")[0]) if "." in params.attention else trace.stack
    values = _projected_values(found.kernel.v[0], sublayer_of(stack.blocks[params.layer], part), n_heads)
    return {
        "weights": serialization.encode_tensor(weights),
        "moved": serialization.encode_tensor(weights * values.norm(dim=-1)),
    }


def initial_requests(traces: TraceCache, forward_pass: ForwardPass, state: JsonDict) -> list[tuple[str, JsonDict]]:
    """Return the requests that the view sends when opened, and those of each layer."""
    trace = traces.trace(forward_pass)
    here: JsonDict = {"forward_pass": forward_pass.to_json()}
    position, length = state["token"], len(trace.ids)
    start = max(0, min(position - position % WINDOW, length - WINDOW))
    requests = [("overview", {**here, "start": start})]
    if not isinstance(trace.model.head, NoHead | Pooler):
        requests.append(("next", {**here, "position": position, "show": CANDIDATES}))
    if isinstance(trace.model.head, LMHead):
        requests.append(("lens", {**here, "start": position, "stop": position + 1, "top_k": 1}))
        requests.append(("logit_attribution", {**here, "position": position}))
    for name, site in sites(trace.model).items():
        if site.hook_point == "pattern" and not name.startswith("encoder."):
            attention, _, layer = name.rpartition(".")
            body = {**here, "attention": attention, "layer": int(layer), "position": position}
            requests.append(("layer_heads", body))
    return requests


VIEW = View(
    name="overview",
    title="Overview",
    endpoints={
        "overview": Endpoint(Overview, overview),
        "layer_heads": Endpoint(LayerHeads, layer_heads),
    },
    initial_requests=initial_requests,
    state_keys=("zoom",),
)
