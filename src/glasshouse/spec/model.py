"""The three kinds of model spec, validated on construction. No torch."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from glasshouse.config import Settings, require
from glasshouse.spec.attention import Attention, SoftmaxAttention
from glasshouse.spec.feedforward import FeedForward, Gelu
from glasshouse.spec.head import Head, MaskedToken, NextToken, NoHead
from glasshouse.spec.init import DepthScaled, Init
from glasshouse.spec.norm import LayerNorm, Norm
from glasshouse.spec.position import Learned, Position

NormPlacement = Literal["pre", "post", "sandwich", "output", "parallel"]

QKNormOver = Literal["head", "projection"]


@dataclass(frozen=True, kw_only=True)
class TransformerSpec(Settings):
    """The fields that the three kinds of model share. Defaults of 0 or None are derived from other fields."""

    vocab_size: int  # [tokens] size of the vocabulary; in a run it comes from the tokenizer
    d_model: int  # width of the residual stream
    n_layers: int  # number of blocks
    n_heads: int  # number of attention heads (query heads)
    n_kv_heads: int = 0  # key and value heads; 0: n_heads; 1: multi-query attention; between: grouped-query attention
    d_head: int = 0  # width of a head; 0: d_model / n_heads
    d_ff: int = 0  # hidden width of the feed-forward layer; 0: 4 * d_model
    max_len: int = 1024  # [tokens] number of learned positions; for other kinds, the context length of training

    position: Position = Learned()  # position encoding
    # kind of attention
    attention: Attention = field(default=SoftmaxAttention(), metadata={"omit_default": True})
    norm: Norm = LayerNorm()  # kind of norm, everywhere in the model
    # a norm before each sublayer, after its residual addition, both before it and on its output, or on its output
    # alone; "parallel" is "pre" where attention and feed-forward both read the block's input
    norm_placement: NormPlacement = "pre"
    final_norm: bool = True  # a norm after the last block
    # a norm before the attention of the first block; ModernBERT has none, as the embeddings are normalised
    first_norm: bool = field(default=True, metadata={"omit_default": True})
    feedforward: FeedForward = Gelu()  # kind of feed-forward layer

    embed_norm: bool = False  # a norm after the embeddings
    embed_scale: bool | None = None  # token embeddings times sqrt(d_model); None: with sinusoidal positions only
    logit_scale: bool = False  # final hidden states times 1 / sqrt(d_model)
    # logits over the vocabulary become cap * tanh(logits / cap), as in Gemma 2; None: no cap
    logit_softcap: float | None = field(default=None, metadata={"omit_default": True})

    qkv_bias: bool = True  # biases on the query, key and value projections
    out_bias: bool = True  # a bias on the output projection of attention
    ffn_bias: bool = True  # biases on the feed-forward layers
    qk_norm: bool = False  # a norm on queries and keys, per head, before the rotation
    # what qk_norm is taken over: each head, or all heads together as in OLMo 2
    qk_norm_over: QKNormOver = field(default="head", metadata={"omit_default": True})
    # every second layer adds an embedding of the token, times a gate of its input, to its values
    value_embeddings: bool = field(default=False, metadata={"omit_default": True})
    attention_scale: float | None = None  # factor of the attention scores; None: 1 / sqrt(d_head)
    attention_softcap: float | None = None  # scores become cap * tanh(scores / cap); None: no cap
    windows: tuple[int, ...] = (0,)  # [tokens] sliding-window sizes, repeated over the layers; 0: full attention

    dropout: float = 0.0  # dropout probability on each sublayer's output
    attention_dropout: float = 0.0  # dropout probability on the attention weights
    embed_dropout: float = 0.0  # dropout probability on the embeddings

    init: Init | None = None  # weight initialization; None: Xavier with sinusoidal positions, otherwise DepthScaled

    start_id: int | None = None  # id of the token that starts a sequence; in a run it comes from the tokenizer
    end_ids: tuple[int, ...] = ()  # ids of the tokens that end generation; in a run they come from the tokenizer
    pad_id: int | None = None  # id of the padding token; in a run it comes from the tokenizer

    def check(self) -> None:
        self._derive("n_kv_heads", self.n_heads)
        self._derive("d_ff", 4 * self.d_model)
        if self.embed_scale is None:
            object.__setattr__(self, "embed_scale", self.position.scales_embeddings)
        if self.init is None:
            object.__setattr__(self, "init", self.position.init or DepthScaled())
        for name in ("vocab_size", "d_model", "n_layers", "n_heads", "n_kv_heads", "d_ff", "max_len"):
            require(getattr(self, name) > 0, name, getattr(self, name), "at least 1")
        require(self.d_head >= 0, "d_head", self.d_head, "at least 1, or 0 for d_model / n_heads")
        if self.d_head == 0:
            rule = f"a multiple of n_heads = {self.n_heads} unless d_head is given"
            require(self.d_model % self.n_heads == 0, "d_model", self.d_model, rule)
            self._derive("d_head", self.d_model // self.n_heads)
        rule = f"a divisor of n_heads = {self.n_heads}"
        require(self.n_heads % self.n_kv_heads == 0, "n_kv_heads", self.n_kv_heads, rule)
        self.position.check_sizes(self.d_model, self.d_head)
        for name in ("dropout", "attention_dropout", "embed_dropout"):
            require(0 <= getattr(self, name) < 1, name, getattr(self, name), "at least 0 and below 1")
        for name in ("attention_scale", "attention_softcap", "logit_softcap"):
            value = getattr(self, name)
            require(value is None or (value > 0 and math.isfinite(value)), name, value, "above 0")
        rule = "true unless norm_placement is 'pre', where the first block has a norm to leave out"
        require(self.first_norm or self.norm_placement == "pre", "first_norm", self.first_norm, rule)
        over = self.qk_norm_over
        require(self.qk_norm or over == "head", "qk_norm_over", over, "'head' unless qk_norm is true")
        valid = len(self.windows) > 0 and min(self.windows) >= 0
        require(valid, "windows", self.windows, "a list of sizes, 0 for a layer with full attention")
        for name, ids in (
            ("start_id", (self.start_id,)),
            ("pad_id", (self.pad_id,)),
            ("end_ids", self.end_ids),
        ):
            for value in ids:
                rule = f"an id below vocab_size = {self.vocab_size}"
                require(value is None or 0 <= value < self.vocab_size, name, value, rule)

    def _derive(self, name: str, value: int) -> None:
        if getattr(self, name) == 0:
            object.__setattr__(self, name, value)

    @property
    def position_limit(self) -> int | None:
        """The maximum sequence length, if the position encoding has one."""
        return self.position.limit(self.max_len)

    def has_value_embedding(self, index: int) -> bool:
        """Return whether a layer has a value embedding: every second one."""
        return self.value_embeddings and index % 2 == 1

    def window(self, index: int) -> int:
        """Return the sliding-window size of a layer; 0 for full attention."""
        return self.windows[index % len(self.windows)]


@dataclass(frozen=True, kw_only=True)
class DecoderSpec(TransformerSpec):
    """A causal transformer: each position attends to itself and to earlier ones.

    >>> DecoderSpec(vocab_size=100, d_model=64, n_layers=2, n_heads=4).d_head
    16
    >>> DecoderSpec(vocab_size=100, d_model=65, n_layers=2, n_heads=4)
    Traceback (most recent call last):
    ...
    glasshouse.errors.ConfigError: d_model is 65, but it must be a multiple of n_heads = 4 unless d_head is given.
    """

    kind: ClassVar[str] = "decoder"
    head: Head = NextToken()  # what the model computes from its hidden states

    def check(self) -> None:
        super().check()
        pooling = getattr(self.head, "pooling", None)
        rule = "last or mean: a decoder's first token attends to no other"
        require(pooling != "first", "head.pooling", pooling, rule)


@dataclass(frozen=True, kw_only=True)
class EncoderSpec(TransformerSpec):
    """A bidirectional transformer: every position attends to every other."""

    kind: ClassVar[str] = "encoder"
    head: Head = MaskedToken()  # what the model computes from its hidden states
    n_segments: int = 0  # number of segment embeddings, such as BERT's sentence A and B; 0: none

    def check(self) -> None:
        super().check()
        require(self.n_segments >= 0, "n_segments", self.n_segments, "0 or above")


@dataclass(frozen=True, kw_only=True)
class Seq2SeqSpec(TransformerSpec):
    """An encoder-decoder with one shared token embedding."""

    kind: ClassVar[str] = "seq2seq"
    n_encoder_layers: int = 0  # number of encoder blocks; 0: n_layers, which is the decoder's
    head: NextToken | NoHead = NextToken()  # what the model computes from its hidden states

    def check(self) -> None:
        super().check()
        self._derive("n_encoder_layers", self.n_layers)
        rule = "another in an encoder-decoder, where cross-attention reads what self-attention found"
        require(self.norm_placement != "parallel", "norm_placement", self.norm_placement, rule)
        require(self.n_encoder_layers > 0, "n_encoder_layers", self.n_encoder_layers, "at least 1")


Spec = DecoderSpec | EncoderSpec | Seq2SeqSpec
