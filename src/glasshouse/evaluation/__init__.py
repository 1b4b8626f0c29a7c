"""Evaluation: metrics on data, tasks of lm-eval, compression and n-gram baselines, and consistency checks."""

import importlib
from typing import TYPE_CHECKING

from glasshouse.evaluation.baselines import ByteModel, baseline_bits, compressed_bits, text_of
from glasshouse.evaluation.evaluate import evaluate, opened
from glasshouse.evaluation.verify import Check, verify
from glasshouse.objectives.metrics import Example, Report, accuracy, bits_per_byte, exact_match, f1, perplexity
from glasshouse.objectives.translation import Score, bleu, chrf

if TYPE_CHECKING:
    from glasshouse.evaluation.harness import GlasshouseLM as GlasshouseLM
    from glasshouse.evaluation.harness import TaskReport as TaskReport
    from glasshouse.evaluation.harness import evaluate_tasks as evaluate_tasks

_OF_HARNESS = ("GlasshouseLM", "TaskReport", "evaluate_tasks")  # imported when first used, as lm-eval may be missing

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


def __getattr__(name: str) -> object:
    if name in _OF_HARNESS:
        return getattr(importlib.import_module(f"{__name__}.harness"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
