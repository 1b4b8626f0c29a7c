"""The objectives that `train.objective` chooses by their kind; without one, model and data decide (`registry`)."""

from __future__ import annotations

from glasshouse.objectives.contrastive import Contrastive
from glasshouse.objectives.distillation import Distillation
from glasshouse.objectives.dpo import DPO
from glasshouse.objectives.multi_token import MultiToken

ObjectiveChoice = DPO | Distillation | Contrastive | MultiToken
