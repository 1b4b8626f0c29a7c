"""Saves and restores everything a run needs to resume exactly: model, optimizer, EMA, RNG and loop state."""

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
    """Position of the training loop."""

    step: int = 0  # updates done
    next_batch: int = 0  # index of the next batch
    skipped: tuple[int, ...] = field(default=())  # indices of skipped batches
    best: tuple[int, float] | None = None  # step and loss of the best evaluation
    evals_since_best: int = 0  # the patience counter
    grad_accum: int = 1  # micro-batches per step
    initial_steps: int = 0  # train.steps at the start: default intervals stay the same when it is raised
    pending_metrics: JsonDict | None = None  # of a step not yet validated and logged

    @property
    def unwritten(self) -> int:
        """The first step that the journals must not contain yet."""
        return self.step + (self.pending_metrics is None)


class Checkpointer:
    """Saves and restores a model and its training state."""

    def __init__(
        self, model: Model, step_fn: TrainStep, ema: EMA | None, tok: Tokenizer, checkpoints: Checkpoints
    ) -> None:
        self.model, self.step_fn, self.ema, self.tok = model, step_fn, ema, tok
        self.checkpoints = checkpoints
        self.has_lora = bool(lora.lora_layers(model))  # then the saved model is merged, and LoRA is saved apart
        self.base = fingerprint(model) if self.has_lora else None

    def save(self, state: TrainerState) -> None:
        """Write a checkpoint in the background."""
        optimizer, rng = optimizer_state(self.step_fn.optimizer), rng_state()
        tensors = {**optimizer.tensors, **rng.tensors}
        if self.ema is not None:
            tensors |= {f"ema.{name}": weight for name, weight in self.ema.weights.items()}
        if self.has_lora:
            trainable = ((name, weight) for name, weight in self.model.named_parameters() if weight.requires_grad)
            tensors |= {f"trainable.{name}": weight for name, weight in trainable}
        metadata = {
            **optimizer.metadata,
            **rng.metadata,
            "grad_scaler": self.step_fn.state_dict(),
            "ema_updates": None if self.ema is None else self.ema.updates,
            "base_fingerprint": self.base,
            "trainer_state": asdict(state),
        }
        saved = CheckpointData(
            {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}, copy.deepcopy(metadata)
        )
        write, best = folder_writer(self.snapshot(), self.tok), None if state.best is None else state.best[0]
        self.report_write_errors(lambda: self.checkpoints.save(state.step, write, saved, best))

    def save_initial(self) -> None:
        """Save the initial model as the first snapshot."""
        if self.checkpoints.snapshots.limit:
            write = folder_writer(self.snapshot(), self.tok)
            self.report_write_errors(lambda: self.checkpoints.save_initial(write))

    def restore(self, step: int, state: CheckpointData) -> TrainerState:
        """Restore what `save` wrote, and return the state of the loop."""
        if self.has_lora:
            if state.metadata["base_fingerprint"] != self.base:
                raise StoreError(
                    "the base model of this run (model.from) has changed since the run began; restore the old one, "
                    "or start a new run by train.out=FOLDER."
                )
            self.model.load_state_dict(_under("trainable.", state.tensors), strict=False)
        else:
            saved, _ = hub.load(self.checkpoints.folder(step), dtype="stored")
            self.model.load_state_dict(saved.state_dict())
        load_optimizer_state(state, self.step_fn.optimizer)
        self.step_fn.load_state_dict(state.metadata["grad_scaler"])
        if self.ema is not None:
            self.ema.restore(_under("ema.", state.tensors), state.metadata["ema_updates"])
        load_rng_state(state)
        restored = TrainerState(**state.metadata["trainer_state"])
        best = None if restored.best is None else (restored.best[0], restored.best[1])
        return replace(restored, skipped=tuple(restored.skipped), best=best)

    def snapshot(self) -> Model:
        """Return a copy of the model on the CPU, LoRA merged, which can be written while training continues."""
        if self.has_lora:
            merged = copy.deepcopy(self.model).to("cpu")
            lora.merge(merged)
            return merged
        with torch.device("meta"):
            copied = instantiate(self.model.spec)
        weights = {name: weight.detach().to("cpu", copy=True) for name, weight in self.model.state_dict().items()}
        copied.load_state_dict(weights, assign=True)
        copied.tokenizer_fingerprint, copied.extra_files = self.model.tokenizer_fingerprint, self.model.extra_files
        return copied

    def save_model(self, folder: Path) -> Model:
        """Save the current model to a folder, and return a copy on the CPU."""
        model, snapshots = self.snapshot(), self.checkpoints.snapshots
        self.report_write_errors(lambda: snapshots.make_room(lambda: hub.save(model, self.tok, folder)))
        return model

    def load_weights(self, step: int) -> None:
        """Load the weights that were validated at a checkpoint: the EMA, if there is one."""
        folder = self.checkpoints.folder(step)
        tensors = checkpoint.read(folder).tensors
        if self.ema is not None:
            self.model.load_state_dict(_under("ema.", tensors), strict=False)
        elif self.has_lora:
            self.model.load_state_dict(_under("trainable.", tensors), strict=False)
        else:
            self.model.load_state_dict(hub.load(folder, dtype="stored")[0].state_dict())

    def report_write_errors(self, work: Callable[[], object]) -> None:
        """Turn an OSError into a sentence that names the last checkpoint."""
        try:
            work()
        except OSError as error:
            steps = self.checkpoints.steps()
            last = f"the last intact checkpoint is step {steps[0]}" if steps else "there is no checkpoint yet"
            raise StoreError(
                f"the run could not be saved ({error}); {last}: free disk space and run the same command again."
            ) from None


def fingerprint(model: Model) -> str:
    """Return the SHA-256, in hexadecimal, of the spec and the frozen tensors of a model.

    >>> import glasshouse as gh
    >>> model = gh.build(gh.preset("tiny-decoder")).requires_grad_(False)
    >>> before = fingerprint(model)
    >>> _ = torch.nn.init.zeros_(model.token_embedding.table.weight)
    >>> fingerprint(model) == before
    False
    """
    digest = hashlib.sha256(json.dumps(config.dump(model.spec), sort_keys=True).encode())
    trainable = {name for name, weight in model.named_parameters() if weight.requires_grad}
    for name, tensor in sorted(model.state_dict().items()):
        if name not in trainable:
            plain = tensor.detach().to("cpu").contiguous()
            digest.update(f"{name} {plain.dtype} {list(plain.shape)}".encode())
            digest.update(plain.view(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def _under(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
