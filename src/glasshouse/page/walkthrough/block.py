"""Steps of one layer: its sublayers with norms and residual connections."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from glasshouse.config import JsonDict
from glasshouse.inspection import record
from glasshouse.layers.context import Context
from glasshouse.layers.layout import make_layout
from glasshouse.page import serialization
from glasshouse.page.walkthrough.attention import attention_steps, mark_of
from glasshouse.page.walkthrough.card import card, linear_card, norm_card
from glasshouse.page.walkthrough.token_path import TokenPath, memory_of

STRONGEST = 12  # neurons
# The output site of each sublayer, and the residual stream after it.
ADDED = {"attention": "attn_out", "cross": "cross_attn_out", "feedforward": "ffn_out"}
AFTER = {"attention": "resid_mid", "cross": "cross_resid_mid", "feedforward": "resid_post"}


def block_steps(path: TokenPath) -> Iterator[JsonDict]:
    """Yield the steps of the selected layer."""
    seen = _inside(path)
    x = seen["resid_pre"]
    if path.layer > 0:
        yield card("layers", "arrive", path.site("resid_pre"), y=x)
    for part in ADDED:
        if hasattr(path.block, part):
            yield from _sublayer(path, part, x, seen)
            x = seen[AFTER[part]]


def _inside(path: TokenPath) -> dict[str, Tensor]:
    """Return the activations of the layer at the position; its block is run again on its input."""
    trace, cross = path.trace, hasattr(path.block, "cross")
    wanted = ["resid_pre", "z", "attn_out", "resid_mid", "hidden", "ffn_out", "resid_post"]
    wanted += ["cross_z", "cross_attn_out", "cross_resid_mid"] if cross else []
    names = {name: path.site(name) for name in wanted}
    kept = {name: trace.traces.get(trace.forward_pass, site) for name, site in names.items()}
    if any(value is None for value in kept.values()):
        x = path.residual(path.layer - 1)[None]
        context = _context(path, x.dtype)

        def call() -> dict[str, Tensor]:
            with record(trace.model, *names.values()) as seen:
                path.block(x, context)
            return {name: seen[site] for name, site in names.items()}

        found = trace.run(call)
        for name, value in found.items():
            trace.traces.put(trace.forward_pass, names[name], value)
        return {name: value[0] for name, value in found.items()}
    return {name: value[0] for name, value in kept.items() if isinstance(value, Tensor)}


def _context(path: TokenPath, dtype: torch.dtype) -> Context:
    """Return the context of the layers, as the stack itself makes it."""
    layout = make_layout(path.ids)
    if not hasattr(path.block, "cross"):
        return path.stack.context(layout, dtype)
    source = make_layout(path.trace.inputs[0])
    return path.stack.context(layout, dtype, memory=memory_of(path.trace)[None], source=source)


def _sublayer(path: TokenPath, part: str, x: Tensor, seen: dict[str, Tensor]) -> Iterator[JsonDict]:
    """Yield the steps of a sublayer, its norms, and the residual connection."""
    residual, order = path.block.get_submodule(part), path.spec.norm_placement
    added, after = seen[ADDED[part]], seen[AFTER[part]]
    given = x
    if order != "post":
        given = residual.norm(x)
        yield norm_card(f"{part}.norm", residual.norm, x, given)
    inner = feedforward_steps if part == "feedforward" else attention_steps
    *most, last = inner(path, part, given, seen)
    yield from most
    if order == "sandwich":  # the output norm follows the layer
        yield last
        made = _raw(residual.layer, part, seen)
        yield norm_card(f"{part}.norm_out", residual.norm_out, made, added, path.site(ADDED[part]))
    else:
        yield last | {"y": serialization.encode_tensor(added), "site": path.site(ADDED[part])}
    if order == "post":
        total = x + added
        yield card(f"{part}.add", "add", x=x, added=added, y=total)
        yield norm_card(f"{part}.norm", residual.norm, total, after, path.site(AFTER[part]))
    else:
        yield card(f"{part}.add", "add", path.site(AFTER[part]), x=x, added=added, y=after)


def _raw(layer: Any, part: str, seen: dict[str, Tensor]) -> Tensor:  # noqa: ANN401
    """Return the output of a layer before its norm."""
    made: Tensor = (
        layer.down(seen["hidden"]) if part == "feedforward" else layer.out(seen[f"{mark_of(part)}z"].flatten())
    )
    return made


def feedforward_steps(path: TokenPath, part: str, x: Tensor, seen: dict[str, Tensor]) -> Iterator[JsonDict]:
    """Yield the steps of the feed-forward layer."""
    layer, hidden = path.block.get_submodule(part).layer, seen["hidden"]
    up = layer.up(x)
    gate = layer.gate(x) if hasattr(layer, "gate") else None
    if gate is not None:
        yield linear_card(part, "gate", layer.gate, x, gate)
    yield linear_card(part, "up", layer.up, x, up)
    strongest = hidden.abs().topk(min(STRONGEST, len(hidden))).indices.tolist()
    told: JsonDict = {} if gate is None else {"gate": gate}
    kind = path.spec.feedforward
    how = kind.kind + ("_tanh" if getattr(kind, "tanh", False) else "")
    yield card(part, "activate", path.site("hidden"), x=up, y=hidden, how=how, strongest=strongest, **told)
    yield linear_card(part, "down", layer.down, hidden, layer.down(hidden))
