"""Which attention backend attends in which situation, and that a stack asks its own."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar, Self

import pytest
import torch
from torch import Tensor

import glasshouse as gh
from glasshouse.errors import InputError
from glasshouse.inspection import capture_attention
from glasshouse.layers.attend import decode as decode_attention
from glasshouse.layers.attend.backends import BACKENDS, Decode, Explicit, Sdpa, choose_backend
from glasshouse.layers.attend.kernel import Attend, Backend, Situation
from glasshouse.layers.attend.layout import Layout, make_layout
from glasshouse.layers.attend.mask import Mask, make_mask

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
LENGTH = 256
ROW = make_layout(torch.zeros(2, LENGTH))
PADDED = make_layout(torch.zeros(2, LENGTH), lengths=torch.tensor([LENGTH, 9]))
PACKED = make_layout(torch.zeros(2, LENGTH), documents=torch.arange(LENGTH).expand(2, -1) // 100)
PREFIX = make_layout(torch.zeros(2, LENGTH), prefix_lengths=torch.tensor([3, 4]))
STEP = Layout(torch.tensor([[5], [9]]))  # the next token of two cached rows
DRAFTS = Layout(torch.tensor([[5, 6, 7], [9, 10, 11]]))
SLOTS = Layout(torch.arange(LENGTH)[None], ordered=True)
RING = Layout(torch.arange(LENGTH).expand(2, -1), torch.ones(2, LENGTH, dtype=torch.bool))
ROWS, TOKEN_ROWS = torch.tensor([[0], [1]]), torch.tensor([[0, 1, 1]])
BIAS = torch.zeros(1, 4, 1, 1)

CAUSAL = make_mask(ROW, ROW, causal=True)
WINDOWED = make_mask(ROW, ROW, causal=True, window=64)
DOCUMENTS = make_mask(PACKED, PACKED, causal=True)
DECODING = make_mask(STEP, SLOTS, causal=True, rows=ROWS)


def situation(mask: Mask, n_queries: int = LENGTH, **facts: object) -> Situation:
    plain = Situation(mask, n_queries, LENGTH, CUDA, torch.bfloat16, d_head=64, group_size=4)
    return replace(plain, **facts)  # type: ignore[arg-type]


TABLE = {
    "causal": (situation(CAUSAL), "sdpa"),
    "bidirectional": (situation(Mask()), "sdpa"),
    "soft-cap": (situation(CAUSAL, softcap=True), "explicit"),
    "soft-cap and documents": (situation(DOCUMENTS, softcap=True), "explicit"),
    "right padding, causal": (situation(make_mask(PADDED, PADDED, causal=True)), "sdpa"),
    "padding": (situation(make_mask(PADDED, PADDED, causal=False)), "sdpa"),
    "prefix": (situation(make_mask(PREFIX, PREFIX, causal=True)), "sdpa"),
    "window": (situation(WINDOWED), "flex"),
    "documents": (situation(DOCUMENTS), "flex"),
    "documents of source and target": (situation(make_mask(PACKED, replace(PACKED), causal=False)), "flex"),
    "window wider than the sequence": (situation(make_mask(ROW, ROW, causal=True, window=LENGTH)), "sdpa"),
    "window and bias": (situation(make_mask(ROW, ROW, causal=True, window=64, bias=BIAS)), "sdpa"),
    "window on a CPU": (situation(WINDOWED, device=CPU), "sdpa"),
    "window in float64": (situation(WINDOWED, dtype=torch.float64), "sdpa"),
    "window, narrow heads": (situation(WINDOWED, d_head=8), "sdpa"),
    "window, dropout": (situation(WINDOWED, dropout=True), "sdpa"),
    "window, less than a block": (situation(WINDOWED, 127), "sdpa"),
    "window, one block": (situation(WINDOWED, 128), "flex"),
    "decoding": (situation(DECODING, 1, cached=True), "decode"),
    "decoding in float32": (situation(DECODING, 1, cached=True, dtype=torch.float32), "decode"),
    "decoding in float64": (situation(DECODING, 1, cached=True, dtype=torch.float64), "sdpa"),
    "decoding on a CPU": (situation(DECODING, 1, cached=True, device=CPU), "sdpa"),
    "decoding, soft-cap": (situation(DECODING, 1, cached=True, softcap=True), "explicit"),
    "decoding, dropout": (situation(DECODING, 1, cached=True, dropout=True), "sdpa"),
    "decoding, bias": (
        situation(make_mask(STEP, SLOTS, causal=True, bias=BIAS, rows=ROWS), 1, cached=True),
        "sdpa",
    ),
    "decoding, ring buffer": (
        situation(make_mask(STEP, RING, causal=True, window=9, rows=ROWS), 1, cached=True),
        "sdpa",
    ),
    "drafts": (situation(make_mask(DRAFTS, SLOTS, causal=True, rows=ROWS), 3, cached=True), "decode"),
    "most queries of the decode kernel": (situation(DECODING, 16, cached=True), "decode"),
    "more queries": (situation(DECODING, 17, cached=True), "sdpa"),
    "decoding, cross-attention": (situation(make_mask(STEP, RING, causal=False), 1, cached=True), "sdpa"),
    "mixed batch": (
        situation(make_mask(Layout(torch.tensor([[5, 0, 1]])), SLOTS, causal=True, rows=TOKEN_ROWS), 3, cached=True),
        "decode",
    ),
}


@pytest.fixture(autouse=True)
def _with_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that Triton is installed, as it is wherever torch supports CUDA."""
    monkeypatch.setattr(decode_attention, "available", True)


@pytest.mark.parametrize("name", TABLE)
def test_chosen_backend(name: str) -> None:
    s, expected = TABLE[name]
    assert choose_backend(s).name == expected


def test_names_are_distinct_and_each_is_chosen_somewhere() -> None:
    names = [backend.name for backend in BACKENDS]
    assert len(set(names)) == len(names)
    assert {expected for _, expected in TABLE.values()} == set(names)


def test_a_mixed_batch_without_the_decode_kernel_is_refused() -> None:
    s, _ = TABLE["mixed batch"]
    with pytest.raises(InputError, match="no attention backend of decode, flex, sdpa, explicit supports"):
        choose_backend(replace(s, device=CPU))


def test_without_triton_the_decode_kernel_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_attention, "available", False)
    assert choose_backend(TABLE["decoding"][0]).name == "sdpa"


def test_decode_gets_key_counts_and_rows() -> None:
    one = Decode.prepare(TABLE["drafts"][0])
    assert one.key_counts.tolist() == [[6, 7, 8], [10, 11, 12]]
    assert one.rows.tolist() == [0, 1]
    mixed = Decode.prepare(TABLE["mixed batch"][0])
    assert (mixed.key_counts.tolist(), mixed.rows.tolist()) == ([[6, 1, 2]], [[0, 1, 1]])


def backends_of(model: torch.nn.Module, ids: Tensor, **arguments: Tensor) -> set[str]:
    with capture_attention(model, "pattern.*") as maps:
        model(ids, **arguments)
    return {one.kernel.backend for one in maps.values()}


def test_a_stack_chooses_from_its_own_backends() -> None:
    """A backend of one's own is a class put in front of the others."""
    prepared = []

    class Recorded(Sdpa):
        name: ClassVar[str] = "recorded"

        @classmethod
        def prepare(cls, s: Situation) -> Self:
            prepared.append(s.mask.window)
            return super().prepare(s)

    torch.manual_seed(0)
    model = gh.build(gh.preset("tiny-decoder", n_layers=4, windows=(3, 0), init="normal"), dtype=torch.float64).eval()
    ids = torch.randint(0, 256, (2, 9))
    expected = model(ids)
    assert backends_of(model, ids) == {"sdpa"}
    model.stack.backends = (Recorded, *BACKENDS)
    assert torch.equal(model(ids), expected)
    assert prepared == [0, 3]  # once for each window, not for each layer
    assert backends_of(model, ids) == {"recorded"}
    model.stack.backends = (Explicit,)
    assert backends_of(model, ids) == {"explicit"}
    assert (model(ids) - expected).abs().max() <= 1e-13 * expected.abs().max()


def test_dropout_is_a_fact_of_training_only() -> None:
    model = gh.build(gh.preset("tiny-decoder", attention_dropout=0.1))
    row = make_layout(torch.zeros(1, 4))
    facts = [
        model.train(mode).stack.situation(Mask(), row, row, torch.float32, cached=False).dropout
        for mode in (True, False)
    ]
    assert facts == [True, False]


def test_a_backend_is_an_abstract_class() -> None:
    with pytest.raises(TypeError, match="abstract"):
        Backend(Mask())  # type: ignore[abstract]
    assert issubclass(Sdpa, Backend)
    assert "softcap=2.0" in repr(Attend(1.0, 0.0, 2.0))


def test_mixed_prefill_needs_the_decode_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_attention, "is_supported", lambda *_: True)
    model = gh.build(gh.preset("tiny-decoder", attention_dropout=0.1))
    weight = model.token_embedding.table.weight
    assert not model.stack.supports_mixed_prefill(weight)  # dropout is active
    model.eval()
    assert model.stack.supports_mixed_prefill(weight)
    model.stack.backends = (Sdpa, Explicit)
    assert not model.stack.supports_mixed_prefill(weight)
