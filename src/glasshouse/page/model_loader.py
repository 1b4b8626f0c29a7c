"""Loading of models: a folder, a hub id, a run with its checkpoints, or a model in memory."""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from glasshouse import hub, pretrained
from glasshouse.errors import GlasshouseError, InputError
from glasshouse.models import Decoder, Encoder, Model, Seq2Seq
from glasshouse.models.generation_config import read_token_rules
from glasshouse.models.prompt import encode_prompt, written_ids
from glasshouse.page.forward_pass import PagePrompt
from glasshouse.text import Tokenizer
from glasshouse.training import is_run
from glasshouse.training.checkpoint.folder import SAMPLES
from glasshouse.training.checkpoint.store import list_checkpoints
from glasshouse.training.logging.journal import Journal
from glasshouse.training.run import Run

EXAMPLE = "When Mary and John went to the store, John gave a drink to"
NUMBERS = "3 1 4 1 5 9 2 6 3 1 4 1 5"  # example without a tokenizer
LONGEST = 32_768  # maximum tokens without learned positions
MAX_LOADED = 2  # models in memory at once: two checkpoints can be compared


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """A model at one checkpoint and its tokenizer."""

    model: Model
    tok: Tokenizer | None
    longest: int | None = None  # tokens of a text at most, where less than the model takes

    @property
    def device(self) -> torch.device:
        """The device of the model."""
        return self.model.token_embedding.table.weight.device

    def ids(self, text: str) -> list[int]:
        """Return the token ids of a text; without a tokenizer, the ids written in it."""
        if self.tok is not None:
            return self.tok.encode(text)
        ids = written_ids(text)
        for one in ids:
            if not 0 <= one < self.model.spec.vocab_size:
                raise InputError(
                    f"the text contains {one}, but ids end at vocab_size - 1 = {self.model.spec.vocab_size - 1}."
                )
        return ids

    def inputs(self, prompt: PagePrompt) -> tuple[Tensor, ...]:
        """Return the model inputs with batch size 1: ids, or source and target."""
        s, model = self.model.spec, self.model
        appended = [int(one) for one in prompt.appended]
        for one in appended:
            if not 0 <= one < s.vocab_size:
                raise InputError(
                    f"an appended token is {one}, but the largest id is vocab_size - 1 = {s.vocab_size - 1}."
                )
        match model:
            case Seq2Seq():
                source = encode_prompt(self.ids(prompt.text) if self.tok is None else prompt.text, self.tok, s)
                target = self._bare(prompt.target) if prompt.target else []
                rows = [source, [*self.start(), *target, *appended]]
            case Decoder():
                given = (
                    self.ids(prompt.text) if prompt.text or not appended else []
                )  # the prompt may consist of appended tokens only
                rows = [encode_prompt([*given, *appended], None, s)]
            case Encoder():
                rows = [self._mask_tokens([*self.ids(prompt.text), *appended], prompt.masked)]
        for row in rows:
            if not row:
                raise InputError("the text has no tokens; enter some text.")
            # Without a hard limit, a soft one keeps requests fast.
            most = max(s.max_len, LONGEST) if s.position_limit is None else s.position_limit
            most = most if self.longest is None else min(most, self.longest)
            if len(row) > most:
                raise InputError(f"the text has {len(row):,} tokens, but the limit is {most:,}; shorten it.")
        return tuple(torch.tensor([row], device=self.device) for row in rows)

    def start(self) -> list[int]:
        """Return the forced prefix of the target of an encoder-decoder."""
        model = self.model
        if not isinstance(model, Seq2Seq) or model.spec.start_id is None:
            return []
        return [model.spec.start_id, *read_token_rules(model).forced_prefix]

    def _bare(self, text: str) -> list[int]:
        return self.ids(text) if self.tok is None else self.tok.encode(text, add_special_tokens=False)

    def _mask_tokens(self, ids: list[int], masked: tuple[int, ...]) -> list[int]:
        """Replace some tokens by the mask token."""
        mask = None if self.tok is None else self.tok.special_id("mask")
        if masked and mask is None:
            raise InputError("the tokenizer has no mask token; unmask all tokens.")
        gone = set(masked)
        return [mask if place in gone and mask is not None else one for place, one in enumerate(ids)]


class ModelLoader:
    """Loads the model given on the command line or in Python, at any of its checkpoints.

    >>> import glasshouse as gh
    >>> loader = ModelLoader.from_model(gh.build(gh.preset("tiny-decoder")).eval(), None)
    >>> loader.name, loader.checkpoints(), loader.get("").tok
    ('model', [], None)
    """

    def __init__(
        self,
        path: str | Path,
        *,
        revision: str | None = None,
        device: str = "cpu",
        given: LoadedModel | None = None,  # a model in memory; then `path` is only its name
        served: bool = False,  # by `glasshouse serve`, beside the API
    ) -> None:
        self.name = str(path)
        self.path = (pretrained.find(path) if given is None else None) or path
        self.revision, self.device, self.served = revision, device, served
        self.run = Path(self.path).expanduser() if given is None and is_run(self.path) else None
        self._given = given
        self._loaded: OrderedDict[str, tuple[int, LoadedModel]] = OrderedDict()
        self._lock = threading.Lock()

    @classmethod
    def from_model(cls, model: Model, tok: Tokenizer | None, name: str = "model") -> ModelLoader:
        """Wrap a model that is in memory."""
        return cls(name, given=LoadedModel(model, tok))

    def checkpoints(self) -> list[str]:
        """Return the names of the checkpoints of a run, the earliest first; empty without a run."""
        return [] if self.run is None else [one.name for one in list_checkpoints(self.run)]

    def planned_steps(self) -> int | None:
        """Return the steps that the run was started for; None without a run, or where epochs or minutes decide."""
        train = None if self.run is None else Run.load(self.run).train
        return None if train is None else train.steps

    def example(self) -> str:
        """Return a default prompt: that of a bundled model, the first sample prompt of the run, or an example."""
        if self.path == pretrained.find(self.name):
            return pretrained.PROMPTS[self.name]
        loaded = self.get("")
        for line in [] if self.run is None else Journal(self.run / SAMPLES).lines():
            for sample in line["samples"]:
                # The prompt of an encoder sample is masked; its reference is the full text.
                text = sample.get("reference" if isinstance(loaded.model, Encoder) else "prompt", "")
                if text and len(loaded.ids(text)) < loaded.model.spec.max_len:
                    return text
        if loaded.tok is None:
            return " ".join(str(int(one) % loaded.model.spec.vocab_size) for one in NUMBERS.split())
        return EXAMPLE

    def latest(self) -> str:
        """Return the name of the latest checkpoint."""
        return (self.checkpoints() or [""])[-1]

    def get(self, checkpoint: str) -> LoadedModel:
        """Return the model at a checkpoint, loaded on first use and reloaded when its weights change."""
        if self._given is not None:
            return self._given
        with self._lock:
            checkpoint = self._named(checkpoint)
            try:
                return self._load(checkpoint)
            except (GlasshouseError, OSError):
                if self.run is None:
                    raise
                return self._load(checkpoint)  # the checkpoint may have been moved meanwhile

    def _load(self, checkpoint: str) -> LoadedModel:
        folder = self.folder(checkpoint)
        stamp = _stamp(folder)
        if self._loaded.get(checkpoint, (0, None))[0] != stamp:
            self._loaded[checkpoint] = (
                stamp,
                LoadedModel(*hub.load(folder, revision=self.revision, device=self.device)),
            )
        self._loaded.move_to_end(checkpoint)
        while len(self._loaded) > MAX_LOADED:
            self._loaded.popitem(last=False)
        return self._loaded[checkpoint][1]

    def _named(self, checkpoint: str) -> str:
        return "" if self.run is None else checkpoint or self.latest()

    def is_loaded(self, checkpoint: str) -> bool:
        """Whether the model of a checkpoint is in memory."""
        return self.run is None or self._named(checkpoint) in self._loaded

    @property
    def in_memory(self) -> bool:
        """Whether the model was passed in and has no folder."""
        return self._given is not None

    def folder(self, checkpoint: str) -> str | Path:
        """Return the folder of a checkpoint."""
        if self.run is None:
            return self.path
        there = {one.name: one.folder for one in list_checkpoints(self.run)}
        if not there:
            raise InputError(f"the run in {str(self.run)!r} has saved no model yet; wait for its first checkpoint.")
        if checkpoint not in there:
            raise InputError(f"the run has no checkpoint {checkpoint!r} any more; choose another one.")
        return there[checkpoint]


def _stamp(folder: str | Path) -> int:
    """Return a value that changes when the weights in a folder change; constant for a hub id."""
    path = Path(folder).expanduser()
    return path.stat().st_mtime_ns if path.is_dir() else 1
