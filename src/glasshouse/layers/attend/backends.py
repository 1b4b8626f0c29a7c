"""The attention backends, and the choice of one for a call.

A backend is a class here: `supports` returns whether its kernel can run a call, `prepare` converts the mask to the
form that the kernel takes, once for all layers with that mask, and `attend` runs the kernel. To add one, add a class;
its place in `BACKENDS`, or in the `backends` of a stack, is its priority.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self, cast

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from glasshouse.errors import InputError
from glasshouse.layers.attend import decode as decode_attention
from glasshouse.layers.attend.kernel import Attend, Backend, Situation, repeat_kv


@dataclass(frozen=True)
class Decode(Backend):
    """The decode-attention kernel on a GPU: a few queries per sequence, each over the leading keys of a cache."""

    name: ClassVar[str] = "decode"
    key_counts: Tensor  # [B, Q]
    rows: Tensor  # [B] or [1, Q]: the cache row of each row, or query

    @staticmethod
    def supports(s: Situation) -> bool:
        if s.softcap or s.dropout or not s.cached or s.mask.rows is None or not s.mask.has_key_counts:
            return False
        n_queries = 1 if s.mask.is_mixed else s.n_queries
        return decode_attention.is_supported(s.device, s.dtype, s.group_size * n_queries)

    @classmethod
    def prepare(cls, s: Situation) -> Self:
        rows = s.mask.rows
        assert rows is not None
        return cls(s.mask, s.mask.key_counts(), rows if s.mask.is_mixed else rows[:, 0])

    def attend(self, q: Tensor, k: Tensor, v: Tensor, settings: Attend) -> Tensor:
        return decode_attention.attend(q, k, v, self.key_counts, self.rows, settings.scale)


@dataclass(frozen=True)
class Flex(Backend):
    """FlexAttention on a GPU, for masks with many empty blocks, which are skipped and never materialised."""

    name: ClassVar[str] = "flex"
    block_mask: BlockMask

    @staticmethod
    def supports(s: Situation) -> bool:
        # Below one block of queries FlexAttention gains nothing, and does not support some shapes; nor does it
        # support narrow heads, float64 and dropout.
        able = not (s.softcap or s.dropout or s.cached) and s.d_head >= 16 and s.dtype != torch.float64
        sparse = s.mask.bias is None and (bool(s.mask.window) or s.mask.documents is not None)
        return able and sparse and s.device.type == "cuda" and s.n_queries >= 128

    @classmethod
    def prepare(cls, s: Situation) -> Self:
        make_block_mask = create_block_mask if torch.compiler.is_compiling() else _compiled_create_block_mask()
        batch = s.mask.batch
        return cls(
            s.mask, make_block_mask(s.mask.mask_mod(), batch if batch > 1 else None, None, s.n_queries, s.n_keys)
        )

    def attend(self, q: Tensor, k: Tensor, v: Tensor, settings: Attend) -> Tensor:
        kernel = cast(Any, flex_attention) if torch.compiler.is_compiling() else _compiled_flex_attention()
        grouped = q.shape[1] != k.shape[1]
        # Scaled here: FlexAttention compiles anew for each scale.
        result: Tensor = kernel(q * settings.scale, k, v, block_mask=self.block_mask, scale=1.0, enable_gqa=grouped)
        return result


@dataclass(frozen=True)
class Sdpa(Backend):
    """Torch's scaled_dot_product_attention, which chooses a fused kernel; weights are never materialised."""

    name: ClassVar[str] = "sdpa"
    causal: bool = False  # a causal mask by index, which the kernel implements
    dense: Tensor | None = None  # broadcasts to [B, H, Q, K]: bool, True where attended; or float, to be added

    @staticmethod
    def supports(s: Situation) -> bool:
        return not (s.softcap or s.mask.is_mixed)

    @classmethod
    def prepare(cls, s: Situation) -> Self:
        if s.mask.causal and s.mask.positions is None:
            return cls(s.mask, causal=True)
        dense = s.mask.to_dense(s.n_queries, s.n_keys, s.device)
        if dense is not None and dense.dtype == torch.bool and (s.device.type == "cuda" or s.n_queries == 1):
            # cuDNN treats a row of False as one of True, but a row of -inf correctly, as 0. On the CPU, every layer
            # would convert the bool mask again.
            dense = torch.zeros((), dtype=s.dtype, device=s.device).masked_fill(~dense, -torch.inf)
        return cls(s.mask, dense=dense)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, settings: Attend) -> Tensor:
        grouped = q.shape[1] != k.shape[1]
        dense = self.dense
        if dense is not None and dense.is_floating_point():
            dense = dense.to(q.dtype)  # under autocast the two may differ
        if grouped and q.shape[2] == 1:
            return self._attend_folded(q, k, v, dense, settings)
        return F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=dense,
            dropout_p=settings.dropout_now,
            is_causal=self.causal,
            scale=settings.scale,
            enable_gqa=grouped,
        )

    def _attend_folded(self, q: Tensor, k: Tensor, v: Tensor, dense: Tensor | None, settings: Attend) -> Tensor:
        """Attend with one query per head, the heads of a group folded into queries: each key is loaded once."""
        folded = (q.shape[0], k.shape[1], -1, q.shape[3])
        if dense is not None and dense.shape[1] > 1:
            dense = dense.reshape(dense.shape[0], k.shape[1], -1, dense.shape[3])
        z = F.scaled_dot_product_attention(
            q.reshape(folded), k, v, attn_mask=dense, dropout_p=settings.dropout_now, scale=settings.scale
        )
        return z.reshape(q.shape)


@dataclass(frozen=True)
class Explicit(Backend):
    """Scores and weights as tensors, which can be capped, recorded and edited; slower than a fused kernel."""

    name: ClassVar[str] = "explicit"
    dense: Tensor | None = None  # broadcasts to [B, H, Q, K]: bool, True where attended; or float, to be added

    @staticmethod
    def supports(s: Situation) -> bool:
        return not s.mask.is_mixed

    @classmethod
    def prepare(cls, s: Situation) -> Self:
        return cls(s.mask, s.mask.to_dense(s.n_queries, s.n_keys, s.device))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, settings: Attend) -> Tensor:
        weights = settings.pattern(settings.scores(q, k, self.dense)).to(v.dtype)
        return F.dropout(weights, settings.dropout, settings.training) @ repeat_kv(v, q.shape[1])


BACKENDS: tuple[type[Backend], ...] = (Decode, Flex, Sdpa, Explicit)  # most preferred first


def choose_backend(s: Situation, backends: Sequence[type[Backend]] = BACKENDS) -> type[Backend]:
    """Return the first backend that supports a situation.

    >>> from glasshouse.layers.attend.mask import Mask
    >>> cpu, cuda = torch.device("cpu"), torch.device("cuda")
    >>> windowed = Mask(causal=True, window=64, positions=(torch.arange(512)[None], torch.arange(512)[None]))
    >>> choose_backend(Situation(windowed, 512, 512, cpu, torch.float32, d_head=64)).name
    'sdpa'
    >>> choose_backend(Situation(windowed, 512, 512, cuda, torch.bfloat16, d_head=64)).name
    'flex'
    """
    for backend in backends:
        if backend.supports(s):
            return backend
    names = ", ".join(backend.name for backend in backends)
    raise InputError(f"no attention backend of {names} supports this call; add one to the stack's backends.")


@functools.cache
def _compiled_flex_attention() -> Callable[..., Any]:
    # Eager FlexAttention materialises the scores, so it stays compiled while hooks make the rest run eagerly, and
    # beyond eight shapes, torch's default recompile limit.
    more_recompiles = torch._dynamo.config.patch(recompile_limit=64)
    return cast(
        Callable[..., Any], torch.compiler.set_stance("default")(more_recompiles(torch.compile(flex_attention)))
    )


@functools.cache
def _compiled_create_block_mask() -> Callable[..., Any]:
    # Uncompiled, it would materialise the dense mask first, so it is compiled even where the model runs eagerly.
    return torch.compiler.set_stance("default")(torch.compile(create_block_mask))
