"""Attention with its projections; multi-head, grouped-query and multi-query are one module."""

from __future__ import annotations

from torch import Tensor, nn

from glasshouse import spec
from glasshouse.layers.attend import Attend
from glasshouse.layers.cache import KVShape
from glasshouse.layers.context import Context
from glasshouse.layers.norm import make_norm


class Attention(nn.Module):
    """Self-attention."""

    def __init__(self, s: spec.TransformerSpec, index: int) -> None:
        super().__init__()
        d_query, d_key = s.n_heads * s.d_head, s.n_kv_heads * s.d_head
        self.index = index
        self.window = s.window(index)
        self.kv_shape = KVShape(s.n_kv_heads, s.d_head, self.window)
        self.d_head = s.d_head
        self.query = nn.Linear(s.d_model, d_query, bias=s.qkv_bias)
        self.key = nn.Linear(s.d_model, d_key, bias=s.qkv_bias)
        self.value = nn.Linear(s.d_model, d_key, bias=s.qkv_bias)
        self.q_norm, self.k_norm = make_qk_norms(s)
        self.attend = Attend(scale_of(s), s.attention_dropout, s.attention_softcap)
        self.out = nn.Linear(d_query, s.d_model, bias=s.out_bias)

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        """Apply self-attention to x [B, S, D]."""
        q, k, v = (split_heads(project(x), self.d_head) for project in (self.query, self.key, self.value))
        return self.out(merge_heads(self.attend_heads(q, k, v, ctx)))

    def attend_heads(self, q: Tensor, k: Tensor, v: Tensor, ctx: Context) -> Tensor:
        """Normalise and rotate q and k, update the cache, and attend; q is [B, H, S, d]."""
        q, k = ctx.rotate(self.q_norm(q)), ctx.rotate(self.k_norm(k))
        if ctx.cache is not None:
            k, v = ctx.cache.update(self.index, ctx.slot_mapping[self.window], k, v)
        return self.attend(q, k, v, ctx.backends[self.window])


class CrossAttention(nn.Module):
    """Cross-attention: queries from the decoder, keys and values from the encoder's output."""

    def __init__(self, s: spec.TransformerSpec, index: int) -> None:
        super().__init__()
        d_query, d_key = s.n_heads * s.d_head, s.n_kv_heads * s.d_head
        self.index = index
        self.kv_shape = KVShape(s.n_kv_heads, s.d_head)
        self.d_head = s.d_head
        self.query = nn.Linear(s.d_model, d_query, bias=s.qkv_bias)
        self.key = nn.Linear(s.d_model, d_key, bias=s.qkv_bias)
        self.value = nn.Linear(s.d_model, d_key, bias=s.qkv_bias)
        self.q_norm, self.k_norm = make_qk_norms(s)
        self.attend = Attend(scale_of(s), s.attention_dropout, s.attention_softcap)
        self.out = nn.Linear(d_query, s.d_model, bias=s.out_bias)

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        """Apply cross-attention to x [B, T, D]."""
        q = self.q_norm(split_heads(self.query(x), self.d_head))
        k, v = self.source_kv(ctx)
        z = self.attend(q, k, v, ctx.cross_backend)
        return self.out(merge_heads(z))

    def source_kv(self, ctx: Context) -> tuple[Tensor, Tensor]:
        """Return the keys and values of the source: those in the cache, or else from the encoder's output."""
        if ctx.memory is not None:
            return self.project_source(ctx.memory)
        assert ctx.cache is not None
        assert ctx.cache.source is not None
        return ctx.cache.source.keys[self.index], ctx.cache.source.values[self.index]

    def project_source(self, memory: Tensor) -> tuple[Tensor, Tensor]:
        """Map the encoder's output [B, source, D] to keys and values [B, H_kv, source, d]."""
        k, v = (split_heads(project(memory), self.d_head) for project in (self.key, self.value))
        return self.k_norm(k), v


def split_heads(x: Tensor, d_head: int) -> Tensor:
    """[B, S, H * d] -> [B, H, S, d]."""
    return x.view(*x.shape[:-1], x.shape[-1] // d_head, d_head).transpose(1, 2)


def merge_heads(z: Tensor) -> Tensor:
    """[B, H, S, d] -> [B, S, H * d]."""
    return z.transpose(1, 2).flatten(-2)


def scale_of(s: spec.TransformerSpec) -> float:
    """Return the scale of the attention scores."""
    return s.d_head**-0.5 if s.attention_scale is None else s.attention_scale


def make_qk_norms(s: spec.TransformerSpec) -> tuple[nn.Module, nn.Module]:
    """Return the norms of queries and keys per head, or two identities."""
    if s.qk_norm:
        return make_norm(s.norm, s.d_head), make_norm(s.norm, s.d_head)
    return nn.Identity(), nn.Identity()
