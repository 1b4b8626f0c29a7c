"""Decoder, encoder and encoder-decoder models, built from a spec."""

from glasshouse.models.builder import Model, build, count_parameters
from glasshouse.models.checks import check_tokenizer, checked_weights
from glasshouse.models.decoder import Decoder
from glasshouse.models.encoder import Encoder
from glasshouse.models.seq2seq import Seq2Seq
from glasshouse.models.surgery import with_classifier, with_tokenizer

__all__ = [
    "Decoder",
    "Encoder",
    "Model",
    "Seq2Seq",
    "build",
    "check_tokenizer",
    "checked_weights",
    "count_parameters",
    "with_classifier",
    "with_tokenizer",
]
