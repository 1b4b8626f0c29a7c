"""From logits to text: sampling, beam search, drafts, and the engine that batches every caller."""

from glasshouse.generation.calls import generate as generate
from glasshouse.generation.calls import stream as stream
from glasshouse.generation.engine import Engine as Engine
from glasshouse.generation.options import SamplingParams as SamplingParams
from glasshouse.generation.request import Completion as Completion
from glasshouse.generation.request import Request as Request
from glasshouse.generation.speculation import DraftModel as DraftModel
from glasshouse.generation.speculation import PromptLookup as PromptLookup
