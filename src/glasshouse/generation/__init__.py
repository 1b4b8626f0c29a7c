"""Text generation: sampling, beam search, speculative decoding, and an engine with continuous batching.

Names are imported when first used: the command line shows the help of sampling parameters without torch.
"""

import importlib
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from glasshouse.generation.constraints.grammar import Grammar as Grammar
    from glasshouse.generation.engine.capacity import MAX_SLOTS as MAX_SLOTS
    from glasshouse.generation.engine.capacity import check_beams as check_beams
    from glasshouse.generation.engine.capacity import choose_slots as choose_slots
    from glasshouse.generation.engine.capacity import choose_weights as choose_weights
    from glasshouse.generation.engine.capacity import required_lengths as required_lengths
    from glasshouse.generation.engine.engine import Engine as Engine
    from glasshouse.generation.offline import generate as generate
    from glasshouse.generation.offline import length_warning as length_warning
    from glasshouse.generation.offline import stream as stream
    from glasshouse.generation.request import Completion as Completion
    from glasshouse.generation.request import Request as Request
    from glasshouse.generation.rules import Firing as Firing
    from glasshouse.generation.rules import Rule as Rule
    from glasshouse.generation.sampling_params import SamplingParams as SamplingParams
    from glasshouse.generation.speculation import DraftHeads as DraftHeads
    from glasshouse.generation.speculation import DraftModel as DraftModel
    from glasshouse.generation.speculation import PromptLookup as PromptLookup

_EXPORTS = {
    "Completion": "request",
    "DraftHeads": "speculation",
    "DraftModel": "speculation",
    "Engine": "engine.engine",
    "Firing": "rules",
    "Grammar": "constraints.grammar",
    "MAX_SLOTS": "engine.capacity",
    "PromptLookup": "speculation",
    "Request": "request",
    "Rule": "rules",
    "SamplingParams": "sampling_params",
    "check_beams": "engine.capacity",
    "choose_slots": "engine.capacity",
    "choose_weights": "engine.capacity",
    "generate": "offline",
    "length_warning": "offline",
    "required_lengths": "engine.capacity",
    "stream": "offline",
}


def __getattr__(name: str) -> object:
    if name in _EXPORTS:
        return getattr(importlib.import_module(f"{__name__}.{_EXPORTS[name]}"), name)
    if not name.startswith("_"):
        with suppress(ModuleNotFoundError):
            return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
