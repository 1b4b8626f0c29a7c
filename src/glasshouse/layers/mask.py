"""Attention masks, in the form that the kernel takes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from glasshouse.layers.layout import Layout

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # batch, head, query, key -> may attend


@dataclass(frozen=True)
class Mask:
    """An attention mask in one of five forms: none, causal, key counts, a dense tensor, or a block mask."""

    causal: bool = False  # causal mask, implemented by the kernel
    dense: Tensor | None = None  # broadcasts to [B, H, Q, K]: bool, True where attended; or float, to be added
    block_mask: BlockMask | None = None  # FlexAttention's form, for masks too large to materialise
    key_counts: Tensor | None = None  # [B, Q]: each query attends to this many leading keys
    cache_rows: Tensor | None = None  # with key_counts, [B] or [1, Q]: the cache row of each row, or query

    def to_dense(
        self, n_queries: int, n_keys: int, device: torch.device, queries: slice = slice(None)
    ) -> Tensor | None:
        """Return the dense form, for some of the queries; None if nothing is masked."""
        if self.causal:
            return torch.arange(n_keys, device=device) <= torch.arange(n_queries, device=device)[queries, None]
        if self.block_mask is not None:
            return _evaluate(self.block_mask.mask_mod, self.block_mask.shape[0], n_queries, n_keys, device, queries)
        if self.key_counts is not None:
            return (torch.arange(n_keys, device=device) < self.key_counts[:, queries, None])[:, None]
        if self.dense is None or self.dense.dim() < 2 or self.dense.shape[-2] == 1:  # the same for all queries
            return self.dense
        return self.dense[..., queries, :]


def make_mask(
    queries: Layout,
    keys: Layout,
    *,
    causal: bool,
    dtype: torch.dtype,
    window: int = 0,
    bias: Tensor | None = None,
    flex: bool = False,
    cache_rows: Tensor | None = None,
) -> Mask:
    """Build the mask of an attention layer with scores of a `dtype`.

    `flex` allows block masks; `cache_rows`, those of a cache, allow key counts where they suffice.

    >>> row = Layout(torch.arange(3)[None])
    >>> make_mask(row, row, causal=True, dtype=torch.float32)
    Mask(causal=True, dense=None, block_mask=None, key_counts=None, cache_rows=None)
    >>> make_mask(row, row, causal=True, dtype=torch.float32, window=2).dense.long()
    tensor([[[[1, 0, 0],
              [1, 1, 0],
              [0, 1, 1]]]])
    """
    same = queries is keys
    n_queries, n_keys = queries.positions.shape[1], keys.positions.shape[1]
    device = queries.positions.device
    if same and window >= n_keys:
        window = 0  # wider than the sequence
    # Right padding follows every real token, so the causal mask hides it already.
    hidden = keys.real is not None and not (same and causal and keys.right_padded and queries.prefix_lengths is None)
    packed = queries.documents is not None and keys.documents is not None
    if not (hidden or packed or window or (causal and (queries.prefix_lengths is not None or not same))):
        if bias is None:
            return Mask(causal=causal)
        if not causal:
            return Mask(dense=bias)

    plain = bias is None and not (hidden or window) and queries.prefix_lengths is None
    if cache_rows is not None and causal and keys.ordered and plain:
        return Mask(key_counts=queries.positions + 1, cache_rows=cache_rows)
    if _sees_all(queries, keys, causal) and not (hidden or packed or window):
        return Mask(dense=bias)
    batch = max(len(t) for layout in (queries, keys) for t in _tensors(layout))
    mask_mod = _make_mask_mod(queries, keys, batch, causal=causal, window=window, hidden=hidden, packed=packed)
    # Below one block of queries FlexAttention gains nothing, and does not support some shapes.
    if flex and bias is None and (packed or window) and n_queries >= 128 and device.type == "cuda":
        make_block_mask = create_block_mask if torch.compiler.is_compiling() else _compiled_create_block_mask()
        return Mask(block_mask=make_block_mask(mask_mod, batch if batch > 1 else None, None, n_queries, n_keys))
    visible = _evaluate(mask_mod, batch, n_queries, n_keys, device)
    if bias is None and (device.type == "cuda" or (n_queries == 1 and not same)):
        # cuDNN treats a row of False as one of True, but a row of -inf correctly, as 0. On the CPU, every layer would
        # convert the bool mask again.
        bias = torch.zeros((), dtype=dtype, device=device)
    return Mask(dense=visible if bias is None else bias.masked_fill(~visible, -torch.inf))


def _sees_all(queries: Layout, keys: Layout, causal: bool) -> bool:
    """Whether each row's only query is at its last key; not checked on a GPU, which would synchronise."""
    last = queries.positions[:, -1]
    if not (causal and keys.ordered and queries.positions.shape[1] == 1 and last.is_cpu):
        return False
    return not torch.compiler.is_compiling() and bool((last >= keys.positions.shape[1] - 1).all())


def _evaluate(
    mask_mod: MaskMod, batch: int, n_queries: int, n_keys: int, device: torch.device, queries: slice = slice(None)
) -> Tensor:
    """Evaluate a mask function for every pair, [B, 1, Q, K]."""
    b, q, k = (torch.arange(n, device=device) for n in (batch, n_queries, n_keys))
    return mask_mod(b[:, None, None, None], b[:1], q[queries, None], k)


def _make_mask_mod(
    queries: Layout, keys: Layout, batch: int, *, causal: bool, window: int, hidden: bool, packed: bool
) -> MaskMod:
    # Rows may share one row of positions, but the mask function indexes by row, so it is expanded.
    q_position, k_position = queries.positions.expand(batch, -1), keys.positions.expand(batch, -1)
    # Within a row documents are told apart by their number, across source and target by the caller's ids.
    same = queries is keys
    q_document, k_document = (layout.documents if same else layout.document_ids for layout in (queries, keys))
    # As a tensor: the compiled function is then the same for all windows.
    reach = torch.full((), window, device=q_position.device)

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        conditions = []
        if causal:
            causal_ok = k_position[b, k] <= q_position[b, q]
            if queries.prefix_lengths is not None:
                prefix = queries.prefix_lengths[b, q]
                causal_ok = causal_ok | ((q_position[b, q] < prefix) & (k_position[b, k] < prefix))
            conditions.append(causal_ok)
        if window:
            conditions.append((k_position[b, k] - q_position[b, q]).abs() < reach)
        if hidden:
            assert keys.real is not None
            conditions.append(keys.real[b, k])
        if packed:
            assert q_document is not None
            assert k_document is not None
            conditions.append(q_document[b, q] == k_document[b, k])
        return functools.reduce(torch.logical_and, conditions)

    return mask_mod


def _tensors(layout: Layout) -> list[Tensor]:
    return [t for t in (layout.positions, layout.real, layout.documents, layout.prefix_lengths) if t is not None]


@functools.cache
def _compiled_create_block_mask() -> Callable[..., Any]:
    # Eager mode would materialise the dense mask first, so it stays compiled whatever runs around it.
    return torch.compiler.set_stance("default")(torch.compile(create_block_mask))
