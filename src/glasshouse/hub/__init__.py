"""Published checkpoints in and out: one file a family, each a two-way table of its config and its tensors' names."""

from glasshouse.hub.checkpoint import FAMILIES, export, load, save

__all__ = ["FAMILIES", "export", "load", "save"]
