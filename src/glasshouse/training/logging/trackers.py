"""Experiment trackers: TensorBoard if installed, and wandb on request."""

from __future__ import annotations

import importlib.util
import secrets
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from glasshouse.errors import InputError


class Trackers:
    """Sends the metrics of each step to the trackers; one that fails is disabled with a warning.

    `start` is the first step to be written: TensorBoard purges earlier values from that step on.

    >>> import tempfile
    >>> trackers = Trackers(Path(tempfile.mkdtemp()), name="tiny")
    >>> trackers.write(0, {"loss": 5.1, "validation_loss": 5.2})
    >>> trackers.close()
    """

    def __init__(
        self, folder: Path, wandb: bool = False, name: str = "", start: int = 0, *, writes: bool = True
    ) -> None:
        self._trackers: dict[str, _Tracker] = {}
        if not writes:  # left to another process
            return
        if wandb:
            try:
                module = importlib.import_module("wandb")
            except ImportError:
                raise InputError(
                    "train.wandb is set, but wandb is not installed; run pip install 'glasshouse[wandb]' or unset it."
                ) from None
            self._open("wandb", lambda: _Wandb(module, folder, name))
        if importlib.util.find_spec("tensorboard"):
            self._open("TensorBoard", lambda: _TensorBoard(folder / "tensorboard", start))

    def write(self, step: int, values: dict[str, Any]) -> None:
        """Send the numbers; validation_loss becomes validation/loss, which groups validation metrics."""
        numbers = {
            name.replace("validation_", "validation/", 1) if name.startswith("validation_") else name: value
            for name, value in values.items()
            if isinstance(value, (int, float)) and not isinstance(value, bool)
        }
        for name, tracker in list(self._trackers.items()):
            try:
                tracker.write(step, numbers)
            except Exception as error:
                self._drop(name, error)

    def close(self) -> None:
        """Flush and close; later writes are ignored."""
        for name, tracker in list(self._trackers.items()):
            try:
                tracker.close()
            except Exception as error:
                self._drop(name, error)
        self._trackers.clear()

    def _open(self, name: str, tracker: Callable[[], _Tracker]) -> None:
        try:
            self._trackers[name] = tracker()
        except Exception as error:
            self._drop(name, error)

    def _drop(self, name: str, error: Exception) -> None:
        self._trackers.pop(name, None)  # first, since a warning may be turned into an error
        warnings.warn(
            f"{name} failed ({type(error).__name__}: {error}) and is disabled; training continues.",
            stacklevel=3,
        )


class _Tracker(Protocol):
    def write(self, step: int, numbers: dict[str, float]) -> None: ...

    def close(self) -> None: ...


class _TensorBoard:
    def __init__(self, folder: Path, start: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(folder, purge_step=start)

    def write(self, step: int, numbers: dict[str, float]) -> None:
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()  # a killed run has logged every step, as in metrics.jsonl

    def close(self) -> None:
        self._writer.close()


class _Wandb:
    def __init__(self, wandb: ModuleType, folder: Path, name: str) -> None:
        known = folder / "wandb.id"  # a resumed run keeps its id; repeated steps are logged once
        if not known.is_file():
            known.write_text(secrets.token_hex(8), encoding="utf-8")
        self._run: Any = wandb.init(dir=folder, name=name, id=known.read_text(encoding="utf-8"), resume="allow")

    def write(self, step: int, numbers: dict[str, float]) -> None:
        self._run.log(numbers, step=step)

    def close(self) -> None:
        self._run.finish()
