"""Figures of one head of attention: A1 to A7 and A14."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from glasshouse.config import JsonDict
from glasshouse.layers.attend.layout import make_layout
from glasshouse.layers.lora import LoRALinear
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
    strongest,
    table,
)

HEAD = ("pass", "layer", "head")
WIDTHS = (4, 16, 64, 256, 1024)
KEYS = 32  # of a random row
ROWS = 200  # of random rows


def head_weight(linear: Any, head: int, width: int) -> tuple[Tensor, Tensor | float]:  # noqa: ANN401
    """Return the rows of a projection that belong to a head, [d, D], and their bias."""
    rows = slice(head * width, (head + 1) * width)
    base = linear.base if isinstance(linear, LoRALinear) else linear
    weight = linear.merged_weight() if hasattr(linear, "merged_weight") else base.weight
    return weight[rows].float(), 0.0 if base.bias is None else base.bias[rows].float()


def projections(scene: Scene) -> list[Tensor]:
    """Return q, k and v of the selected head from its input, before any norm or rotation, [S, d] each."""
    layer, x = scene.attention, scene.attention_input(scene.layer)
    shared = scene.head // (layer.n_heads // layer.n_kv_heads)
    found = []
    for linear, head in ((layer.query, scene.head), (layer.key, shared), (layer.value, shared)):
        weight, bias = head_weight(linear, head, layer.d_head)
        found.append(x @ weight.T + bias)
    return found


def queries_keys_values(scene: Scene) -> list[JsonDict]:
    """A1."""
    layer, x = scene.attention, scene.attention_input(scene.layer)
    q, k, v = projections(scene)
    shared = scene.head // (layer.n_heads // layer.n_kv_heads)
    recorded = scene.kernel()[2][shared]
    width = [x.shape[1], layer.d_head]
    return [
        shapes(("x", list(x.shape)), ("Wq", width), ("q", list(q.shape))),
        *(
            matrix(f"{name} of head {scene.head}", one[:, :WIDE], rows=scene.labels, signed=True)
            for name, one in (("q", q), ("k", k), ("v", v))
        ),
        facts(
            ("heads", layer.n_heads),
            ("d_head", layer.d_head),
            ("heads x d_head", layer.n_heads * layer.d_head),
            ("D", x.shape[1]),
            ("v, largest difference from gh.record", largest_difference(v, recorded)),
        ),
    ]


def bilinear_form(scene: Scene) -> list[JsonDict]:
    """A2."""
    layer, x = scene.attention, scene.attention_input(scene.layer)
    shared = scene.head // (layer.n_heads // layer.n_kv_heads)
    wq, wk = (head_weight(one, at, layer.d_head)[0] for one, at in ((layer.query, scene.head), (layer.key, shared)))
    m = wq.T @ wk
    scores = (x @ m @ x.T) / math.sqrt(layer.d_head)
    apart = largest_difference((x @ wq.T) @ (x @ wk.T).T / math.sqrt(layer.d_head), scores)
    size = torch.linalg.svdvals(m.double())
    count = min(len(size), 2 * layer.d_head)
    return [
        shapes(
            ("x", list(x.shape)),
            ("M = Wq Wk^T", list(m.shape)),
            ("x^T", [x.shape[1], x.shape[0]]),
            ("scores", [len(x)] * 2),
        ),
        matrix("x_i M x_j^T / sqrt(d_head)", scores, rows=scene.labels, columns=scene.labels, signed=True),
        lines(
            "singular values of M: zero after the first d_head",
            "number",
            [("size", [*range(1, count + 1)], [max(float(one), 1e-12) for one in size[:count]])],
            log=True,
        ),
        facts(
            ("d_head", layer.d_head),
            ("rank of M", int((size > 1e-5 * size[0]).sum())),
            ("largest difference between x_i M x_j^T and q_i . k_j", apart),
        ),
        sentence("Before biases, norms and rotations of q and k, where the model has them."),
    ]


def scaling(scene: Scene) -> list[JsonDict]:
    """A3."""
    chosen, heads = 2 ** int(scene.value), 8
    rows = [_spread(width, heads) for width in WIDTHS]
    # The first components of the same vectors at every width.
    q, k = torch.randn(WIDTHS[-1], generator=generator()), torch.randn(12, WIDTHS[-1], generator=generator(1))
    scores = k[:, :chosen] @ q[:chosen]
    kinds = (
        ("scaled", chosen**-0.5),
        ("not scaled", 1.0),
        (f"by the model's width, {heads} heads", (heads * chosen) ** -0.5),
    )
    return [
        *(
            bars(
                f"softmax of 12 scores, {name}",
                ((f"key {i}", w) for i, w in enumerate((scores * by).softmax(0).tolist())),
                most=1,
            )
            for name, by in kinds
        ),
        table(
            "variance of the score, and median norm of the softmax's gradient",
            ["d_head", "variance, scaled", "not scaled", "by the model's width", "gradient, scaled", "not scaled"],
            rows,
        ),
        facts(("d_head", chosen)),
    ]


def _spread(width: int, heads: int) -> list[float]:
    """Return the variance of scores and the norm of the softmax gradient for one width of the head."""
    rng = generator(width)
    q, k = torch.randn(ROWS, 1, width, generator=rng), torch.randn(ROWS, KEYS, width, generator=rng)
    pull = torch.randn(ROWS, 1, KEYS, generator=rng)
    raw = q @ k.transpose(1, 2)
    found = {}
    for name, by in (("scaled", width**-0.5), ("raw", 1.0)):
        weights = (raw * by).softmax(-1)
        gradient = weights * (pull - (weights * pull).sum(-1, keepdim=True))
        found[name] = float(gradient.norm(dim=-1).median())
    variances = [float((raw * by).var()) for by in (width**-0.5, 1.0, (heads * width) ** -0.5)]
    return [width, *variances, found["scaled"], found["raw"]]


def masking(scene: Scene) -> list[JsonDict]:
    """A4."""
    scores, weights = scene.scores()[scene.head], scene.weights()[scene.head]
    masked = scores == -math.inf
    mask = torch.zeros_like(scores).masked_fill(masked, -math.inf)
    named: JsonDict = {"rows": scene.labels, "columns": scene.labels}
    return [
        matrix("the mask: 0, or minus infinity (hatched)", mask, **named),
        matrix("scores with the mask", scores, signed=True, **named),
        matrix("weights after the softmax", weights.masked_fill(masked, -math.inf), **named),
        facts(
            ("masked weights", int(masked.sum())),
            ("largest of them", float(weights[masked].max()) if masked.any() else 0.0),
            ("smallest row sum", float(weights.sum(-1).min())),
        ),
    ]


def markov_chain(scene: Scene) -> list[JsonDict]:
    """A5."""
    step, count = scene.weights()[scene.head].double(), int(scene.value)
    power = torch.linalg.matrix_power(step, count)
    walk = power[scene.place]
    return [
        strongest(
            f"where a walk from “{scene.labels[scene.place]}” is after {count} steps",
            scene.labels,
            walk.tolist(),
            most=1,
        ),
        matrix(f"A to the power {count}", power, rows=scene.labels, columns=scene.labels, row=scene.place),
        facts(
            ("steps", count),
            ("sum of the row", float(walk.sum())),
            ("share at the first token", float(walk[0])),
        ),
    ]


def joined_heads(scene: Scene) -> list[JsonDict]:
    """A6."""
    z, layer = scene.site("z")[:, scene.place], scene.attention
    out = layer.out(z.flatten().to(layer.out.weight.dtype) if hasattr(layer.out, "weight") else z.flatten()).float()
    added, recorded = normed_output(scene.stack.blocks[scene.layer].attention, out), scene.site("attn_out")
    heads = [f"head {i}" for i in range(len(z))]
    return [
        matrix("the outputs of all heads at this token", z[:, :WIDE], rows=heads, signed=True, row=scene.head),
        shapes(("joined", [1, z.numel()]), ("Wo", [z.numel(), len(out)]), ("output", [1, len(out)])),
        matrix(
            f"the output, its first {min(WIDE, len(out))} of {len(out)}",
            out[None, :WIDE],
            rows=["output"],
            signed=True,
        ),
        facts(("largest difference from gh.record", largest_difference(added, recorded[scene.place]))),
    ]


def lookups(scene: Scene) -> list[JsonDict]:
    """A7."""
    q, k, v = scene.kernel()
    shared = scene.head // (len(q) // len(k))
    attend, z = scene.attention.attend, scene.site("z")[scene.head]
    causal, visible = scene.stack.causal, scene.scores()[scene.head] > -math.inf
    rows = []
    for i in range(scene.length):
        scores = attend.scale * (k[shared, visible[i]] @ q[scene.head, i])
        scores = scores if attend.softcap is None else attend.softcap * (scores / attend.softcap).tanh()
        rows.append(scores.softmax(0) @ v[shared, visible[i]])
    alone, i = torch.stack(rows), scene.place
    end = i + 1 if causal else scene.length
    plain = scene.stack.position.bias(torch.zeros(1, 1).long(), torch.zeros(1, 1).long()) is None
    return [
        strongest(
            f"one lookup: “{scene.labels[i]}” against {'itself and those before' if causal else 'all'}",
            scene.labels,
            scene.weights()[scene.head, i, :end].tolist(),
            most=1,
        ),
        facts(
            ("lookups", scene.length),
            (
                "largest difference from the one product" + ("" if plain else " (without its bias)"),
                largest_difference(alone, z),
            ),
        ),
        matrix("all of them at once", scene.weights()[scene.head], rows=scene.labels, columns=scene.labels, row=i),
    ]


def retrieval(scene: Scene) -> list[JsonDict]:
    """A14."""
    x = scene.stream(0)
    scores = x @ x.T
    later = torch.ones_like(scores, dtype=torch.bool).triu(1)
    weights = scores.masked_fill(later, -math.inf).softmax(-1)
    found = weights @ x
    layer = _identity_layer(x)
    back = F.cosine_similarity(found[scene.place][None], x, dim=-1)
    named: JsonDict = {"rows": scene.labels, "columns": scene.labels, "row": scene.place}
    return [
        matrix("x . x over the prefix", scores.masked_fill(later, -math.inf), signed=True, **named),
        matrix("its softmax: what each token retrieves", weights.masked_fill(later, -math.inf), **named),
        strongest(
            f"what “{scene.labels[scene.place]}” retrieved: cosine to each token",
            scene.labels,
            back[: scene.place + 1].tolist(),
            most=1,
        ),
        facts(
            ("largest difference from the layer with identity matrices", largest_difference(found, layer)),
            ("mean weight on the token itself", float(weights.diagonal().mean())),
        ),
    ]


def _identity_layer(x: Tensor) -> Tensor:
    """Return the output of a layer of causal attention with one head, identity matrices and scale 1, [S, D]."""
    sizes: JsonDict = {
        "vocab_size": 1,
        "d_model": x.shape[1],
        "n_heads": 1,
        "n_kv_heads": 1,
        "n_layers": 1,
        "d_ff": 1,
    }
    stack = initialised("decoder", **sizes, position="none", qk_norm=False, attention_scale=1.0).stack
    (layer,) = stack.attention_layers("attention")
    for linear in (layer.query, layer.key, layer.value, layer.out):
        nn.init.eye_(linear.weight)
    layout = make_layout(torch.zeros(1, len(x), dtype=torch.long))
    return layer(x[None].cpu(), stack.context(layout, x.dtype))[0].to(x.device)


FIGURES = {
    "A1": Figure(queries_keys_values, HEAD),
    "A2": Figure(bilinear_form, HEAD),
    "A3": Figure(
        scaling, (), Control("width of the head", 6, 2, 10, labels=tuple(str(2**power) for power in range(2, 11)))
    ),
    "A4": Figure(masking, HEAD),
    "A5": Figure(markov_chain, (*HEAD, "position"), Control("steps", 4, 1, 64)),
    "A6": Figure(joined_heads, (*HEAD, "position")),
    "A7": Figure(lookups, (*HEAD, "position")),
    "A14": Figure(retrieval, ("pass", "position")),
}
