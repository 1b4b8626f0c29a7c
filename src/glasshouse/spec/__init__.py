"""Model specs: components, three kinds of spec, named presets and parameter counts. No torch."""

from glasshouse.spec.attention import Attention, SoftmaxAttention
from glasshouse.spec.catalog import parse, preset, presets
from glasshouse.spec.feedforward import FeedForward, GeGLU, Gelu, Relu, ReluSquared, Silu, SwiGLU
from glasshouse.spec.head import (
    DenseKind,
    Head,
    MaskedToken,
    NextToken,
    NoHead,
    Pooled,
    Pooling,
    SequenceClassification,
    TokenClassification,
)
from glasshouse.spec.init import DepthScaled, FanIn, Init, Normal, Xavier, ZeroOutput
from glasshouse.spec.model import DecoderSpec, EncoderSpec, NormPlacement, Seq2SeqSpec, Spec, TransformerSpec
from glasshouse.spec.norm import LayerNorm, Norm, RMSNorm
from glasshouse.spec.parameter_count import count_by_arithmetic
from glasshouse.spec.position import (
    Alibi,
    Learned,
    LinearScaling,
    Llama3Scaling,
    NoPosition,
    NoScaling,
    Position,
    Relative,
    Rotary,
    Sinusoidal,
    YarnScaling,
)

__all__ = [
    "Alibi",
    "Attention",
    "DecoderSpec",
    "DenseKind",
    "DepthScaled",
    "EncoderSpec",
    "FanIn",
    "FeedForward",
    "GeGLU",
    "Gelu",
    "Head",
    "Init",
    "LayerNorm",
    "Learned",
    "LinearScaling",
    "Llama3Scaling",
    "MaskedToken",
    "NextToken",
    "NoHead",
    "NoPosition",
    "NoScaling",
    "Norm",
    "NormPlacement",
    "Normal",
    "Pooled",
    "Pooling",
    "Position",
    "RMSNorm",
    "Relative",
    "Relu",
    "ReluSquared",
    "Rotary",
    "Seq2SeqSpec",
    "SequenceClassification",
    "Silu",
    "Sinusoidal",
    "SoftmaxAttention",
    "Spec",
    "SwiGLU",
    "TokenClassification",
    "TransformerSpec",
    "Xavier",
    "YarnScaling",
    "ZeroOutput",
    "count_by_arithmetic",
    "parse",
    "preset",
    "presets",
]
