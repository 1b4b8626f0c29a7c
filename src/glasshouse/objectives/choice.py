"""The objectives that `train.objective` chooses by their kind; without one, model and data decide (`registry`)."""

from __future__ import annotations

from glasshouse.objectives.distillation import Distillation

ObjectiveChoice = Distillation
