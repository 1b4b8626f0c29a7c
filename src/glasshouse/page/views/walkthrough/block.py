"""Steps of one layer: its sublayers with norms and residual connections."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from glasshouse.config import JsonDict
from glasshouse.inspection import record, walkthrough
from glasshouse.inspection.sites import PARTS, parts_of, sublayer_of
from glasshouse.layers.attend.layout import make_layout
from glasshouse.layers.context import Context
from glasshouse.page import serialization
from glasshouse.page.views.walkthrough.card import card, norm_card, step_card
from glasshouse.page.views.walkthrough.token_path import TokenPath, memory_of


def block_steps(path: TokenPath) -> Iterator[JsonDict]:
    """Yield the steps of the selected layer."""
    recorded = _inside(path)
    x = recorded["resid_pre"]
    if path.layer > 0:
        yield card("layers", "arrive", path.site("resid_pre"), y=x)
    for part in parts_of(path.block):
        yield from _sublayer(path, part, x, recorded)
        x = recorded[PARTS[part][1]]


def _inside(path: TokenPath) -> dict[str, Tensor]:
    """Return the activations of the layer at the position; its block is run again on its input."""
    trace = path.trace
    wanted = ["resid_pre"]
    for part in parts_of(path.block):
        inner = (site.name for site in sublayer_of(path.block, part).sites())
        wanted += [name for name in inner if name not in path.kernel_sites]
        wanted += PARTS[part]
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


def _sublayer(path: TokenPath, part: str, x: Tensor, recorded: dict[str, Tensor]) -> Iterator[JsonDict]:
    """Yield the steps of a sublayer, its norms, and the residual connection."""
    residual, order = path.block.get_submodule(part), path.spec.norm_placement
    layer = sublayer_of(path.block, part)
    added_site, after_site = PARTS[part]
    added, after = recorded[added_site], recorded[after_site]
    given = x
    if order not in ("post", "output"):
        read = recorded["resid_pre"] if order == "parallel" else x
        given = residual.norm(read)
        yield norm_card(f"{part}.norm", residual.norm, read, given)
    steps = walkthrough.steps(layer, _token(path, part, given, recorded))
    *most, last = (step_card(part, step, _step_site(path, step)) for step in steps)
    yield from most
    if order in ("sandwich", "output"):  # the output norm follows the layer
        yield last
        made = layer.residual_projection(recorded[layer.residual_input].flatten())
        yield norm_card(f"{part}.norm_out", residual.norm_out, made, added, path.site(added_site))
    else:
        yield last | {"y": serialization.encode_tensor(added), "site": path.site(added_site)}
    if order == "post":
        total = x + added
        yield card(f"{part}.add", "add", x=x, added=added, y=total)
        yield norm_card(f"{part}.norm", residual.norm, total, after, path.site(after_site))
    else:
        yield card(f"{part}.add", "add", path.site(after_site), x=x, added=added, y=after)


def _token(path: TokenPath, part: str, x: Tensor, recorded: dict[str, Tensor]) -> walkthrough.TokenView:
    """Return the selected position as the steps of a layer need it."""
    return walkthrough.TokenView(
        x=x,
        ids=path.ids,
        seen=lambda name: path.from_kernel(name) if name in path.kernel_sites else recorded[name],
        index=path.position,
        head=path.head,
        positions=make_layout(path.ids).positions,
        encoding=path.stack.position_of(path.layer),
        causal=path.stack.causal,
        memory=memory_of(path.trace) if part == "cross" else None,
    )


def _step_site(path: TokenPath, step: walkthrough.WalkthroughStep) -> str:
    """Return the name of the site of a step, with its index; "" if it has none."""
    index = ", ".join(f"{axis}={number}" for axis, number in step.index.items())
    return f"{path.prefix}{step.site}.{path.layer}[{index}]" if step.site else ""
