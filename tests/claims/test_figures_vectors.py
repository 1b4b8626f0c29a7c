"""Figures of ids to vectors, E1 to E4, and of positions, P1 to P9, beside loops over their formulas."""

from __future__ import annotations

import cmath
import math
import statistics

import pytest
import torch
from torch import Tensor

import glasshouse as gh
from claims.figures import (
    LIMIT,
    WIDE,
    Below,
    Drawn,
    Opened,
    bundled,
    check_strongest,
    elsewhere,
    labels,
    near,
    on,
    same,
    sinusoid,
    size,
)


@on("E1", "python-3m", "gpt2", "dates-1m")
def test_figure_e1(drawn: Drawn) -> None:
    one = drawn.model
    (embedding,) = one.record("embed")
    count, width = len(one.ids), one.model.spec.d_model
    assert drawn.shapes == [[("ids", [1, count]), ("embedding", [1, count, width])]]
    (matrix,) = drawn.matrices
    assert matrix.title == f"the first {min(48, width)} coordinates of each row"
    assert (matrix.rows, matrix.row) == (one.labels, one.position)
    same(matrix.values, [[float(embedding[i, j]) for j in range(min(48, width))] for i in range(one.shown)])


@on("E2", "gpt2", "python-3m", "dates-1m")
def test_figure_e2(drawn: Drawn) -> None:
    one, s = drawn.model, drawn.model.model.spec
    ids = one.ids[: one.shown]
    used = [number for number in range(s.vocab_size) if number in ids]
    assert drawn.shapes == [
        [("one-hot", [len(ids), s.vocab_size]), ("E", [s.vocab_size, s.d_model]), ("x", [len(ids), s.d_model])]
    ]
    (matrix,) = drawn.matrices
    assert matrix.title == f"one-hot rows: the {len(used)} columns in use, of {s.vocab_size:,}"
    assert (matrix.rows, matrix.row) == (one.labels, one.position)
    assert matrix.columns == [f"id {number}" for number in used]
    assert matrix.values.tolist() == [[float(number == one) for number in used] for one in ids]
    assert drawn.facts == {"largest difference from the lookup": Below(1e-6)}


@on("E3", "gpt2", "python-3m", "bert")
def test_figure_e3(drawn: Drawn) -> None:
    one, count = drawn.model, int(drawn.value)
    if drawn.name == "gpt2":
        count = min(count, 48 - one.shown)  # more than its table of positions holds
    if not one.causal:
        one = elsewhere(one, "python-3m")
        assert drawn.texts[:-1] == [
            "The open model is no decoder; this shows python-3m, which comes with the package, on its own text."
        ]
    assert drawn.texts[-1].startswith("Padding is on the left")
    ids = one.inputs[0][:, :LIMIT]
    name = f"pattern.{one.layer}"
    with torch.no_grad(), gh.record(one.model, name) as seen:
        logits = one.model(ids)
    alone, length = seen[name][0, one.head], ids.shape[1]
    (matrix,) = drawn.matrices
    same(matrix.values[:, count:], alone)
    assert matrix.values[:, :count].tolist() == [[-math.inf] * count] * length
    assert (matrix.rows, matrix.columns) == (one.labels, ["pad"] * count + one.labels)
    largest = max(abs(value) for row in logits[0].tolist() for value in row)
    assert drawn.facts == {
        "padding": count,
        "largest change of a logit": Below(1e-4 * largest),
        "largest logit": near(largest),
        "largest weight on padding": 0.0,
    }


def nearest(table: Tensor, one: int) -> list[tuple[int, float]]:
    """Return the rows of a table with the largest cosine to a row, by sorting all."""
    rows = table.double()
    here = rows[one] / rows[one].square().sum().sqrt()
    cosine = [float((row / row.square().sum().sqrt() * here).sum()) for row in rows]
    return sorted(((i, c) for i, c in enumerate(cosine) if i != one), key=lambda pair: -pair[1])[:8]


@on("E4", "gpt2", "python-3m", "dates-1m")
def test_figure_e4(drawn: Drawn) -> None:
    one = drawn.model
    table = one.model.token_embedding.table.weight.detach()
    number = one.ids[one.position]
    found, drawn_rows = drawn.bars
    best = nearest(table, number)
    assert found.title == f"nearest to {labels([number], one.tok)[0]}: cosine of the vectors"
    assert found.names == labels([i for i, _ in best], one.tok)
    same(found.values, [cosine for _, cosine in best])
    count = min(len(table), 1024)
    random = torch.randn(count, table.shape[1], generator=torch.Generator().manual_seed(0))
    best = nearest(random, number % count)
    assert drawn_rows.title == f"the same in {count:,} rows drawn at random"
    assert drawn_rows.names == labels([i for i, _ in best], one.tok)
    same(drawn_rows.values, [cosine for _, cosine in best])
    assert found.most == drawn_rows.most == 1


def codes(width: int, positions: range) -> list[list[float]]:
    return [[sinusoid(place, i, width) for i in range(width)] for place in positions]


@on("P1", "gpt2")
def test_figure_p1(drawn: Drawn) -> None:
    width = int(drawn.value)
    (matrix,) = drawn.matrices
    same(matrix.values, codes(width, range(64)), 1e-6)
    (table,) = drawn.tables
    assert table.head == ["position", "sin 0", "cos 0", "sin 1", "cos 1", "sin 2", "cos 2"]
    for place, row in enumerate(table.rows):
        assert row[0] == place
        same(row[1:], codes(width, range(place, place + 1))[0][:6], 1e-9)
    assert len(table.rows) == 4
    (piece,) = (one for one in drawn.pieces if one["kind"] == "matrix")
    assert piece["along"] == ["position", "coordinate"]


@on("P2", "gpt2")
def test_figure_p2(drawn: Drawn) -> None:
    offset = int(drawn.value)
    (said,) = drawn.texts
    assert said == f"Pale: position 40. Solid: position {40 + offset}. Up is the sine, right the cosine."
    assert len(drawn.dials) == 8
    for k, dial in enumerate(drawn.dials):
        speed = 10_000 ** (-2 * k / 16)
        before, after = (cmath.exp(1j * place * speed) for place in (40, 40 + offset))  # right: cosine, up: sine
        assert dial["name"] == f"pair {k}"
        same(dial["before"], [before.real, before.imag], 1e-9)
        same(dial["after"], [after.real, after.imag], 1e-9)
        assert dial["angle"] == near(offset * speed, 1e-12)
        assert cmath.isclose(before * cmath.exp(1j * dial["angle"]), after, rel_tol=1e-9)
    assert drawn.facts == {"offset": offset, "largest error of the rotation over 500 positions": Below(1e-11)}


@on("P3", "gpt2")
def test_figure_p3(drawn: Drawn) -> None:
    width = int(drawn.value)
    # |p_t - p_s|^2 is the sum of 2 - 2 cos((t - s) w) over the pairs.
    speeds = [10_000 ** (-2 * k / width) for k in range(width // 2)]
    by_offset = [math.sqrt(sum(2 - 2 * math.cos(offset * speed) for speed in speeds)) for offset in range(64)]
    (matrix,) = drawn.matrices
    same(matrix.values, [[by_offset[abs(i - j)] for j in range(64)] for i in range(64)], 1e-6)
    (curve,) = drawn.lines
    points = curve.series["distance"]
    assert (curve.along, [x for x, _ in points]) == ("offset", [*range(64)])
    same([y for _, y in points], by_offset, 1e-6)
    assert drawn.facts == {
        "norm of every code": near(math.sqrt(width / 2), 1e-9),
        "sqrt(D / 2)": near(math.sqrt(width / 2), 1e-12),
        "largest difference along a diagonal": Below(1e-6),
        "nearest two": near(min(by_offset[1:]), 1e-6),
    }


@on("P4", "gpt2")
def test_figure_p4(drawn: Drawn) -> None:
    width = int(drawn.value)
    bits, waves = drawn.matrices
    assert bits.values.tolist() == [[float(one) for one in reversed(f"{place:05b}")] for place in range(32)]
    same(waves.values, [row[0::2] for row in codes(width, range(32))], 1e-6)
    (curve,) = drawn.lines
    # After one wavelength the angle is a whole turn: position / 10000^(2k / D) = 2 pi.
    lengths = [math.tau * math.exp(math.log(10_000) * 2 * k / width) for k in range(width // 2)]
    assert [x for x, _ in curve.series["positions"]] == [*range(width // 2)]
    assert [y for _, y in curve.series["positions"]] == [near(one, 1e-9) for one in lengths]
    for k, one in enumerate(lengths):
        assert sinusoid(1, 2 * k, width) == near(math.sin(math.tau / one), 1e-9)
    assert drawn.facts == {
        "shortest": near(math.tau, 1e-12),
        "longest": near(math.tau * 10_000 ** (1 - 2 / width), 1e-9),
        "parameters": 0,
    }
    assert curve.log


@on("P5", "gpt2", "python-3m", "bert")
def test_figure_p5(drawn: Drawn) -> None:
    one = drawn.model
    (said,) = drawn.texts
    if drawn.name == "python-3m":
        torch.manual_seed(0)
        rows = gh.build(gh.preset("tiny-decoder", position="learned")).state_dict()["stack.position.table.weight"]
        assert said == "The open model has no learned positions; this is a new table, as it is before training."
    else:
        rows = one.model.state_dict()["stack.position.table.weight"]
        assert said == "The rows of the open model's table."
    assert drawn.shapes == [[("table", [*rows.shape])]]
    (matrix,) = drawn.matrices
    same(matrix.values, rows[:LIMIT, :WIDE])
    assert matrix.row == one.position
    assert drawn.facts == {"mean norm of a row": near(sum(size(row) for row in rows.tolist()) / len(rows))}


def added(one: Opened, length: int) -> list[list[float]]:
    """Return what is added at each position: sinusoids by their formula, or rows of the table."""
    s = one.model.spec
    if s.position.kind == "sinusoidal":
        return codes(s.d_model, range(length))
    return one.stack.position.table.weight[:length].tolist()


def embedded(one: Opened, ids: list[int]) -> list[list[float]]:
    """Return the vectors of tokens before positions are added."""
    table = one.model.token_embedding.table.weight.detach()
    by = math.sqrt(one.model.spec.d_model) if one.model.spec.embed_scale else 1.0
    return [[by * value for value in table[number].tolist()] for number in ids]


def with_added_positions(drawn: Drawn) -> tuple[Opened, list[int], list[str]]:
    """Return the model whose positions are shown, and the tokens: those of dates-1m's encoder where it has none."""
    if drawn.name not in ("python-3m", "headless"):
        assert drawn.texts == []
        return drawn.model, drawn.model.ids[: drawn.model.shown], drawn.model.labels
    one = bundled("dates-1m")
    assert drawn.texts == [
        "The open model's positions (rotary) add nothing to the embeddings; this shows dates-1m, which comes with "
        "the package."
    ]
    # An open encoder has ids that dates-1m's tokenizer may not know.
    ids = [*range(10, 20)] if drawn.name == "headless" else one.inputs[0][0].tolist()
    return one, ids, labels(ids, one.tok)


@on("P6", "gpt2", "python-3m", "dates-1m", "bert", "headless")
def test_figure_p6(drawn: Drawn) -> None:
    one, ids, names = with_added_positions(drawn)
    ratios = [
        size(place) / size(token) for place, token in zip(added(one, len(ids)), embedded(one, ids), strict=True)
    ]
    assert drawn.facts == {
        "mean of |position| / |token|, over this text": near(sum(ratios) / len(ratios)),
        "at the start, by arithmetic (sinusoids, scaled embeddings)": near(0.70710678, 1e-7),
        "width before": one.model.spec.d_model,
        "width after": one.model.spec.d_model,
    }
    (bars,) = drawn.bars
    check_strongest(bars, "|position| / |token|", names, ratios)


@on("P7", "python-3m", "gpt2", "gemma")
def test_figure_p7(drawn: Drawn) -> None:
    s, moved = drawn.model.model.spec, int(drawn.value)
    rotary = drawn.name != "gpt2"
    width = s.d_head if rotary else 32
    assert drawn.texts == [
        "The open model's rotary positions, with a random query and key."
        if rotary
        else "The open model is not rotary; this is rotary attention of width 32."
    ]
    q, k = torch.randn(2, width, generator=torch.Generator().manual_seed(0)).tolist()
    # Coordinates i and i + width / 2 are one complex number, turned by its speed times the position: so a score is
    # the real part of q conj(k) turned by the offset, wherever the query is.
    half = width // 2
    speeds = [10_000 ** (-2 * i / width) for i in range(half)]

    def score(offset: int) -> float:
        total = 0.0
        for i, speed in enumerate(speeds):
            both = complex(q[i], q[i + half]) * complex(k[i], k[i + half]).conjugate()
            total += (both * cmath.exp(-1j * speed * offset)).real
        return total / math.sqrt(width)

    (curves,) = drawn.lines
    assert curves.along == "offset"
    offsets = [*range(-32, 33)]
    shown = [points for _, points in sorted(curves.series.items())]
    names = ["query at 32", f"query at {32 + moved}"]
    assert [piece["name"] for one in drawn.pieces if one["kind"] == "lines" for piece in one["series"]] == names
    assert [[x for x, _ in points] for points in shown] == [offsets] * len(shown)
    for points in shown:  # angles are float32: at position 464 they are off by 464 * 6e-8
        same([y for _, y in points], [score(offset) for offset in offsets], 2e-4)
    assert drawn.facts == {"moved by": moved, "largest change of a score": Below(1e-3)}


def angle(a: list[float], b: list[float]) -> float:
    """Return the angle between two vectors in radians, by the sides of a triangle."""
    p, q, r = size(a), size(b), math.dist(a, b)
    return math.acos(max(-1.0, min(1.0, (p * p + q * q - r * r) / (2 * p * q))))


@on("P8", "gpt2", "python-3m", "dates-1m")
def test_figure_p8(drawn: Drawn) -> None:
    one, _, _ = with_added_positions(drawn)
    s = one.model.spec
    known = min(1024, s.vocab_size)
    table = torch.tensor(embedded(one, [*range(known)]), dtype=torch.float64)
    places = [0, 1, 2, 4, 8, 16, 32, *([] if s.position.kind == "learned" else [48])]  # the table has 48 rows
    rows = added(one, max(places) + 1)
    share, total, angles = [], 0.0, []
    for place in places:
        moved = table + drawn.value * torch.tensor(rows[place], dtype=torch.float64)
        apart = torch.cdist(moved, table, compute_mode="donot_use_mm_for_euclid_dist")
        share.append(sum(int(row.argmin()) == i for i, row in enumerate(apart)) / known)
        total += drawn.value * size(rows[place])
        angles += [angle(a, b) for a, b in zip(moved.tolist(), table.tolist(), strict=True)]
    ratio = (total / len(places)) / (sum(size(row) for row in table.tolist()) / known)
    assert drawn.facts == {
        "|position| / |token|, over the vocabulary": near(ratio),
        "the token's vector is turned by, in degrees": pytest.approx(
            math.degrees(statistics.fmean(angles)), abs=0.02
        ),
        "nearest token is the token itself": f"{100 * sum(share) / len(places):.1f}%",
        "of so many tokens": known,
    }
    (bars,) = drawn.bars
    assert bars.names == [f"position {place}" for place in places]
    assert bars.values == [pytest.approx(one, abs=1e-6) for one in share]
    assert bars.most == 1


@on("P9", "gpt2")
def test_figure_p9(drawn: Drawn) -> None:
    length, width = int(drawn.value), 64
    norms, parts = drawn.lines
    steps = [*range(2 * length)]
    expected = {
        "(t, ..., t)": [size([t] * width) for t in steps],
        "sinusoids": [size(row) for row in codes(width, range(2 * length))],
        "a token": [size([1.0] * width) for _ in steps],  # coordinates of standard deviation 1
    }
    assert norms.series.keys() == expected.keys()
    for name, values in expected.items():
        assert norms.series[name] == [(t, near(value, 1e-9)) for t, value in zip(steps, values, strict=True)]
    assert parts.series == {
        f"in a text of {length}": [(t, near(t / length, 1e-12)) for t in range(length)],
        f"of {2 * length}": [(t, near(t / (2 * length), 1e-12)) for t in range(2 * length)],
    }
    token = expected["a token"][-1]
    assert drawn.facts == {
        "token's share of the sum at the last position": near(token / (token + expected["(t, ..., t)"][-1]), 1e-9),
        "with sinusoids": near(token / (token + expected["sinusoids"][-1]), 1e-9),
    }
