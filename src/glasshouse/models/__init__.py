"""Whole models, put together from layers as a spec says."""

from glasshouse.models.assembly import Model, build
from glasshouse.models.decoder import Decoder
from glasshouse.models.encoder import Encoder
from glasshouse.models.grafting import with_labels, with_vocabulary
from glasshouse.models.integrity import weights_of
from glasshouse.models.pairing import check_pair
from glasshouse.models.seq2seq import Seq2Seq

__all__ = [
    "Decoder",
    "Encoder",
    "Model",
    "Seq2Seq",
    "build",
    "check_pair",
    "weights_of",
    "with_labels",
    "with_vocabulary",
]
