"""Load and save models, also in the formats of Hugging Face transformers and PEFT; one file per model family."""

from glasshouse.hub.adapters.peft import load_adapter, save_adapter
from glasshouse.hub.serialization import FAMILIES, convert, export, load, save

__all__ = ["FAMILIES", "convert", "export", "load", "load_adapter", "save", "save_adapter"]
