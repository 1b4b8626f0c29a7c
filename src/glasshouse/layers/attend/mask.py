"""Attention masks: which keys a query may attend to, independent of the attention backend."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from glasshouse.layers.attend.layout import Layout
from glasshouse.layers.host_reads import can_read

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # batch, head, query, key -> may attend


@dataclass(frozen=True)
class Mask:
    """The conditions that a key must meet to be attended to, all of them, and the bias of the scores.

    Query tensors are [B, Q] and key tensors [B, K]; B is 1 where all rows are equal. Each attention backend converts
    a mask to the form that its kernel takes.
    """

    causal: bool = False  # keys up to the query's position
    window: int = 0  # keys less than this far from the query; 0: any
    positions: tuple[Tensor, Tensor] | None = None  # of queries and keys; None: their indices
    prefix_lengths: Tensor | None = None  # queries within the prefix attend to all keys of it
    real: Tensor | None = None  # keys that are not padding
    documents: tuple[Tensor, Tensor] | None = None  # of queries and keys, which must be equal
    bias: Tensor | None = None  # broadcasts to [B, H, Q, K], added to the scores
    ordered: bool = False  # key k is at position k, in all rows
    rows: Tensor | None = None  # broadcasts to [B, Q]: the row of the cache that a query attends to

    @property
    def has_key_counts(self) -> bool:
        """Whether the mask is nothing but a number of leading keys for each query."""
        return self.causal and self.ordered and not self._hides_more and self.prefix_lengths is self.bias is None

    def key_counts(self) -> Tensor:
        """Return the number of leading keys that each query attends to, [B, Q]."""
        assert self.positions is not None
        return self.positions[0] + 1

    @property
    def is_mixed(self) -> bool:
        """Whether queries of one row attend to several rows of a cache."""
        return self.rows is not None and self.rows.shape[1] > 1

    @property
    def batch(self) -> int:
        """Rows with a mask of their own: 1 if it is the same for all."""
        tensors = (self.prefix_lengths, self.real, *(self.positions or ()), *(self.documents or ()))
        return max([1, *(len(tensor) for tensor in tensors if tensor is not None)])

    def to_dense(
        self, n_queries: int, n_keys: int, device: torch.device, queries: slice | None = None
    ) -> Tensor | None:
        """Return it as a tensor that broadcasts to [B, H, Q, K], for some of the queries; None if nothing is masked.

        It is bool, True where attended, or, with a bias, float, to be added to the scores.
        """
        visible = self._visible(n_queries, n_keys, device, slice(None) if queries is None else queries)
        bias = self.bias
        if (
            bias is not None and queries is not None and bias.dim() > 1 and bias.shape[-2] > 1
        ):  # else the same for all queries
            bias = bias[..., queries, :]
        if bias is None or visible is None:
            return visible if bias is None else bias
        return bias.masked_fill(~visible, -torch.inf)

    def mask_mod(self) -> MaskMod:
        """Return it as a function of indices, FlexAttention's form."""
        assert self.positions is not None
        # Rows may share one row of positions, but the function indexes by row, so it is expanded.
        q_position, k_position = (positions.expand(self.batch, -1) for positions in self.positions)
        # As a tensor: the compiled function is then the same for all windows.
        reach = torch.full((), self.window, device=q_position.device)
        # As local variables: torch.compile would guard on every attribute of the mask.
        causal, windowed, prefix_lengths, real = self.causal, self.window > 0, self.prefix_lengths, self.real
        q_document, k_document = self.documents or (None, None)

        def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            conditions = []
            if causal:
                causal_ok = k_position[b, k] <= q_position[b, q]
                if prefix_lengths is not None:
                    prefix = prefix_lengths[b, q]
                    causal_ok = causal_ok | ((q_position[b, q] < prefix) & (k_position[b, k] < prefix))
                conditions.append(causal_ok)
            if windowed:
                conditions.append((k_position[b, k] - q_position[b, q]).abs() < reach)
            if real is not None:
                conditions.append(real[b, k])
            if q_document is not None and k_document is not None:
                conditions.append(q_document[b, q] == k_document[b, k])
            return functools.reduce(torch.logical_and, conditions)

        return mask_mod

    @property
    def _hides_more(self) -> bool:
        """Whether it hides keys that a causal mask does not."""
        return bool(self.window) or self.real is not None or self.documents is not None

    def _visible(self, n_queries: int, n_keys: int, device: torch.device, queries: slice) -> Tensor | None:
        """Return whether each query may attend to each key, [Q, K] or [B, 1, Q, K]; None if to all."""
        if self.positions is None:
            if not self.causal:
                return None
            return torch.arange(n_keys, device=device) <= torch.arange(n_queries, device=device)[queries, None]
        if self._is_last_key(n_queries, n_keys):
            return None
        mask_mod = self.mask_mod()
        b, q, k = (torch.arange(n, device=device) for n in (self.batch, n_queries, n_keys))
        return mask_mod(b[:, None, None, None], b[:1], q[queries, None], k)

    def _is_last_key(self, n_queries: int, n_keys: int) -> bool:
        """Whether each row's only query is at its last key; False where that cannot be read."""
        assert self.positions is not None
        last = self.positions[0][:, -1]
        if self._hides_more or not (self.causal and self.ordered and n_queries == 1 and can_read(last)):
            return False
        return bool((last >= n_keys - 1).all())


def make_mask(
    queries: Layout,
    keys: Layout,
    *,
    causal: bool,
    window: int = 0,
    bias: Tensor | None = None,
    rows: Tensor | None = None,
) -> Mask:
    """Return the mask of attention between two layouts, without conditions that hide nothing; `rows` as in `Mask`.

    >>> row = Layout(torch.arange(3)[None])
    >>> make_mask(row, row, causal=True) == Mask(causal=True)
    True
    >>> make_mask(row, row, causal=True, window=2).to_dense(3, 3, torch.device("cpu")).long()
    tensor([[[[1, 0, 0],
              [1, 1, 0],
              [0, 1, 1]]]])
    """
    same = queries is keys
    if same and not torch.compiler.is_exporting() and window >= keys.positions.shape[1]:
        window = 0  # wider than the sequence; an exported graph is for longer ones, too
    prefix_lengths = queries.prefix_lengths if causal else None
    # Right padding follows every real token, so the causal mask hides it already.
    hidden = keys.real is not None and not (same and causal and keys.right_padded and prefix_lengths is None)
    # Documents are identified by their number within a row, and by the caller's ids across source and target.
    documents = (queries.documents, keys.documents) if same else (queries.document_ids, keys.document_ids)
    packed = queries.documents is not None and keys.documents is not None
    if not (hidden or packed or window or (causal and (prefix_lengths is not None or not same))) and (
        bias is None or not causal
    ):
        return Mask(causal=causal, bias=bias)
    return Mask(
        causal,
        window,
        (queries.positions, keys.positions),
        prefix_lengths,
        keys.real if hidden else None,
        documents if packed else None,  # type: ignore[arg-type]
        bias,
        keys.ordered,
        rows,
    )
