"""Attention with its projections; multi-head, grouped-query and multi-query are one module."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor, nn

from glasshouse import registry, spec
from glasshouse.layers.attend.kernel import Attend
from glasshouse.layers.cache import KVShape
from glasshouse.layers.context import Context
from glasshouse.layers.flops import FlopCount, is_trained
from glasshouse.layers.linear.linear import Linear
from glasshouse.layers.norm import make_norm
from glasshouse.layers.sublayer import INSIDE, PAIRS, VECTORS, LayerSite, Sublayer
from glasshouse.layers.value_embedding import NoValueEmbedding, ValueEmbedding


class MultiHeadAttention(Sublayer):
    """The projections and the kernel that self-attention and cross-attention share."""

    prefix: ClassVar[str] = ""  # of the names of its sites
    residual_input = "z"

    def __init__(self, s: spec.TransformerSpec, index: int) -> None:
        super().__init__()
        d_query, d_key = s.n_heads * s.d_head, s.n_kv_heads * s.d_head
        self.index = index
        self.n_heads, self.n_kv_heads, self.d_head = s.n_heads, s.n_kv_heads, s.d_head
        self.kv_shape = KVShape(s.n_kv_heads, s.d_head)
        self.query = Linear(s.d_model, d_query, bias=s.qkv_bias)
        self.key = Linear(s.d_model, d_key, bias=s.qkv_bias)
        self.value = Linear(s.d_model, d_key, bias=s.qkv_bias)
        self.q_norm, self.k_norm = make_qk_norms(s)
        self.attend = Attend(scale_of(s), s.attention_dropout, s.attention_softcap)
        self.out = Linear(d_query, s.d_model, bias=s.out_bias)

    @property
    def residual_projection(self) -> nn.Linear:
        """The output projection."""
        return self.out

    def sites(self) -> list[LayerSite]:
        """Return the inputs, intermediates and output of the kernel."""
        inputs = [LayerSite(self.prefix + name, VECTORS, "attend", number) for number, name in enumerate("qkv")]
        inside = [LayerSite(self.prefix + name, PAIRS, "attend", name) for name in INSIDE]
        return [*inputs, *inside, LayerSite(f"{self.prefix}z", VECTORS, "attend", "output")]

    def add_head_flops(
        self, count: FlopCount, trained: bool, keys: FlopCount, keys_trained: bool, added_trained: bool = False
    ) -> tuple[int, bool]:
        """Add the FLOPs of the query and output projections to `count`, and of key and value projections to `keys`.

        `added_trained` is whether what is added to the values needs a gradient. Return the FLOPs per query-key pair,
        and whether the output needs a gradient.
        """
        needs_grad = [count.add(self.query, trained), added_trained]
        needs_grad += [keys.add(self.key, keys_trained), keys.add(self.value, keys_trained)]
        needs_grad += [is_trained(self.q_norm), is_trained(self.k_norm)]
        scores = (12 if any(needs_grad) else 4) * self.n_heads * self.d_head  # two products, two gradients of each
        return scores, count.add(self.out, any(needs_grad))

    def stored_bytes(self, itemsize: int) -> int:
        """Return what a fused kernel stores: queries, keys, values and output, and the log-sum-exp in float32."""
        normed = 0 if isinstance(self.q_norm, nn.Identity) else self.n_heads + self.n_kv_heads  # before their norms
        return itemsize * self.d_head * (2 * self.n_heads + 2 * self.n_kv_heads + normed) + 4 * self.n_heads


class Attention(MultiHeadAttention):
    """Self-attention."""

    shared_input = ("query", "key", "value")

    def __init__(self, s: spec.TransformerSpec, index: int) -> None:
        super().__init__(s, index)
        self.window = s.window(index)
        self.kv_shape = KVShape(s.n_kv_heads, s.d_head, self.window)
        self.value_embedding = ValueEmbedding(s) if s.has_value_embedding(index) else NoValueEmbedding()

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        """Apply self-attention to x [B, S, D]."""
        q, k, v = (split_heads(project(x), self.d_head) for project in (self.query, self.key, self.value))
        v = self.value_embedding(v, x, ctx)
        return self.out(merge_heads(self.attend_heads(q, k, v, ctx)))

    def attend_heads(self, q: Tensor, k: Tensor, v: Tensor, ctx: Context) -> Tensor:
        """Normalise and rotate q and k, update the cache, and attend; q is [B, H, S, d]."""
        rotate = ctx.rotations[self.window]
        q, k = rotate(self.q_norm(q)), rotate(self.k_norm(k))
        if ctx.cache is not None:
            k, v = ctx.cache.update(self.index, ctx.write_offsets[self.window], k, v)
        return self.attend(q, k, v, ctx.backends[self.window])

    def fused(self, project: nn.Module) -> nn.Module:
        """Return the layer with one projection for queries, keys and values."""
        return FusedQKVAttention(self, project)

    def add_flops(self, count: FlopCount, trained: bool) -> bool:
        """Add the FLOPs of the layer."""
        added = count.add(self.value_embedding, trained)
        scores, needs_grad = self.add_head_flops(count, trained, count, trained, added)
        count.scores += scores
        return needs_grad


class FusedQKVAttention(Attention):
    """Self-attention with a fused QKV projection, for inference."""

    def __init__(self, layer: Attention, project: nn.Module) -> None:
        nn.Module.__init__(self)
        self.index, self.window, self.kv_shape = layer.index, layer.window, layer.kv_shape
        self.n_heads, self.n_kv_heads, self.d_head = layer.n_heads, layer.n_kv_heads, layer.d_head
        self.project = project
        self.q_norm, self.k_norm, self.value_embedding = layer.q_norm, layer.k_norm, layer.value_embedding
        self.attend, self.out = layer.attend, layer.out

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        """Apply self-attention to x [B, S, D]."""
        q, k, v = (split_heads(one, self.d_head) for one in self.project(x))
        v = self.value_embedding(v, x, ctx)
        return self.out(merge_heads(self.attend_heads(q, k, v, ctx)))


class ProjectionNorm(nn.Module):
    """A norm of queries or keys over all heads together."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x [B, H, S, d]."""
        return split_heads(self.norm(merge_heads(x)), x.shape[-1])


class CrossAttention(MultiHeadAttention):
    """Cross-attention: queries from the decoder, keys and values from the encoder's output."""

    prefix = "cross_"
    residual_input = "cross_z"

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

    def add_flops(self, count: FlopCount, trained: bool) -> bool:
        """Add the FLOPs of the layer: keys and values are computed once per source token."""
        keys = FlopCount()
        scores, needs_grad = self.add_head_flops(count, trained, keys, count.memory_trained)
        count.cross_maps += keys.maps
        count.cross_scores += scores
        return needs_grad


def make_attention(s: spec.TransformerSpec, index: int) -> Sublayer:
    """Build the self-attention of a layer."""
    return registry.build(s.attention, Sublayer, s, index) or Attention(s, index)


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
    """Return the norms of queries and keys, per head or over all of them, or two identities."""
    if not s.qk_norm:
        return nn.Identity(), nn.Identity()
    if s.qk_norm_over == "projection":
        q_norm, k_norm = (ProjectionNorm(make_norm(s.norm, n * s.d_head)) for n in (s.n_heads, s.n_kv_heads))
        return q_norm, k_norm
    return make_norm(s.norm, s.d_head), make_norm(s.norm, s.d_head)
