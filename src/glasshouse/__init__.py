"""Train transformers and inspect them, with one set of modules.

The names below are the public API. Each is imported when first used, so that `import glasshouse` is fast and needs
no torch.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING

from glasshouse.version import __version__

if TYPE_CHECKING:
    from glasshouse import config as config
    from glasshouse import data as data
    from glasshouse import device as device
    from glasshouse import errors as errors
    from glasshouse import evaluation as evaluation
    from glasshouse import generation as generation
    from glasshouse import hub as hub
    from glasshouse import inspection as inspection
    from glasshouse import layers as layers
    from glasshouse import models as models
    from glasshouse import notes as notes
    from glasshouse import objectives as objectives
    from glasshouse import page as page
    from glasshouse import pretrained as pretrained
    from glasshouse import serve as serve
    from glasshouse import spec as spec
    from glasshouse import store as store
    from glasshouse import text as text
    from glasshouse import training as training
    from glasshouse.activation_store import activations as activations
    from glasshouse.classification import classify as classify
    from glasshouse.embeddings import embed as embed
    from glasshouse.errors import ConfigError as ConfigError
    from glasshouse.errors import GlasshouseError as GlasshouseError
    from glasshouse.errors import InputError as InputError
    from glasshouse.errors import StoreError as StoreError
    from glasshouse.evaluation.evaluate import evaluate as evaluate
    from glasshouse.generation import Completion as Completion
    from glasshouse.generation import Engine as Engine
    from glasshouse.generation import SamplingParams as SamplingParams
    from glasshouse.generation.offline import generate as generate
    from glasshouse.generation.offline import stream as stream
    from glasshouse.hub import load as load
    from glasshouse.hub import save as save
    from glasshouse.inspection import ablate_head as ablate_head
    from glasshouse.inspection import attribute as attribute
    from glasshouse.inspection import circuit as circuit
    from glasshouse.inspection import compare as compare
    from glasshouse.inspection import edit as edit
    from glasshouse.inspection import head_scores as head_scores
    from glasshouse.inspection import lens as lens
    from glasshouse.inspection import nearest as nearest
    from glasshouse.inspection import patch as patch
    from glasshouse.inspection import probe as probe
    from glasshouse.inspection import record as record
    from glasshouse.inspection import steering_vector as steering_vector
    from glasshouse.inspection.parameters.by_head import weights as weights
    from glasshouse.inspection.saliency import saliency as saliency
    from glasshouse.models import build as build
    from glasshouse.models import count_parameters as count_parameters
    from glasshouse.page import look as look
    from glasshouse.registry import register as register
    from glasshouse.spec import preset as preset
    from glasshouse.spec import presets as presets
    from glasshouse.text import Tokenizer as Tokenizer
    from glasshouse.training import Run as Run
    from glasshouse.training import train as train

_EXPORTS = {
    "Completion": "generation",
    "ConfigError": "errors",
    "Engine": "generation",
    "GlasshouseError": "errors",
    "InputError": "errors",
    "Run": "training",
    "SamplingParams": "generation",
    "StoreError": "errors",
    "Tokenizer": "text",
    "ablate_head": "inspection",
    "activations": "activation_store",
    "attribute": "inspection",
    "build": "models",
    "classify": "classification",
    "circuit": "inspection",
    "compare": "inspection",
    "count_parameters": "models",
    "edit": "inspection",
    "embed": "embeddings",
    "evaluate": "evaluation",
    "generate": "generation",
    "head_scores": "inspection",
    "lens": "inspection",
    "load": "hub",
    "look": "page",
    "nearest": "inspection",
    "patch": "inspection",
    "preset": "spec",
    "presets": "spec",
    "probe": "inspection",
    "record": "inspection",
    "register": "registry",
    "saliency": "inspection",
    "save": "hub",
    "steering_vector": "inspection",
    "stream": "generation",
    "train": "training",
    "weights": "inspection",
}

_SUBMODULES = (
    "config",
    "data",
    "device",
    "errors",
    "evaluation",
    "generation",
    "hub",
    "inspection",
    "layers",
    "models",
    "notes",
    "objectives",
    "page",
    "pretrained",
    "serve",
    "spec",
    "store",
    "text",
    "training",
)

__all__ = ["__version__", *_EXPORTS, *_SUBMODULES]


class _Package(ModuleType):
    """The module glasshouse, whose `save` is found before that which nnsight gives every object in Python."""

    class _Save:
        def __get__(self, module: ModuleType, owner: type) -> object:
            return __getattr__("save")

    if not TYPE_CHECKING:
        save = _Save()


sys.modules[__name__].__class__ = _Package


def __getattr__(name: str) -> object:
    if name in _SUBMODULES:
        return importlib.import_module(f"glasshouse.{name}")
    if name not in _EXPORTS:
        raise AttributeError(f"module 'glasshouse' has no attribute {name!r}")
    return getattr(importlib.import_module(f"glasshouse.{_EXPORTS[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
