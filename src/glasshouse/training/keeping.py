"""What a run keeps, so that it can go on as if never stopped: the one place where its state is put together."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from glasshouse import config, hub
from glasshouse.config import Table
from glasshouse.errors import StoreError
from glasshouse.hub.checkpoint import filler
from glasshouse.layers import lora
from glasshouse.models import Model
from glasshouse.models.assembly import outline
from glasshouse.text import Tokenizer
from glasshouse.training import checkpoint
from glasshouse.training.average import Average
from glasshouse.training.checkpoint import Checkpoints
from glasshouse.training.state import State, of_chance, of_optimizer, to_chance, to_optimizer
from glasshouse.training.update import Update


@dataclass(frozen=True)
class Place:
    """Where in a run one is."""

    step: int = 0  # updates made
    number: int = 0  # of the next batch
    skipped: tuple[int, ...] = field(default=())  # batches that are passed over
    best: tuple[int, float] | None = None  # the step and the loss of the best evaluation
    worse: int = 0  # evaluations since
    parts: int = 1  # that a step is computed in
    planned: int = 0  # train.steps when the run began: intervals that derive from it stay when it is raised
    line: Table | None = None  # of a step that is taken and not yet evaluated, for the journal

    @property
    def unwritten(self) -> int:
        """The first step that the journals must not have yet."""
        return self.step + (self.line is None)


class Keeper:
    """Saves a model and all that its training carries along, and puts both back."""

    def __init__(
        self, model: Model, update: Update, average: Average | None, tok: Tokenizer, checkpoints: Checkpoints
    ) -> None:
        self.model, self.update, self.average, self.tok = model, update, average, tok
        self.checkpoints = checkpoints
        self.adapted = bool(lora.attached(model))  # then what is written is merged, and cannot be gone on with
        self.base = fingerprint(model) if self.adapted else None

    def save(self, place: Place) -> None:
        """Write a checkpoint while training goes on."""
        optimizer, chance = of_optimizer(self.update.optimizer), of_chance()
        tensors = {**optimizer.tensors, **chance.tensors}
        if self.average is not None:
            tensors |= {f"average.{name}": weight for name, weight in self.average.weights.items()}
        if self.adapted:
            learned = ((name, weight) for name, weight in self.model.named_parameters() if weight.requires_grad)
            tensors |= {f"trained.{name}": weight for name, weight in learned}
        about = {
            **optimizer.about,
            **chance.about,
            "update": self.update.state(),
            "average": None if self.average is None else self.average.updates,
            "base": self.base,
            "place": asdict(place),
        }
        state = State(
            {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}, copy.deepcopy(about)
        )
        write, best = filler(self.snapshot(), self.tok), None if place.best is None else place.best[0]
        self.guard(lambda: self.checkpoints.save(place.step, write, state, best))

    def begin(self) -> None:
        """Let the history of the run begin with the model as it is now."""
        if self.checkpoints.history.most:
            write = filler(self.snapshot(), self.tok)
            self.guard(lambda: self.checkpoints.begin(write))

    def restore(self, step: int, state: State) -> Place:
        """Put back what `save` wrote, and return where that was."""
        if self.adapted:
            if state.about.get("base", self.base) != self.base:  # older checkpoints do not say
                raise StoreError(
                    "the model that this run adapts (model.from) has changed since it began; restore the old one, or "
                    "begin another run by train.out=FOLDER."
                )
            self.model.load_state_dict(_under("trained.", state.tensors), strict=False)
        else:
            saved, _ = hub.load(self.checkpoints.folder(step), dtype="stored")
            self.model.load_state_dict(saved.state_dict())
        to_optimizer(state, self.update.optimizer)
        self.update.restore(state.about["update"])
        if self.average is not None:
            self.average.restore(_under("average.", state.tensors), state.about["average"])
        to_chance(state)
        place = Place(**state.about["place"])
        best = None if place.best is None else (place.best[0], place.best[1])
        return replace(place, skipped=tuple(place.skipped), best=best)

    def snapshot(self) -> Model:
        """Return the model as it is now, adapters folded in, on the CPU: while it is written it must not change."""
        if self.adapted:
            merged = copy.deepcopy(self.model).to("cpu")
            lora.merge(merged)
            return merged
        with torch.device("meta"):
            twin = outline(self.model.spec)
        weights = {name: weight.detach().to("cpu", copy=True) for name, weight in self.model.state_dict().items()}
        twin.load_state_dict(weights, assign=True)
        twin.tokenizer, twin.beside = self.model.tokenizer, self.model.beside
        return twin

    def write(self, folder: Path) -> Model:
        """Write the model as it is now to a folder, and return it, on the CPU."""
        model, history = self.snapshot(), self.checkpoints.history
        self.guard(lambda: history.make_room(lambda: hub.save(model, self.tok, folder)))
        return model

    def put(self, step: int) -> None:
        """Let the model be as it was tried out at a checkpoint: averaged, if there is an average."""
        folder = self.checkpoints.folder(step)
        tensors = checkpoint.read(folder).tensors
        if self.average is not None:
            self.model.load_state_dict(_under("average.", tensors), strict=False)
        elif self.adapted:
            self.model.load_state_dict(_under("trained.", tensors), strict=False)
        else:
            self.model.load_state_dict(hub.load(folder, dtype="stored")[0].state_dict())

    def guard(self, work: Callable[[], object]) -> None:
        """Say what it means when the folder of a run cannot be written to."""
        try:
            work()
        except OSError as error:
            there = self.checkpoints.steps()
            last = f"the last good checkpoint is that of step {there[0]}" if there else "there is no checkpoint yet"
            raise StoreError(
                f"the run could not be saved ({error}); {last}: make room and run the same command again."
            ) from None


def fingerprint(model: Model) -> str:
    """Return the SHA-256, in hexadecimal, of what a model is apart from the parameters that learn.

    >>> import glasshouse as gh
    >>> model = gh.build(gh.preset("tiny-decoder")).requires_grad_(False)
    >>> before = fingerprint(model)
    >>> _ = torch.nn.init.zeros_(model.token.table.weight)
    >>> fingerprint(model) == before
    False
    """
    digest = hashlib.sha256(json.dumps(config.dump(model.spec), sort_keys=True).encode())
    learned = {name for name, weight in model.named_parameters() if weight.requires_grad}
    for name, tensor in sorted(model.state_dict().items()):
        if name not in learned:
            plain = tensor.detach().to("cpu").contiguous()
            digest.update(f"{name} {plain.dtype} {list(plain.shape)}".encode())
            digest.update(plain.view(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def _under(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
