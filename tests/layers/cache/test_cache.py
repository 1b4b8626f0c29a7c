"""Each class of the KV cache alone, against a Python list of tokens per row."""

from __future__ import annotations

import math
import random

import pytest
import torch
from torch import Tensor

from glasshouse.errors import InputError
from glasshouse.layers.attend.layout import Layout, make_layout
from glasshouse.layers.cache import Cache, CacheView, KVShape, MixedBatch, PackedPrefill, SourceCache

FULL, WINDOWED, WIDE = KVShape(2, 3), KVShape(2, 3, window=4), KVShape(1, 5)
SHAPES = [FULL, WINDOWED, FULL, WIDE, WINDOWED]
BATCH, MAX_LEN = 3, 20

Tokens = list[list[float]]  # the tokens of each row


def make_cache(chunk: int | None = None, source: SourceCache | None = None) -> Cache:
    return Cache(SHAPES, BATCH, MAX_LEN, chunk=chunk, source=source, like=torch.zeros((), dtype=torch.float64))


def vectors(tokens: Tensor, layer: int, shape: KVShape) -> tuple[Tensor, Tensor]:
    """Return keys and values [B, H_kv, S, d] that differ by token, layer, head and coordinate."""
    heads = torch.arange(shape.n_kv_heads)[:, None, None] * 0.01 + torch.arange(shape.d_head) * 0.001
    keys = tokens[:, None, :, None] + heads + layer * 0.1
    return keys, -keys


def write(view: CacheView, tokens: Tensor, **arguments: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Do with a cache what a stack and its layers do; return the keys and values each layer attends to."""
    layout = make_layout(tokens, start=view.start_positions(), **arguments)
    slots = view.write_offsets(layout)
    layouts = [view.key_layout(layout, shape.window) for shape in SHAPES]
    found = []
    for layer, shape in enumerate(SHAPES):
        found.append(view.update(layer, slots[shape.window], *vectors(tokens.double(), layer, shape)))
        assert layouts[layer].positions.shape[1] == found[-1][0].shape[2]
    view.advance(layout)
    return found


def assert_holds(cache: Cache, rows: Tokens) -> None:
    """The keys that a next token would see are those of the lists: all, or the last ones in a window."""
    assert cache.lengths.tolist() == [len(row) for row in rows]
    nothing = Layout(torch.zeros(len(rows), 0, dtype=torch.long))
    for layer, shape in enumerate(SHAPES):
        layout = cache.key_layout(nothing, shape.window)
        positions = layout.positions.expand(len(rows), -1)
        real = torch.ones_like(positions, dtype=torch.bool) if layout.real is None else layout.real
        keys, values = cache.cached_kv(layer)
        for number, row in enumerate(rows):
            there = zip(positions[number].tolist(), real[number].tolist(), strict=True)
            slot_of = {position: slot for slot, (position, here) in enumerate(there) if here}
            needed = range(max(0, len(row) - shape.window) if shape.window else 0, len(row))
            slots = [slot_of[position] for position in needed]
            tokens = torch.tensor([[row[position] for position in needed]], dtype=torch.float64)
            k, v = vectors(tokens, layer, shape)
            assert torch.equal(keys[number, :, slots], k[0]), (layer, number)
            assert torch.equal(values[number, :, slots], v[0]), (layer, number)


@pytest.mark.few(4)
@pytest.mark.parametrize("chunk", [None, 3])
@pytest.mark.parametrize("seed", range(4))
def test_cache_equals_lists(seed: int, chunk: int | None) -> None:
    """Chunks with and without padding, copies and clears; windowed layers have ring buffers if the chunk is small."""
    source = random.Random(seed)
    cache, rows = make_cache(chunk), [[] for _ in range(BATCH)]
    token = 1
    for _ in range(20):
        longest = max(len(row) for row in rows)
        width = min(source.randint(1, 3), MAX_LEN - longest)
        if width == 0 or source.random() < 0.2:
            a, b = source.sample(range(BATCH), 2)
            cache.copy_row(a, b, 0, len(rows[a]))
            rows[b] = rows[a][:]
            cache.clear_row(a)
            rows[a] = []
        else:
            ids = torch.arange(token, token + BATCH * width).view(BATCH, width)
            token += BATCH * width
            lengths = [source.randint(0, width) for _ in range(BATCH)]
            padded = {"lengths": torch.tensor(lengths)} if source.random() < 0.5 else {}
            write(cache, ids, **padded)
            for row, new, count in zip(rows, ids.tolist(), lengths if padded else [width] * BATCH, strict=True):
                row += new[:count]
        assert_holds(cache, rows)


def test_narrowed_cache_is_a_view_of_rows_and_positions() -> None:
    cache, rows = make_cache(chunk=3), [[] for _ in range(BATCH)]
    for step in range(12):
        view = cache.narrow(slice(1, 3), step + 1)
        assert (view.max_len, len(view.lengths)) == (step + 1, 2)
        found = write(view, torch.tensor([[step + 1.0], [step + 101.0]]))
        assert [k.shape[2] for k, _ in found] == [step + 1, min(step + 1, 7), step + 1, step + 1, min(step + 1, 7)]
        rows[1].append(step + 1.0)
        rows[2].append(step + 101.0)
        assert_holds(cache, rows)
        assert_holds(view, rows[1:])
    with pytest.raises(InputError, match="max_len = 12 tokens per row, but 13 are needed"):
        write(cache.narrow(slice(1, 3), 12), torch.zeros(2, 1))
    with pytest.raises(InputError, match="4 tokens per row, but the cache was made for chunk = 3"):
        write(cache, torch.zeros(3, 4))


@pytest.mark.parametrize("chunk", [None, 3])
def test_packed_prefill_writes_sequences_to_their_rows(chunk: int | None) -> None:
    """More tokens than a ring buffer has slots: the last ones stay."""
    cache = make_cache(chunk)
    first, second = [float(n) for n in range(1, 12)], [float(n) for n in range(50, 53)]
    tokens = torch.tensor([first + second])
    row_of = torch.tensor([2] * len(first) + [0] * len(second))
    view = PackedPrefill(cache, row_of)
    assert view.start_positions() is None
    layout = make_layout(tokens, documents=row_of[None])
    assert view.key_layout(layout, 0) is layout
    if chunk is not None:  # a ring of 7 slots: the first 4 tokens go where padding goes
        assert view.write_offsets(layout)[4].tolist() == [[0, 0, 0, 0, 5, 6, 7, 1, 2, 3, 4, 1, 2, 3]]
    found = write(view, tokens, documents=row_of[None])
    for layer, (k, v) in enumerate(found):  # tokens attend to those of the call
        assert all(
            torch.equal(a, b) for a, b in zip((k, v), vectors(tokens.double(), layer, SHAPES[layer]), strict=True)
        )
    assert_holds(cache, [second, [], first])
    assert not cache.keys[0][1].any()
    assert not cache.values[4][1].any()


def test_mixed_batch_continues_rows_in_any_order() -> None:
    shapes = [FULL, WIDE]
    cache = Cache(shapes, BATCH, MAX_LEN, like=torch.zeros((), dtype=torch.float64))
    rows: Tokens = [[1.0, 2.0], [], [3.0]]
    for number, row in enumerate(rows):
        for position, token in enumerate(row):
            batch = MixedBatch(cache, torch.tensor([number]), torch.tensor([position]))
            write_mixed(batch, torch.tensor([[token]]), shapes)
    order = [(2, 1, 7.0), (1, 0, 8.0), (0, 2, 9.0), (1, 1, 10.0), (1, 2, 11.0)]  # row, position, token
    number, position, token = (torch.tensor(column) for column in zip(*order, strict=True))
    batch = MixedBatch(cache, number, position)
    assert batch.rows is not None
    assert batch.rows.tolist() == [[2, 1, 0, 1, 1]]
    real = torch.tensor([[True, True, True, True, False]])  # the last is padding
    found = write_mixed(batch, token[None], shapes, mask=real)
    for row, _, one in order[:-1]:
        rows[row].append(one)
    assert cache.lengths.tolist() == [3, 2, 2]
    for layer, (keys, values) in enumerate(found):
        assert keys.shape == (BATCH, shapes[layer].n_kv_heads, MAX_LEN, shapes[layer].d_head)
        for row, tokens in enumerate(rows):
            k, v = vectors(torch.tensor([tokens], dtype=torch.float64), layer, shapes[layer])
            assert torch.equal(keys[row, :, : len(tokens)], k[0])
            assert torch.equal(values[row, :, : len(tokens)], v[0])
            assert not keys[row, :, len(tokens) :].any()


def write_mixed(
    view: MixedBatch, tokens: Tensor, shapes: list[KVShape], **arguments: Tensor
) -> list[tuple[Tensor, Tensor]]:
    layout = make_layout(tokens, start=view.start_positions(), **arguments)
    slots = view.write_offsets(layout)
    found = [
        view.update(layer, slots[shape.window], *vectors(tokens.double(), layer, shape))
        for layer, shape in enumerate(shapes)
    ]
    view.advance(layout)
    return found


def test_source_cache_holds_each_row_of_a_source() -> None:
    like = torch.zeros((), dtype=torch.float64)
    source = SourceCache([FULL, WIDE], BATCH, 6, like=like)
    cache = make_cache(source=source)
    tokens, lengths = torch.arange(1.0, 13).view(3, 4), torch.tensor([4, 1, 3])
    assert not source.filled
    source.store_layout(make_layout(tokens, lengths=lengths))
    for layer, shape in enumerate((FULL, WIDE)):
        source.store(layer, *vectors(tokens.double(), layer, shape))
    assert source.filled
    cache.copy_row(2, 0, 0, 0)
    cache.clear_row(1)
    view = cache.narrow(slice(0, 2), source_len=3).source
    assert view is not None
    for one, rows, kept in ((source, (2, None, 2), 6), (view, (2, None), 3)):
        layout = one.layout()
        assert layout.positions.tolist() == [list(range(kept))]
        for number, origin in enumerate(rows):
            for layer, shape in enumerate((FULL, WIDE)):
                k, v = vectors(tokens.double(), layer, shape)
                expected = torch.zeros(2, shape.n_kv_heads, kept, shape.d_head, dtype=torch.float64)
                if origin is not None:
                    expected[0, :, :4], expected[1, :, :4] = k[origin, :, :kept], v[origin, :, :kept]
                    assert layout.real is not None
                    assert layout.real[number].tolist() == [n < int(lengths[origin]) for n in range(kept)]
                assert torch.equal(one.keys[layer][number], expected[0])
                assert torch.equal(one.values[layer][number], expected[1])
    with pytest.raises(InputError, match="7 tokens long, but the cache has source_len = 6"):
        source.store_layout(make_layout(torch.zeros(3, 7)))


def test_bytes_and_rings() -> None:
    like = torch.zeros((), dtype=torch.float64)
    token = 2 * 8 * BATCH  # bytes of a key and a value of width 1 in every row
    wholly, ringed = make_cache(), make_cache(chunk=3, source=SourceCache([FULL], BATCH, 6, like=like))
    assert wholly.n_bytes == token * (4 * 6 + 5) * (MAX_LEN + 1)
    assert ringed.n_bytes == token * ((2 * 6 + 5) * (MAX_LEN + 1) + 2 * 6 * (4 + 3 + 1) + 6 * 6)
    # In a ring of 4 + 3 slots, a row that drops more than 3 tokens lacks a part of the window before them.
    assert (wholly.max_rollback, ringed.max_rollback) == (math.inf, 3)
    assert repr(wholly) == f"Cache(3 rows of 20 tokens, {wholly.n_bytes:,} bytes)"


@pytest.mark.parametrize("chunk", [None, 3])
def test_part_of_a_row_is_cleared_where_it_is_contiguous(chunk: int | None) -> None:
    cache = make_cache(chunk)
    write(cache, torch.arange(1.0, 10).view(3, 3))
    cache.clear_row(1, 2)
    assert cache.lengths.tolist() == [3, 2, 3]
    for layer, shape in enumerate(SHAPES):
        ring = chunk is not None and shape.window > 0  # any slot may be in use
        assert cache.keys[layer][1, 0, 1:].ne(0).any(-1).sum() == (3 if ring else 2)
        assert cache.keys[layer][0, 0, 1:].ne(0).any(-1).sum() == 3


def test_a_copied_part_of_a_row_leaves_the_others() -> None:
    """Of layers that keep every token: a ring buffer is copied whole."""
    cache = make_cache()
    write(cache, torch.arange(1, 13).view(BATCH, 4))
    cache.copy_row(0, 2, 1, 3)
    for layer, shape in enumerate(SHAPES):
        expected, _ = vectors(torch.tensor([[9.0, 2.0, 3.0, 12.0]], dtype=torch.float64), layer, shape)
        assert cache.cached_kv(layer)[0][2:, :, :4].equal(expected)
