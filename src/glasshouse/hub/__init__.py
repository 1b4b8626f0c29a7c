"""Published checkpoints in and out: one file a family, each a two-way table of its config and its tensors' names."""

from glasshouse.hub.peft import load_adapter, save_adapter
from glasshouse.hub.serialization import FAMILIES, export, load, save

__all__ = ["FAMILIES", "export", "load", "load_adapter", "save", "save_adapter"]
