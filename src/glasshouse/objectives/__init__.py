"""Training objectives: the data, the head, the loss and the evaluation of a model."""

from glasshouse.objectives.causal_lm import CausalLM
from glasshouse.objectives.chat import Chat
from glasshouse.objectives.classification import SequenceClassification, TokenClassification
from glasshouse.objectives.contrastive import Contrastive
from glasshouse.objectives.distillation import Distillation
from glasshouse.objectives.dpo import DPO
from glasshouse.objectives.loss.cross_entropy import autocast, compute_loss, cross_entropy
from glasshouse.objectives.masked_lm import MaskedLM
from glasshouse.objectives.multi_token import MultiToken
from glasshouse.objectives.objective import Evaluation, Objective
from glasshouse.objectives.registry import find_objective, make_dataset, objectives_on, required_kind
from glasshouse.objectives.seq2seq_lm import Seq2SeqLM

__all__ = [
    "DPO",
    "CausalLM",
    "Chat",
    "Contrastive",
    "Distillation",
    "Evaluation",
    "MaskedLM",
    "MultiToken",
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
