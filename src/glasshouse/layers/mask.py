"""Which keys a query may see: one rule, drawn in the form that the kernel at hand takes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from glasshouse.layers.layout import Layout

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # batch, head, query, key -> may see


@dataclass(frozen=True)
class Mask:
    """The same rule in one of five forms: nothing to hide, causal order, counts, a dense tensor, or blocks."""

    causal: bool = False  # each query sees the keys up to its own place, and the kernel knows how
    dense: Tensor | None = None  # broadcasts to [B, H, Q, K]: bool, True where seen; or float, to be added
    block_mask: BlockMask | None = None  # FlexAttention's form, for a rule too large to draw
    key_counts: Tensor | None = None  # [B, Q]: each query sees so many keys from the first on
    cache_rows: Tensor | None = (
        None  # with counts, [B] or [1, Q]: the row of the keys that each row, or query, looks at
    )

    def to_dense(
        self, n_queries: int, n_keys: int, device: torch.device, queries: slice = slice(None)
    ) -> Tensor | None:
        """Return the dense form of whichever form this is, for some of the queries; None where nothing is hidden."""
        if self.causal:
            return torch.arange(n_keys, device=device) <= torch.arange(n_queries, device=device)[queries, None]
        if self.block_mask is not None:
            return _draw(self.block_mask.mask_mod, self.block_mask.shape[0], n_queries, n_keys, device, queries)
        if self.key_counts is not None:
            return (torch.arange(n_keys, device=device) < self.key_counts[:, queries, None])[:, None]
        if self.dense is None or self.dense.dim() < 2 or self.dense.shape[-2] == 1:  # one row for all queries
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
    """Draw the mask of one attention layer over scores of a `dtype`.

    `flex` allows blocks where it would be large; `rows`, a cache's, allow counts where they say it all.

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
        window = 0  # wider than the text
    # Padding at the end lies in the future of every real token, so the causal order hides it already.
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
    rule = _rule(queries, keys, batch, causal=causal, window=window, hidden=hidden, packed=packed)
    # Below one block of queries, the kernels of blocks gain nothing, and some shapes have none.
    if flex and bias is None and (packed or window) and n_queries >= 128 and device.type == "cuda":
        draw = create_block_mask if torch.compiler.is_compiling() else _compiled_draw()
        return Mask(block_mask=draw(rule, batch if batch > 1 else None, None, n_queries, n_keys))
    seen = _draw(rule, batch, n_queries, n_keys, device)
    if bias is None and (device.type == "cuda" or (n_queries == 1 and not same)):
        # cuDNN takes a row of False for one of True; a row of -inf it understands, and gives 0. On the CPU, every
        # layer would make such numbers of a bool for itself.
        bias = torch.zeros((), dtype=dtype, device=device)
    return Mask(dense=seen if bias is None else bias.masked_fill(~seen, -torch.inf))


def _sees_all(queries: Layout, keys: Layout, causal: bool) -> bool:
    """Whether each row's only query stands at its last key; not asked of a GPU, as the host would wait."""
    last = queries.positions[:, -1]
    if not (causal and keys.ordered and queries.positions.shape[1] == 1 and last.is_cpu):
        return False
    return not torch.compiler.is_compiling() and bool((last >= keys.positions.shape[1] - 1).all())


def _draw(
    rule: MaskMod, batch: int, n_queries: int, n_keys: int, device: torch.device, queries: slice = slice(None)
) -> Tensor:
    """Evaluate a rule for every pair, [B, 1, Q, K]."""
    b, q, k = (torch.arange(n, device=device) for n in (batch, n_queries, n_keys))
    return rule(b[:, None, None, None], b[:1], q[queries, None], k)


def _rule(
    queries: Layout, keys: Layout, batch: int, *, causal: bool, window: int, hidden: bool, packed: bool
) -> MaskMod:
    # Rows of one batch may share one row of positions; the rule indexes by row, so that one is spread over all.
    q_position, k_position = queries.positions.expand(batch, -1), keys.positions.expand(batch, -1)
    # Within one row documents are told apart by their count, across source and target by the caller's numbers.
    same = queries is keys
    q_document, k_document = (layout.documents if same else layout.document_ids for layout in (queries, keys))
    # As a tensor: a compiled rule is then one for all windows.
    reach = torch.full((), window, device=q_position.device)

    def rule(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        seen = []
        if causal:
            behind = k_position[b, k] <= q_position[b, q]
            if queries.prefix_lengths is not None:
                prefix = queries.prefix_lengths[b, q]
                behind = behind | ((q_position[b, q] < prefix) & (k_position[b, k] < prefix))
            seen.append(behind)
        if window:
            seen.append((k_position[b, k] - q_position[b, q]).abs() < reach)
        if hidden:
            assert keys.real is not None
            seen.append(keys.real[b, k])
        if packed:
            assert q_document is not None
            assert k_document is not None
            seen.append(q_document[b, q] == k_document[b, k])
        return functools.reduce(torch.logical_and, seen)

    return rule


def _tensors(layout: Layout) -> list[Tensor]:
    return [t for t in (layout.positions, layout.real, layout.documents, layout.prefix_lengths) if t is not None]


@functools.cache
def _compiled_draw() -> Callable[..., Any]:
    # Uncompiled, it would draw the dense mask first; so it stays compiled whatever runs around it.
    return torch.compiler.set_stance("default")(torch.compile(create_block_mask))
