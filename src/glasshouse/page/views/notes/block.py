"""Figures of the block: B1 to B5, B7 and B8."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from glasshouse import models, spec
from glasshouse.config import JsonDict
from glasshouse.inspection import record
from glasshouse.layers.attend.layout import make_layout
from glasshouse.layers.feedforward import GatedFeedForward
from glasshouse.layers.norm import LayerNorm
from glasshouse.layers.residual import NoNorm, OutputNorm, PostNorm, PreNorm, SandwichNorm
from glasshouse.models import Decoder
from glasshouse.page.views.notes.figure import (
    WIDE,
    Control,
    Figure,
    Scene,
    bars,
    facts,
    generator,
    initialised,
    largest_difference,
    lines,
    matrix,
    normed_output,
    sentence,
    shapes,
    table,
)

TOKEN = ("pass", "layer", "position")
FORMULAS = {
    NoNorm: "x + f(x)",
    PreNorm: "x + f(norm(x))",
    PostNorm: "norm(x + f(x))",
    SandwichNorm: "x + norm(f(norm(x)))",
    OutputNorm: "x + norm(f(x))",
}


def placement(scene: Scene) -> list[JsonDict]:
    """B1."""
    part: Any = scene.stack.blocks[scene.layer].attention
    x, added = scene.stream(scene.layer), scene.site("attn_out")
    recorded = scene.site("resid_mid")
    post = isinstance(part, PostNorm)
    weight = next(part.parameters())
    both = part.norm((x + added).to(weight.dtype)).float() if post else x + added
    other = x + added if post else LayerNorm(x.shape[1]).to(x.device)(x + added)
    place = scene.place
    formula = next(said for kind, said in FORMULAS.items() if isinstance(part, kind))
    rows: list[list[str | float]] = [
        ["x, before", float(x[place].norm())],
        ["f, what attention adds", float(added[place].norm())],
        [f"{formula}, after", float(both[place].norm())],
        ["x + f, without the norm" if post else "norm(x + f), of the same f", float(other[place].norm())],
    ]
    return [
        facts(("this model", formula), ("layer", scene.layer)),
        table("norms of this token's vector", ["vector", "norm"], rows),
        matrix(
            f"the first {min(WIDE, x.shape[1])} coordinates",
            torch.stack([x[place], added[place], both[place]])[:, :WIDE],
            rows=["x", "f", "after"],
            signed=True,
        ),
        facts(("largest difference from gh.record", largest_difference(both, recorded))),
    ]


def layer_norm(scene: Scene) -> list[JsonDict]:
    """B2."""
    x = scene.stream(scene.layer)[scene.place].double()
    scaled = x * scene.value

    def normed(v: Tensor) -> Tensor:
        return (v - v.mean()) / (v.var(correction=0) + 1e-5).sqrt()

    def row(name: str, v: Tensor) -> list[str | float]:
        return [name, float(v.mean()), float(v.var(correction=0)), float(v.norm()), float(v.abs().max())]

    y, again = normed(x), normed(scaled)
    module = F.layer_norm(scaled, scaled.shape, eps=1e-5)
    return [
        table(
            "before and after, without gain and shift",
            ["vector", "mean", "variance", "norm", "largest"],
            [row("x", x), row(f"{scene.value:g} x", scaled), row("layer norm of it", again)],
        ),
        matrix(
            f"the first {min(WIDE, len(x))} coordinates, each vector by its largest",
            torch.stack([scaled / scaled.abs().max().clamp(min=1e-9), again / again.abs().max()])[:, :WIDE],
            rows=["x", "normed"],
            signed=True,
        ),
        facts(
            ("sqrt(D)", math.sqrt(len(x))),
            ("norm of the open model", scene.model.spec.norm.kind),
            ("largest change by the factor", largest_difference(y, again)),
            ("largest difference from torch's", largest_difference(again, module)),
        ),
    ]


def feedforward(scene: Scene) -> list[JsonDict]:
    """B3."""
    block: Any = scene.stack.blocks[scene.layer]
    layer = next(m for m in block.feedforward.modules() if hasattr(m, "down"))
    hidden = scene.site("hidden")[scene.place]
    out = normed_output(block.feedforward, layer.down(hidden.to(layer.down.weight.dtype))).float()
    recorded = scene.site("ffn_out")
    s = scene.model.spec
    shown = hidden[: 4 * WIDE].view(-1, WIDE) if len(hidden) >= 4 * WIDE else hidden[None]
    x, up, y = ("x", [1, s.d_model]), [s.d_model, s.d_ff], ("y", [1, s.d_model])
    act = type(layer.activation).__name__
    if isinstance(layer, GatedFeedForward):
        before = [shapes(x, ("gate", up), ("g", [1, s.d_ff])), shapes(x, ("up", up), ("u", [1, s.d_ff]))]
        neurons = f"{act}(g) ⊙ u"
        why = [
            sentence(
                f"Gated: {act}(g) says, neuron by neuron, how much of u passes; it takes the place of ReLU(u). "
                "The line of code below is that of a layer without a gate."
            )
        ]
    else:
        before, neurons, why = [shapes(x, ("up", up), ("u", [1, s.d_ff]))], f"{act}(u)", []
    return [
        *why,
        *before,
        shapes((neurons, [1, s.d_ff]), ("down", [s.d_ff, s.d_model]), y),
        matrix(f"{shown.numel()} of its {len(hidden)} neurons at this token", shown, signed=True),
        facts(
            ("activation", s.feedforward.kind),
            ("neurons that are 0 or below", f"{100 * float((hidden <= 0).float().mean()):.0f}%"),
            ("d_ff / D", s.d_ff / s.d_model),
            ("this token alone, difference from gh.record", largest_difference(out, recorded[scene.place])),
        ),
    ]


def stream_sum(scene: Scene) -> list[JsonDict]:
    """B4."""
    place, depth = scene.place, len(scene.stack.blocks)
    kinds = {"attention": "attn_out", "cross-attention": "cross_attn_out", "feed-forward": "ffn_out"}
    if not scene.trace.prefix:
        del kinds["cross-attention"]
    names = {
        f"{kind} {layer}": f"{scene.trace.prefix}{site}.{layer}"
        for layer in range(depth)
        for kind, site in kinds.items()
    }
    with record(scene.model, *names.values()) as seen:  # all of them in one pass
        scene.trace.run(lambda: scene.model(*scene.trace.inputs))
    parts = [("embedding", scene.stream(0)[place])]
    parts += [(name, seen[site][0, place].float()) for name, site in names.items()]
    total = torch.stack([one for _, one in parts]).sum(0)
    recorded = scene.stream(depth)[place]
    post = isinstance(scene.stack.blocks[0].attention, PostNorm)
    said = " (with norms after the sum it is none: they rescale it)" if post else ""
    return [
        bars(
            "norm of what each part adds to this token's vector", ((name, float(one.norm())) for name, one in parts)
        ),
        facts(
            ("norm of their sum", float(total.norm())),
            ("norm of the stream at the end", float(recorded.norm())),
            (f"largest difference of sum and stream{said}", largest_difference(total, recorded)),
        ),
    ]


def gradients(scene: Scene) -> list[JsonDict]:
    """B5."""
    layers = int(scene.value)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = _deep_decoder(layers)
        ids = torch.randint(model.spec.vocab_size, (2, 17))
    curves = {
        name: [max(one, 1e-300) for one in _block_gradients(model, ids, residual)]
        for name, residual in (("with residual paths", True), ("without", False))
    }
    return [
        sentence(
            "A decoder of width 64 as initialised, with weights of standard deviation 0.02 and no norm before a "
            "sublayer, on random tokens: the gradient of the loss."
        ),
        lines(
            "norm of the gradient of each layer's weights",
            "layers back from the last",
            [(name, [*range(layers)], norms[::-1]) for name, norms in curves.items()],
            log=True,
        ),
        facts(
            ("gradient at the first layer, with residual paths", curves["with residual paths"][0]),
            ("gradient at the first layer, without", curves["without"][0]),
            ("gradient at the last layer, with residual paths", curves["with residual paths"][-1]),
            ("gradient at the last layer, without", curves["without"][-1]),
        ),
    ]


def _deep_decoder(layers: int) -> Decoder:
    sizes: JsonDict = {"vocab_size": 64, "d_model": 64, "n_heads": 4, "n_layers": layers, "max_len": 16}
    s = spec.DecoderSpec(**sizes, feedforward=spec.Relu(), init=spec.Normal(std=0.02))
    return models.build(s, dtype=torch.float64)


def _block_gradients(model: Decoder, ids: Tensor, residual: bool) -> list[float]:
    """Return the norm of the gradient of each block's weights, sublayers composed without their norms."""
    stack: Any = model.stack
    with torch.enable_grad():
        layout = make_layout(ids[:, :-1])
        x = stack.position.embed(model.token_embedding(ids[:, :-1]), layout.positions)
        ctx = stack.context(layout, x.dtype)
        for block in stack.blocks:
            for part in (block.attention, block.feedforward):
                x = part.layer(x, ctx) + (x if residual else 0)
        logits = model.head(stack.norm(x), None, model.token_embedding.table.weight)
        loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        weights = [
            [weight for part in (block.attention, block.feedforward) for weight in part.layer.parameters()]
            for block in stack.blocks
        ]
        found = iter(torch.autograd.grad(loss, [weight for block in weights for weight in block]))
    return [math.sqrt(sum(float(next(found).square().sum()) for _ in block)) for block in weights]


def dropout(scene: Scene) -> list[JsonDict]:
    """B7."""
    x = scene.site("attn_out")[: min(scene.length, 12), :WIDE]
    drop = nn.Dropout(scene.value)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        first, second = drop(x), drop(x)
    drop.eval()
    names = scene.labels[: len(x)]
    return [
        matrix("training: what attention adds, some entries dropped", first, rows=names, signed=True),
        matrix("training again: others", second, rows=names, signed=True),
        matrix("evaluation: all of them", drop(x), rows=names, signed=True),
        facts(
            ("rate", scene.value),
            ("dropped", f"{100 * float((first == 0).float().mean()):.1f}%"),
            ("those kept are scaled by", 1 / (1 - scene.value)),
            ("evaluation, largest difference from no dropout", largest_difference(drop(x), x)),
        ),
    ]


def deep(layers: int, *, norms: bool) -> list[Tensor]:
    """Return the stream by layer of a stack of width 32, with or without norms."""
    sizes: JsonDict = {"d_model": 32, "n_heads": 4, "n_kv_heads": 4, "n_layers": layers, "d_ff": 64, "vocab_size": 32}
    choices: JsonDict = {"position": "none", "norm": "layer", "feedforward": "relu", "qk_norm": False}
    stack = initialised("decoder", torch.float64, **sizes, **choices, init="xavier").stack
    x = torch.randn(1, 8, 32, generator=generator(), dtype=torch.float64)
    ctx = stack.context(make_layout(torch.zeros(1, 8, dtype=torch.long)), x.dtype)
    kept = [x]
    for block in stack.blocks:
        for part in (block.attention, block.feedforward):
            x = x + part.layer(part.norm(x) if norms else x, ctx)
        kept.append(x)
    return kept


def activation_range(scene: Scene) -> list[JsonDict]:
    """B8."""
    depth = len(scene.stack.blocks)
    stream = [scene.stream(layer) for layer in range(depth + 1)]
    given = [scene.attention_input(layer) for layer in range(depth)]
    layers = int(scene.value)
    curves = []
    for name, norms in (("with norms", True), ("without", False)):
        kept = deep(layers, norms=norms)
        curves.append((name, [*range(layers + 1)], [float(one.norm(dim=-1).mean()) for one in kept]))
    return [
        lines(
            "this model: the residual stream by layer, and what attention gets of it",
            "layer",
            [
                ("mean norm of a token", [*range(depth + 1)], [float(one.norm(dim=-1).mean()) for one in stream]),
                ("largest entry of any token", [*range(depth + 1)], [float(one.abs().max()) for one in stream]),
                ("mean norm that attention gets", [*range(depth)], [float(one.norm(dim=-1).mean()) for one in given]),
            ],
            log=True,
        ),
        lines(f"a stack of {layers} layers of width 32 as initialised: mean norm", "layer", curves, log=True),
        facts(
            ("grows by a factor of, with norms", curves[0][2][-1] / curves[0][2][0]),
            ("grows by a factor of, without norms", curves[1][2][-1] / curves[1][2][0]),
        ),
    ]


FIGURES = {
    "B1": Figure(placement, TOKEN),
    "B2": Figure(layer_norm, TOKEN, Control("times x", 3, 0.5, 20, 0.5)),
    "B3": Figure(feedforward, TOKEN),
    "B4": Figure(stream_sum, ("pass", "position")),
    "B5": Figure(gradients, (), Control("layers", 24, 4, 32, 4)),
    "B7": Figure(dropout, ("pass", "layer"), Control("rate", 0.1, 0, 0.9, 0.1)),
    "B8": Figure(activation_range, ("pass",), Control("layers", 12, 2, 24)),
}
