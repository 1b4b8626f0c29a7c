"""Load and save models, also in the formats of transformers, PEFT, llama.cpp and ONNX; one file per model family."""

from glasshouse.hub.adapters.peft import load_adapter, save_adapter
from glasshouse.hub.serialization import FAMILIES, convert, export, export_gguf, export_onnx, load, save

__all__ = [
    "FAMILIES",
    "convert",
    "export",
    "export_gguf",
    "export_onnx",
    "load",
    "load_adapter",
    "save",
    "save_adapter",
]
