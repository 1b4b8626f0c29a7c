"""Evaluation: metrics on data, compression and n-gram baselines, and consistency checks."""

from glasshouse.evaluation.baselines import ByteModel, baseline_bits, compressed_bits, text_of
from glasshouse.evaluation.evaluate import evaluate, opened
from glasshouse.evaluation.verify import Check, verify
from glasshouse.objectives.metrics import Example, Report, accuracy, bits_per_byte, exact_match, f1, perplexity
from glasshouse.objectives.translation import Score, bleu, chrf

__all__ = [
    "ByteModel",
    "Check",
    "Example",
    "Report",
    "Score",
    "accuracy",
    "baseline_bits",
    "bits_per_byte",
    "bleu",
    "chrf",
    "compressed_bits",
    "evaluate",
    "exact_match",
    "f1",
    "opened",
    "perplexity",
    "text_of",
    "verify",
]
