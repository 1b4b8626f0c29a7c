"""Objectives: what is asked of a model, loss included."""

from glasshouse.objectives.causal_lm import CausalLM
from glasshouse.objectives.chat import Chat
from glasshouse.objectives.classification import SequenceClassification, TokenClassification
from glasshouse.objectives.distillation import Distillation
from glasshouse.objectives.loss import autocast, compute_loss, cross_entropy
from glasshouse.objectives.masked_lm import MaskedLM
from glasshouse.objectives.objective import Evaluation, Objective
from glasshouse.objectives.registry import find_objective, make_dataset, objectives_on, required_kind
from glasshouse.objectives.seq2seq_lm import Seq2SeqLM

__all__ = [
    "CausalLM",
    "Chat",
    "Distillation",
    "Evaluation",
    "MaskedLM",
    "Objective",
    "Seq2SeqLM",
    "SequenceClassification",
    "TokenClassification",
    "autocast",
    "compute_loss",
    "cross_entropy",
    "find_objective",
    "make_dataset",
    "objectives_on",
    "required_kind",
]
