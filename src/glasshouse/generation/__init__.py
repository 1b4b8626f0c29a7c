"""Text generation: sampling, beam search, speculative decoding, and an engine with continuous batching."""

from glasshouse.generation.constraints.grammar import Grammar as Grammar
from glasshouse.generation.engine.capacity import MAX_SLOTS as MAX_SLOTS
from glasshouse.generation.engine.capacity import check_beams as check_beams
from glasshouse.generation.engine.capacity import choose_slots as choose_slots
from glasshouse.generation.engine.capacity import choose_weights as choose_weights
from glasshouse.generation.engine.capacity import required_lengths as required_lengths
from glasshouse.generation.engine.engine import Engine as Engine
from glasshouse.generation.generate import generate as generate
from glasshouse.generation.generate import length_warning as length_warning
from glasshouse.generation.generate import stream as stream
from glasshouse.generation.request import Completion as Completion
from glasshouse.generation.request import Request as Request
from glasshouse.generation.sampling_params import SamplingParams as SamplingParams
from glasshouse.generation.speculation import DraftHeads as DraftHeads
from glasshouse.generation.speculation import DraftModel as DraftModel
from glasshouse.generation.speculation import PromptLookup as PromptLookup
