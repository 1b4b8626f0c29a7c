"""Figures of position codes that need no model: P1 to P4, P7 and P9."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from glasshouse import spec
from glasshouse.config import JsonDict
from glasshouse.layers.position import RotaryPosition, SinusoidalPosition, make_position
from glasshouse.page.views.notes.figure import (
    Control,
    Figure,
    Scene,
    facts,
    generator,
    lines,
    matrix,
    sentence,
    table,
)

SHOWN = 64  # positions
BITS = 5
WIDTH = Control("width D", 32, 8, 128, 8)


def codes(width: int, count: int = SHOWN, first: int = 0) -> Tensor:
    """Return the sinusoids of some positions, [S, D]."""
    return SinusoidalPosition(width, interleaved=True).encodings(torch.arange(first, first + count)[None])[0]


def sinusoids(scene: Scene) -> list[JsonDict]:
    """P1."""
    width = int(scene.value)
    return [
        matrix(
            "sine and cosine pairs: fast on the left, slow on the right",
            codes(width),
            signed=True,
            along=("position", "coordinate"),
        ),
        table(
            "the first positions",
            ["position", *(f"{'sin' if i % 2 == 0 else 'cos'} {i // 2}" for i in range(6))],
            ([place, *row[:6].tolist()] for place, row in enumerate(codes(width, 4))),
        ),
    ]


def rotation(scene: Scene) -> list[JsonDict]:
    """P2."""
    width, offset, start = 16, int(scene.value), 40  # so that no offset leads before the first position
    angles = offset * 10_000.0 ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    before, after = codes(width, 1, start)[0], codes(width, 1, start + offset)[0]
    dials = [
        {
            "name": f"pair {k}",
            "before": [float(before[2 * k + 1]), float(before[2 * k])],
            "after": [float(after[2 * k + 1]), float(after[2 * k])],
            "angle": float(angles[k]),
        }
        for k in range(width // 2)
    ]
    many = codes(width, 500, start)
    sine, cosine = many[:, 0::2], many[:, 1::2]
    turned = torch.stack(
        [sine * angles.cos() + cosine * angles.sin(), cosine * angles.cos() - sine * angles.sin()], -1
    ).flatten(-2)
    error = float((turned - codes(width, 500, start + offset)).abs().max())
    return [
        {"kind": "dials", "dials": dials},
        sentence(f"Pale: position {start}. Solid: position {start + offset}. Up is the sine, right the cosine."),
        facts(("offset", offset), ("largest error of the rotation over 500 positions", error)),
    ]


def distances(scene: Scene) -> list[JsonDict]:
    """P3."""
    width = int(scene.value)
    code = codes(width)
    apart = torch.cdist(code, code)
    spread = max(float(apart.diagonal(k).max() - apart.diagonal(k).min()) for k in range(1, SHOWN))
    return [
        matrix("distance between positions: equal along each diagonal", apart, along=("position", "position")),
        facts(
            ("norm of every code", float(code.norm(dim=-1).max())),
            ("sqrt(D / 2)", math.sqrt(width / 2)),
            ("largest difference along a diagonal", spread),
            ("nearest two", float(apart[~torch.eye(SHOWN, dtype=torch.bool)].min())),
        ),
        lines("distance by offset", "offset", [("distance", [*range(SHOWN)], apart[0].tolist())]),
    ]


def counter(scene: Scene) -> list[JsonDict]:
    """P4."""
    width = int(scene.value)
    place = torch.arange(2**BITS)
    bits = torch.stack([(place >> bit) & 1 for bit in range(BITS)], 1).float()
    waves = codes(width, 2**BITS)[:, 0::2]
    lengths = [2 * math.pi * 10_000 ** (2 * k / width) for k in range(width // 2)]
    return [
        matrix("a counter: the lowest bit first", bits, along=("position", "bit")),
        matrix("sines: the fastest pair first", waves, signed=True, along=("position", "pair")),
        lines("wavelength by pair", "pair", [("positions", [*range(width // 2)], lengths)], log=True),
        facts(("shortest", lengths[0]), ("longest", lengths[-1]), ("parameters", 0)),
    ]


def rotary(scene: Scene) -> list[JsonDict]:
    """P7."""
    position = scene.stack.position
    why = [sentence("The open model's rotary positions, with a random query and key.")]
    if not isinstance(position, RotaryPosition):
        position = make_position(spec.preset("tiny-decoder", position="rotary", d_head=32), causal=True)
        assert isinstance(position, RotaryPosition)
        why = [sentence("The open model is not rotary; this is rotary attention of width 32.")]
    q, k = torch.randn(2, 1, 1, 1, position.d_head, generator=generator())
    moved, reach = int(scene.value), 32

    def scores(start: int) -> list[float]:
        keys = torch.arange(start - reach, start + reach + 1)[None]
        here = position.rotation(torch.tensor([[start]]), q.dtype)(q)
        there = position.rotation(keys, q.dtype)(k.expand(1, 1, keys.shape[1], -1))
        return [float(one) for one in (here @ there.transpose(-2, -1))[0, 0, 0] / math.sqrt(position.d_head)]

    offsets = [*range(-reach, reach + 1)]
    first, second = scores(reach), scores(reach + moved)
    return [
        *why,
        lines(
            "score by offset of the key, for a query at two positions",
            "offset",
            [(f"query at {reach}", offsets, first), (f"query at {reach + moved}", offsets, second)],
        ),
        facts(
            ("moved by", moved),
            ("largest change of a score", max(abs(a - b) for a, b in zip(first, second, strict=True))),
        ),
    ]


def naive_codes(scene: Scene) -> list[JsonDict]:
    """P9."""
    length, width = int(scene.value), 64
    place = torch.arange(2 * length, dtype=torch.float64)
    root = math.sqrt(width)
    counted = [float(t) * root for t in place]
    waves = codes(width, 2 * length).norm(dim=-1).tolist()
    steps = [int(t) for t in place]
    alone = [t / length for t in steps[:length]]
    return [
        lines(
            "norm of the code by position, beside that of a token",
            "position",
            [("(t, ..., t)", steps, counted), ("sinusoids", steps, waves), ("a token", steps, [root] * len(steps))],
        ),
        lines(
            "t / length: one position, two codes",
            "position",
            [
                (f"in a text of {length}", steps[:length], alone),
                (f"of {2 * length}", steps, [t / (2 * length) for t in steps]),
            ],
        ),
        facts(
            ("token's share of the sum at the last position", root / (root + counted[-1])),
            ("with sinusoids", root / (root + waves[-1])),
        ),
    ]


FIGURES = {
    "P1": Figure(sinusoids, (), WIDTH),
    "P2": Figure(rotation, (), Control("offset", 3, -40, 40)),
    "P3": Figure(distances, (), WIDTH),
    "P4": Figure(counter, (), Control("width D", 16, 8, 64, 8)),
    "P7": Figure(rotary, ("pass",), Control("move both by", 100, 0, 400, 10)),
    "P9": Figure(naive_codes, (), Control("length", 32, 8, 128, 8)),
}
