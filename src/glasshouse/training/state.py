"""Optimizer and random-number-generator state, as named tensors and JSON values."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from glasshouse.errors import StoreError


@dataclass(frozen=True)
class CheckpointData:
    """Named tensors and JSON metadata of a checkpoint."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    metadata: dict[str, Any] = field(default_factory=dict)


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
    metadata = state.metadata["optimizer"]
    restored: dict[int, dict[str, Any]] = {}
    for name, value in _under("optimizer", state.tensors).items():
        number, _, key = name.partition(".")
        restored.setdefault(int(number), {})[key] = value.clone()
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


def device_rng_state(device: torch.device) -> tuple[Tensor, Tensor | None]:
    """Return the state of torch's generators on the CPU and the device, to retry a step."""
    match device.type:
        case "cuda":
            return torch.get_rng_state(), torch.cuda.get_rng_state(device)
        case "mps":
            return torch.get_rng_state(), torch.mps.get_rng_state()
    return torch.get_rng_state(), None


def load_device_rng_state(rng: tuple[Tensor, Tensor | None], device: torch.device) -> None:
    """Restore what `device_rng_state` returned."""
    torch.set_rng_state(rng[0])
    if rng[1] is not None and device.type == "mps":
        torch.mps.set_rng_state(rng[1])
    elif rng[1] is not None:
        torch.cuda.set_rng_state(rng[1], device)


def _under(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    start = prefix + "."
    return {name.removeprefix(start): value for name, value in tensors.items() if name.startswith(start)}
