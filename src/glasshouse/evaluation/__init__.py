"""How good a model is, and whether it is what it claims to be."""

from glasshouse.evaluation.baselines import ByteModel, compressed_bits
from glasshouse.evaluation.measures import accuracy, bits_per_byte, exact_match, f1, perplexity
from glasshouse.evaluation.translation import Score, bleu, chrf
from glasshouse.evaluation.verify import Check, verify

__all__ = [
    "ByteModel",
    "Check",
    "Score",
    "accuracy",
    "bits_per_byte",
    "bleu",
    "chrf",
    "compressed_bits",
    "exact_match",
    "f1",
    "perplexity",
    "verify",
]
