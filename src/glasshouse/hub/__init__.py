"""Load and save models, also in the formats of transformers, PEFT and llama.cpp; one file per model family."""

from glasshouse.hub.adapters.peft import load_adapter, save_adapter
from glasshouse.hub.serialization import FAMILIES, convert, export, export_gguf, load, save

__all__ = ["FAMILIES", "convert", "export", "export_gguf", "load", "load_adapter", "save", "save_adapter"]
