"""The objectives that `train.objective` chooses by their kind; without one, model and data decide (`registry`)."""

from __future__ import annotations

from typing import Any

from glasshouse import registry
from glasshouse.objectives.contrastive import Contrastive
from glasshouse.objectives.distillation import Distillation
from glasshouse.objectives.dpo import DPO
from glasshouse.objectives.multi_token import MultiToken
from glasshouse.objectives.objective import Objective

registry.add(DPO, Distillation, Contrastive, MultiToken)
ObjectiveChoice = Objective[Any]  # one of these, or one that another package registers
