"""Whole models, put together from layers as a spec says."""

from glasshouse.models.assembly import Model, build
from glasshouse.models.decoder import Decoder
from glasshouse.models.encoder import Encoder
from glasshouse.models.grafting import with_classifier, with_tokenizer
from glasshouse.models.integrity import checked_parameters
from glasshouse.models.pairing import check_tokenizer
from glasshouse.models.seq2seq import Seq2Seq

__all__ = [
    "Decoder",
    "Encoder",
    "Model",
    "Seq2Seq",
    "build",
    "check_tokenizer",
    "checked_parameters",
    "with_classifier",
    "with_tokenizer",
]
