"""The objectives that `train.objective` chooses by their kind; without one, model and data decide (`registry`)."""

from __future__ import annotations

from typing import Any

from glasshouse import registry
from glasshouse.objectives.distillation import Distillation
from glasshouse.objectives.objective import Objective

registry.add(Distillation)
ObjectiveChoice = Objective[Any]  # one of these, or one that another package registers
