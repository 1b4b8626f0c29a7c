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
from glasshouse.config import JsonDict
from glasshouse.errors import StoreError
from glasshouse.hub.serialization import folder_writer
from glasshouse.layers import lora
from glasshouse.models import Model
from glasshouse.models.builder import instantiate
from glasshouse.text import Tokenizer
from glasshouse.training import checkpoint
from glasshouse.training.checkpoint import Checkpoints
from glasshouse.training.ema import EMA
from glasshouse.training.state import CheckpointData, load_optimizer_state, load_rng_state, optimizer_state, rng_state
from glasshouse.training.step import TrainStep


@dataclass(frozen=True)
class TrainerState:
    """Where in a run one is."""

    step: int = 0  # updates made
    next_batch: int = 0  # of the next batch
    skipped: tuple[int, ...] = field(default=())  # batches that are passed over
    best: tuple[int, float] | None = None  # the step and the loss of the best evaluation
    evals_since_best: int = 0  # evaluations since
    grad_accum: int = 1  # that a step is computed in
    initial_steps: int = 0  # train.steps when the run began: intervals that derive from it stay when it is raised
    pending_metrics: JsonDict | None = None  # of a step that is taken and not yet evaluated, for the journal

    @property
    def unwritten(self) -> int:
        """The first step that the journals must not have yet."""
        return self.step + (self.pending_metrics is None)


class Checkpointer:
    """Saves a model and all that its training carries along, and puts both back."""

    def __init__(
        self, model: Model, update: TrainStep, average: EMA | None, tok: Tokenizer, checkpoints: Checkpoints
    ) -> None:
        self.model, self.update, self.ema, self.tok = model, update, average, tok
        self.checkpoints = checkpoints
        self.has_lora = bool(lora.lora_layers(model))  # then what is written is merged, and cannot be gone on with
        self.base = fingerprint(model) if self.has_lora else None

    def save(self, state: TrainerState) -> None:
        """Write a checkpoint while training goes on."""
        optimizer, chance = optimizer_state(self.update.optimizer), rng_state()
        tensors = {**optimizer.tensors, **chance.tensors}
        if self.ema is not None:
            tensors |= {f"ema.{name}": weight for name, weight in self.ema.weights.items()}
        if self.has_lora:
            learned = ((name, weight) for name, weight in self.model.named_parameters() if weight.requires_grad)
            tensors |= {f"trainable.{name}": weight for name, weight in learned}
        about = {
            **optimizer.metadata,
            **chance.metadata,
            "grad_scaler": self.update.state_dict(),
            "ema_updates": None if self.ema is None else self.ema.updates,
            "base_fingerprint": self.base,
            "trainer_state": asdict(state),
        }
        saved = CheckpointData(
            {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}, copy.deepcopy(about)
        )
        write, best = folder_writer(self.snapshot(), self.tok), None if state.best is None else state.best[0]
        self.report_write_errors(lambda: self.checkpoints.save(state.step, write, saved, best))

    def begin(self) -> None:
        """Let the history of the run begin with the model as it is now."""
        if self.checkpoints.history.limit:
            write = folder_writer(self.snapshot(), self.tok)
            self.report_write_errors(lambda: self.checkpoints.begin(write))

    def restore(self, step: int, state: CheckpointData) -> TrainerState:
        """Put back what `save` wrote, and return where that was."""
        if self.has_lora:
            if state.metadata["base_fingerprint"] != self.base:
                raise StoreError(
                    "the model that this run adapts (model.from) has changed since it began; restore the old one, or "
                    "begin another run by train.out=FOLDER."
                )
            self.model.load_state_dict(_under("trainable.", state.tensors), strict=False)
        else:
            saved, _ = hub.load(self.checkpoints.folder(step), dtype="stored")
            self.model.load_state_dict(saved.state_dict())
        load_optimizer_state(state, self.update.optimizer)
        self.update.load_state_dict(state.metadata["grad_scaler"])
        if self.ema is not None:
            self.ema.restore(_under("ema.", state.tensors), state.metadata["ema_updates"])
        load_rng_state(state)
        place = TrainerState(**state.metadata["trainer_state"])
        best = None if place.best is None else (place.best[0], place.best[1])
        return replace(place, skipped=tuple(place.skipped), best=best)

    def snapshot(self) -> Model:
        """Return the model as it is now, adapters folded in, on the CPU: while it is written it must not change."""
        if self.has_lora:
            merged = copy.deepcopy(self.model).to("cpu")
            lora.merge(merged)
            return merged
        with torch.device("meta"):
            twin = instantiate(self.model.spec)
        weights = {name: weight.detach().to("cpu", copy=True) for name, weight in self.model.state_dict().items()}
        twin.load_state_dict(weights, assign=True)
        twin.tokenizer_fingerprint, twin.extra_files = self.model.tokenizer_fingerprint, self.model.extra_files
        return twin

    def save_model(self, folder: Path) -> Model:
        """Write the model as it is now to a folder, and return it, on the CPU."""
        model, history = self.snapshot(), self.checkpoints.history
        self.report_write_errors(lambda: history.make_room(lambda: hub.save(model, self.tok, folder)))
        return model

    def load_weights(self, step: int) -> None:
        """Let the model be as it was tried out at a checkpoint: averaged, if there is an average."""
        folder = self.checkpoints.folder(step)
        tensors = checkpoint.read(folder).tensors
        if self.ema is not None:
            self.model.load_state_dict(_under("ema.", tensors), strict=False)
        elif self.has_lora:
            self.model.load_state_dict(_under("trainable.", tensors), strict=False)
        else:
            self.model.load_state_dict(hub.load(folder, dtype="stored")[0].state_dict())

    def report_write_errors(self, work: Callable[[], object]) -> None:
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
    >>> _ = torch.nn.init.zeros_(model.token_embedding.table.weight)
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
