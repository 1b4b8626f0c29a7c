"""Compiled = eager: three specs here, and specs that cover every pair of choices by `make models`."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import glasshouse as gh
from glasshouse import spec
from glasshouse.models import Decoder, Encoder, Seq2Seq

pytestmark = pytest.mark.slow

CHOICES: dict[str, list[object]] = {
    "kind": ["tiny-decoder", "tiny-encoder", "tiny-seq2seq"],
    "position": [
        spec.NoPosition(),
        spec.Sinusoidal(),
        spec.Learned(offset=2),
        spec.Rotary(scaling=spec.Llama3Scaling(8.0, 1.0, 4.0, 16)),
        spec.Rotary(layout="pairs", scaling=spec.YarnScaling(4.0, 16)),
        spec.Rotary(fraction=0.5),
        spec.Relative(),
        spec.Alibi(),
    ],
    "feedforward": [spec.Relu(), spec.ReluSquared(), spec.Gelu(), spec.Silu(), spec.SwiGLU(), spec.GeGLU(tanh=True)],
    "norm": [spec.LayerNorm(), spec.RMSNorm()],
    "norm_placement": ["pre", "post", "sandwich", "output", "parallel"],
    "n_kv_heads": [1, 2, 4],
    "windows": [(0,), (3, 0)],
    "attention_softcap": [None, 5.0],
    "logit_softcap": [None, 5.0],
    "qk_norm_over": ["none", "head", "projection"],
    "value_embeddings": [False, True],
    "qkv_bias": [False, True],
    "final_norm": [False, True],
    "embed_norm": [False, True],
    "embed_scale": [False, True],
    "tied": [False, True],
    "kwargs": ["nothing", "lengths", "mask", "documents"],
}


def rows_that_cover_every_pair() -> Iterator[dict[str, object]]:
    """Yield settings until they cover every pair of values, greedily: most new pairs first."""
    missing = {
        (a, i, b, j)
        for a, b in itertools.combinations(CHOICES, 2)
        for i in range(len(CHOICES[a]))
        for j in range(len(CHOICES[b]))
    }
    while missing:
        a, i, b, j = min(missing)
        row = {a: i, b: j}
        for name in CHOICES:
            if name not in row:
                gains = [
                    sum(pair(row, name, value, other) in missing for other in row)
                    for value in range(len(CHOICES[name]))
                ]
                row[name] = gains.index(max(gains))
        missing -= {pair(row, x, row[x], y) for x, y in itertools.combinations(CHOICES, 2)}
        yield {name: CHOICES[name][value] for name, value in row.items()}


def pair(row: dict[str, int], name: str, value: int, other: str) -> tuple[str, int, str, int]:
    ordered = sorted([(name, value), (other, row[other])], key=lambda item: list(CHOICES).index(item[0]))
    return (*ordered[0], *ordered[1])


ROWS = list(rows_that_cover_every_pair())


def test_rows_cover_every_pair() -> None:
    for a, b in itertools.combinations(CHOICES, 2):
        for x, y in itertools.product(CHOICES[a], CHOICES[b]):
            assert any(row[a] == x and row[b] == y for row in ROWS), (a, x, b, y)


def make(row: dict[str, object]) -> Decoder | Encoder | Seq2Seq:
    settings = {name: value for name, value in row.items() if name not in ("kind", "tied", "kwargs")}
    if row["kind"] == "tiny-seq2seq" and row["norm_placement"] == "parallel":
        settings["norm_placement"] = "pre"  # it has no parallel blocks
    over = settings.pop("qk_norm_over")
    settings |= {"qk_norm": over != "none", "qk_norm_over": "projection" if over == "projection" else "head"}
    kind = "masked_token" if row["kind"] == "tiny-encoder" else "next_token"
    head = {"kind": kind, "tied": row["tied"]}
    off = {"dropout": 0.0, "embed_dropout": 0.0, "attention_dropout": 0.0}
    s = gh.preset(row["kind"], vocab_size=32, d_model=16, d_ff=24, init="normal", head=head, **off, **settings)
    torch.manual_seed(0)
    model = gh.build(s)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight), alpha=0.2)
    return model


def call_of(row: dict[str, object]) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
    ids = torch.randint(0, 32, (2, 8), generator=torch.Generator().manual_seed(1))
    kwargs = {
        "nothing": {},
        "lengths": {"lengths": torch.tensor([8, 5])},
        "mask": {"mask": torch.tensor([[1] * 8, [0, 0, 1, 1, 0, 1, 1, 1]], dtype=torch.bool)},
        "documents": {"documents": torch.tensor([[0] * 8, [0, 0, 0, 1, 1, 2, 2, 2]])},
    }[row["kwargs"]]
    if row["kind"] != "tiny-seq2seq":
        return (ids,), kwargs
    return (ids, ids.flip(1)), kwargs | {f"target_{name}": value for name, value in kwargs.items()}


def close(a: Tensor, b: Tensor) -> None:
    # Both are float32 and differ in the order of sums: some hundred roundings of 6e-8 of the largest entry.
    assert (a - b).abs().max() <= 2e-5 * max(1.0, float(b.abs().max()))


def check(row: dict[str, object]) -> None:
    torch.compiler.reset()
    model = make(row)
    args, kwargs = call_of(row)
    compiled = torch.compile(model, fullgraph=True)
    results = []
    for run in (model, compiled):
        model.zero_grad()
        out = run(*args, **kwargs)
        (out * torch.linspace(-1, 1, out.numel()).view(out.shape)).sum().backward()
        results.append([out.detach(), *(w.grad.clone() for w in model.parameters() if w.grad is not None)])
    for eager, fast in zip(*results, strict=True):
        close(fast, eager)
    if not isinstance(model, Encoder):
        check_cached(model)


@torch.no_grad()
def check_cached(model: Decoder | Seq2Seq) -> None:
    """No step after the second recompiles: only the contents of the cache change."""
    ids = torch.randint(0, 32, (2, 9))
    expected = model(ids, ids) if isinstance(model, Seq2Seq) else model(ids)
    compiled = torch.compile(model, fullgraph=True)
    cache = model.make_cache(2, 12)
    for t in range(9):
        with torch._dynamo.config.patch(error_on_recompile=t > 1):
            step = ids[:, t : t + 1]
            source = (None if t else ids,) if isinstance(model, Seq2Seq) else ()
            close(compiled(*source, step, cache=cache), expected[:, t : t + 1])


@pytest.mark.long
@pytest.mark.parametrize(
    "kind",
    [kind if kind == "tiny-decoder" else pytest.param(kind, marks=pytest.mark.long) for kind in CHOICES["kind"]],
)
def test_compiled_is_eager(kind: str) -> None:
    check(next(row for row in ROWS if row["kind"] == kind))


@pytest.mark.long
@pytest.mark.parametrize(
    "row", ROWS, ids=lambda row: f"{row['kind']}-{row['position'].kind}-{row['feedforward'].kind}"
)
def test_compiled_is_eager_over_every_pair(row: dict[str, object]) -> None:
    check(row)
