"""What a checkpoint saves and restores: model, optimizer, EMA, random number generators and the state of the loop."""

from __future__ import annotations

import copy
import hashlib
import json
import random
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from glasshouse import config, hub
from glasshouse.config import JsonDict
from glasshouse.errors import InputError, StoreError
from glasshouse.hub.model_folder import MODEL_STEM, ModelFolder
from glasshouse.hub.serialization import folder_writer
from glasshouse.hub.tensor_shards import SavedTensors, shard_name, write_shard
from glasshouse.layers import lora
from glasshouse.models import Model
from glasshouse.models.builder import instantiate
from glasshouse.models.weights import first_names
from glasshouse.spec import Spec
from glasshouse.text import Tokenizer
from glasshouse.training.checkpoint import shards
from glasshouse.training.checkpoint.shards import is_split, owned_chunks, read_like, write_folder
from glasshouse.training.checkpoint.store import CheckpointData, Checkpoints, read
from glasshouse.training.distributed.fsdp import gathered, whole
from glasshouse.training.run import describe_differences
from glasshouse.training.step import EMA, TrainStep


@dataclass
class TrainerState:
    """Position of the training loop."""

    step: int = 0  # updates done
    next_batch: int = 0  # index of the next batch
    skipped: tuple[int, ...] = ()  # indices of skipped batches
    best: tuple[int, float] | None = None  # step and loss of the best evaluation
    evals_since_best: int = 0  # the patience counter
    grad_accum: int = 1  # micro-batches per step
    initial_steps: int = 0  # train.steps at the start: default sizes stay the same when it is raised
    interval: int = 0  # steps between validations, and between checkpoints, by default
    seconds: float = 0.0  # of train.minutes, used
    seconds_in_loop: float = 0.0  # of these, in the training loop
    report_samples: int = 0  # validation samples of the last report; 0: all
    pending_metrics: JsonDict | None = None  # of a step not yet validated and logged
    stream: JsonDict | None = None  # the state of an iterable dataset at the next batch
    # names of what was given in Python, and fingerprints of an objective's frozen models
    custom: dict[str, str] = field(default_factory=dict)

    @property
    def unwritten(self) -> int:
        """The first step that the journals must not contain yet."""
        return self.step + (self.pending_metrics is None)

    def restore(self, saved: JsonDict) -> None:
        """Restore what `asdict` returned, after JSON."""
        vars(self).update(vars(restored := TrainerState(**saved)))
        self.skipped = tuple(restored.skipped)
        self.best = None if restored.best is None else (restored.best[0], restored.best[1])


def _check_custom(saved: Mapping[str, str], given: Mapping[str, str]) -> None:
    """Refuse a checkpoint of another custom objective, optimizer or dataset."""
    if saved != given:
        raise StoreError(
            f"the run was trained with {_brought(saved)} and is resumed with {_brought(given)}; resume it by "
            "gh.train with the same, or start a new run by train.out=FOLDER."
        )


def _brought(custom: Mapping[str, str]) -> str:
    return " and ".join(f"{name}={value}" for name, value in custom.items()) or "its settings alone"


class Checkpointer:
    """Saves and restores a model and its training state."""

    def __init__(
        self,
        model: Model,
        train_step: TrainStep,
        ema: EMA | None,
        state: TrainerState,
        tok: Tokenizer | None,
        checkpoints: Checkpoints,
    ) -> None:
        self.model, self.train_step, self.ema, self.state, self.tok = model, train_step, ema, state, tok
        self.checkpoints, self.processes = checkpoints, checkpoints.processes
        self.has_lora = bool(lora.lora_layers(model))  # then the saved model is merged, and LoRA is saved apart
        self.base = fingerprint(model) if self.has_lora else None

    def save(self) -> None:
        """Write a checkpoint in the background."""
        optimizer, rng = optimizer_state(self.train_step.optimizer), rng_state()
        tensors: dict[str, Tensor] = {**optimizer.tensors, **rng.tensors}
        if self.ema is not None:
            tensors |= {f"ema.{name}": weight for name, weight in self.ema.weights.items()}
        if self.has_lora:
            trainable = ((name, weight) for name, weight in self.model.named_parameters() if weight.requires_grad)
            tensors |= {f"trainable.{name}": weight for name, weight in trainable}
        metadata = {
            **optimizer.metadata,
            **rng.metadata,
            "grad_scaler": self.train_step.state_dict(),
            "ema_updates": None if self.ema is None else self.ema.updates,
            "base_fingerprint": self.base,
            "trainer_state": asdict(self.state),
        }
        owned, metadata = owned_chunks(tensors, is_main=self.processes.is_main), copy.deepcopy(metadata)
        if is_split(tensors.values()):
            saved = CheckpointData({}, metadata, owned)
        else:
            saved = CheckpointData({name: chunk.tensor for name, chunk in owned.items()}, metadata)
        step, best = self.state.step, None if self.state.best is None else self.state.best[0]
        with self.report_write_errors():
            self.checkpoints.save(step, self._model_writer(), saved, best)

    def save_initial(self) -> None:
        """Save the initial model as the first snapshot."""
        if self.checkpoints.snapshots.limit:
            with self.report_write_errors():
                self.checkpoints.save_initial(self._model_writer())

    def _model_writer(self) -> Callable[[Path], None]:
        """Copy the model, and return a function that writes this process's part of it."""
        weights, processes = self.model.state_dict(), self.processes
        if self.has_lora or not is_split(weights.values()):
            copied = self.snapshot()
            return folder_writer(copied, self.tok) if copied is not None else lambda folder: None
        model, name = self._on_meta(), shard_name(MODEL_STEM, processes.rank + 1, processes.world_size)
        once = {one: weights[one] for one, first in first_names(model).items() if one == first}
        owned = owned_chunks(once, is_main=processes.is_main)
        write_rest = folder_writer(model, self.tok, weights=False)

        def fill(folder: Path) -> None:
            write_shard(folder / name, owned)
            if processes.is_main:
                write_rest(folder)

        return fill

    def check(self) -> None:
        """Raise the error of a background write that has ended."""
        with self.report_write_errors():
            self.checkpoints.check()

    def wait(self) -> None:
        """Wait for the background write."""
        with self.report_write_errors():
            self.checkpoints.wait()

    def restore(self, step: int, data: CheckpointData) -> None:
        """Restore what `save` wrote."""
        _check_custom(data.metadata["trainer_state"].get("custom", {}), self.state.custom)
        if self.has_lora:
            if data.metadata["base_fingerprint"] != self.base:
                raise StoreError(
                    "the base model of this run (model.from) has changed since the run began; restore the old one, "
                    "or start a new run by train.out=FOLDER."
                )
            shards.load(self.model.state_dict(), data.saved, "trainable.")
        else:
            spec, weights = saved_weights(self.checkpoints.folder(step))
            self._check_spec(spec, step)
            shards.load(self.model.state_dict(), weights)
        load_optimizer_state(data, self.train_step.optimizer)
        self.train_step.load_state_dict(data.metadata["grad_scaler"])
        if self.ema is not None:
            self.ema.updates = data.metadata["ema_updates"]
            shards.load(self.ema.weights, data.saved, "ema.")
        load_rng_state(data)
        self.state.restore(data.metadata["trainer_state"])

    def _check_spec(self, saved: Spec, step: int) -> None:
        """Refuse the checkpoint of another model, even if its weights would fit."""
        specs = ({"model": config.dump(s)} for s in (saved, self.model.spec))
        if differences := describe_differences(*specs):
            raise InputError(
                f"{differences[0]} in the run, but the checkpoint {str(self.checkpoints.folder(step))!r} has the "
                "old value; give that to resume, or train.out=FOLDER to start a new run."
            )

    def snapshot(self) -> Model | None:
        """Return a copy of the model on the CPU, LoRA merged, which can be written while training continues.

        Several processes gather it for the main one; the others get None.
        """
        if (copied := gathered(self.model, torch.device("cpu"), keep=self.processes.is_main)) and self.has_lora:
            lora.merge(copied)
        return copied

    def _on_meta(self) -> Model:
        """Return the model without its weights."""
        with torch.device("meta"):
            copied = instantiate(self.model.spec)
        copied.tokenizer_fingerprint, copied.extra_files = self.model.tokenizer_fingerprint, self.model.extra_files
        return copied

    def save_model(self, folder: Path, finish: Callable[[Model], Model]) -> Model:
        """Save the finished model to a folder, and return a copy on the CPU; without weights if another saves it."""
        if not self.has_lora and is_split(self.model.state_dict().values()):
            return self._save_from_shards(folder)
        if (copied := self.snapshot()) is None:
            return self._on_meta()
        model = finish(copied)
        with self.report_write_errors():
            self.checkpoints.snapshots.make_room(lambda: hub.save(model, self.tok, folder))
        return model

    def _save_from_shards(self, folder: Path) -> Model:
        """Save a model whose processes write their shards, of which the main one makes whole tensors, one by one."""
        shards, room = folder.with_name(f".{folder.name}.shards"), self.checkpoints.snapshots.make_room
        fill, model = self._model_writer(), self._on_meta()
        with self.report_write_errors():
            room(lambda: write_folder(shards, fill, self.processes), self.processes)
            if not self.processes.is_main:
                return model
            weights = saved_weights(shards)[1]
            room(lambda: hub.save(model, self.tok, folder, read=weights.__getitem__))
            shutil.rmtree(shards, ignore_errors=True)
        return hub.load(folder, dtype="stored", check=False)[0]  # memory-mapped

    def load_weights(self, step: int) -> None:
        """Load the weights that were validated at a checkpoint: the EMA, if there is one."""
        folder = self.checkpoints.folder(step)
        tensors = read(folder, self.processes).saved
        if self.ema is not None:
            shards.load(self.model.state_dict(), tensors, "ema.")
        elif self.has_lora:
            shards.load(self.model.state_dict(), tensors, "trainable.")
        else:
            shards.load(self.model.state_dict(), saved_weights(folder)[1])

    @contextmanager
    def report_write_errors(self) -> Iterator[None]:
        """Turn an OSError into a sentence that names the last checkpoint."""
        try:
            yield
        except OSError as error:
            steps = self.checkpoints.steps()
            last = f"the last intact checkpoint is step {steps[0]}" if steps else "there is no checkpoint yet"
            raise StoreError(
                f"the run could not be saved ({error}); {last}: free disk space and run the same command again."
            ) from None


def saved_weights(folder: Path) -> tuple[Spec, SavedTensors]:
    """Return the spec and the weights, memory-mapped, of a checkpoint: whole, or in shards."""
    sharded = ModelFolder(folder).sharded_weights()
    model, _ = hub.load(folder, device="cpu" if sharded is None else "meta", dtype="stored")
    return model.spec, SavedTensors.of(model.state_dict()) if sharded is None else sharded


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
            plain: Any = whole(tensor.detach()).to("cpu").contiguous()
            digest.update(f"{name} {plain.dtype} {list(plain.shape)}".encode())
            digest.update(plain.view(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def optimizer_state(optimizer: torch.optim.Optimizer) -> CheckpointData:
    """Return an optimizer's state: tensors by parameter index, and its param groups."""
    state_dict = optimizer.state_dict()
    tensors, scalars = {}, {}
    for number, values in state_dict["state"].items():
        for name, value in values.items():
            if isinstance(value, Tensor):
                tensors[f"optimizer.{number}.{name}"] = value
            else:
                scalars[f"{number}.{name}"] = value
    return CheckpointData(tensors, {"optimizer": {"param_groups": state_dict["param_groups"], "scalars": scalars}})


def load_optimizer_state(state: CheckpointData, optimizer: torch.optim.Optimizer) -> None:
    """Load what `optimizer_state` returned into an optimizer of the same parameters."""
    metadata, saved = state.metadata["optimizer"], state.saved
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    restored: dict[int, dict[str, Any]] = {}
    for name in saved:
        if (match := re.fullmatch(r"optimizer\.(\d+)\.(\w+)", name)) and int(match[1]) < len(weights):
            # An average has the shape of its weight, and is split like it; a step count has no shape.
            like = weights[int(match[1])] if saved.shape(name) else torch.empty(0)
            restored.setdefault(int(match[1]), {})[match[2]] = read_like(like, saved, name).clone()
    for name, value in metadata["scalars"].items():
        number, _, key = name.partition(".")
        restored.setdefault(int(number), {})[key] = value
    try:
        optimizer.load_state_dict({"state": restored, "param_groups": metadata["param_groups"]})
    except (ValueError, KeyError) as error:
        reason = str(error).partition("\n")[0]
        raise StoreError(
            f"the checkpoint's optimizer state does not fit this optimizer ({reason}); start a new run."
        ) from None


def rng_state() -> CheckpointData:
    """Return the state of every random number generator: torch's on each device, Python's and numpy's."""
    tensors = {"rng.cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        tensors |= {f"rng.cuda.{i}": state for i, state in enumerate(torch.cuda.get_rng_state_all())}
    if torch.backends.mps.is_available():
        tensors["rng.mps"] = torch.mps.get_rng_state()
    name, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    tensors["rng.numpy"] = torch.from_numpy(np.asarray(keys).astype(np.int64))
    version, numbers, pending = random.getstate()
    tensors["rng.python"] = torch.tensor(numbers, dtype=torch.int64)
    metadata = {"numpy": [name, int(position), int(has_gauss), float(gauss)], "python": [version, pending]}
    return CheckpointData(tensors, {"rng": metadata})


def load_rng_state(state: CheckpointData) -> None:
    """Restore every random number generator; devices that this machine lacks are skipped."""
    tensors, metadata = _under("rng", state.tensors), state.metadata["rng"]
    torch.set_rng_state(tensors["cpu"].clone())
    if torch.cuda.is_available():
        for i in range(torch.cuda.device_count()):
            if f"cuda.{i}" in tensors:
                torch.cuda.set_rng_state(tensors[f"cuda.{i}"].clone(), i)
    if torch.backends.mps.is_available() and "mps" in tensors:
        torch.mps.set_rng_state(tensors["mps"].clone())
    name, position, has_gauss, gauss = metadata["numpy"]
    np.random.set_state((name, tensors["numpy"].numpy().astype(np.uint32), position, has_gauss, gauss))
    version, pending = metadata["python"]
    random.setstate((version, tuple(tensors["python"].tolist()), pending))


def _under(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    start = prefix + "."
    return {name.removeprefix(start): value for name, value in tensors.items() if name.startswith(start)}
