"""A view of the page: how far each head is open."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from glasshouse.config import JsonDict, Settings
from glasshouse.page.forward_pass import ForwardPass
from glasshouse.page.trace import TraceCache
from glasshouse.page.view import Endpoint, View


@dataclass(frozen=True)
class Gates(Settings):
    """Parameters of the request."""

    forward_pass: ForwardPass = field(default_factory=ForwardPass)


def gates(traces: TraceCache, params: Gates) -> JsonDict:
    """Return the mean norm of every head after its gate, as a fraction of the one before: layers of heads."""
    trace = traces.trace(params.forward_pass)
    layers = []
    for layer in range(trace.model.spec.n_layers):
        before, after = (trace.activation(f"{site}.{layer}").norm(dim=-1).mean(-1) for site in ("z", "gated_z"))
        layers.append((after / before).tolist())
    return {"layers": layers}


def initial_requests(traces: TraceCache, forward_pass: ForwardPass, state: JsonDict) -> list[tuple[str, JsonDict]]:
    """Return the request that the view sends when it is opened, for pages that are saved."""
    return [("gates", {"forward_pass": forward_pass.to_json()})]


VIEW = View(
    name="gates",
    title="Gates",
    endpoints={"gates": Endpoint(Gates, gates)},
    initial_requests=initial_requests,
    applies=lambda loader: loader.get("").model.spec.attention.kind == "gated",
    static=Path(__file__).parent / "static",
)
