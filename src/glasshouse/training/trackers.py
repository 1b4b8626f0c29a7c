"""What a run shows of itself elsewhere: TensorBoard where it is installed, and wandb where it is asked for."""

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
    """Sends the numbers of each step to the trackers; one that fails is warned of once and left out from there on.

    `start` is the first step that will be written: what TensorBoard had of it and of later steps is no longer shown.

    >>> import tempfile
    >>> trackers = Trackers(Path(tempfile.mkdtemp()), name="tiny")
    >>> trackers.write(0, {"loss": 5.1, "validation_loss": 5.2})
    >>> trackers.close()
    """

    def __init__(self, folder: Path, wandb: bool = False, name: str = "", start: int = 0) -> None:
        self._trackers: dict[str, _Tracker] = {}
        if wandb:
            try:
                module = importlib.import_module("wandb")
            except ImportError:
                raise InputError(
                    "wandb is asked for and not installed; run pip install 'glasshouse[wandb]', or do without it."
                ) from None
            self._open("wandb", lambda: _Wandb(module, folder, name))
        if importlib.util.find_spec("tensorboard"):
            self._open("TensorBoard", lambda: _TensorBoard(folder / "tensorboard", start))

    def write(self, step: int, values: dict[str, Any]) -> None:
        """Send what is a number, with validation_loss as validation/loss, so that its kind stands together."""
        numbers = {
            name.replace("validation_", "validation/", 1) if name.startswith("validation_") else name: value
            for name, value in values.items()
            if isinstance(value, (int, float)) and not isinstance(value, bool)
        }
        for which, tracker in list(self._trackers.items()):
            try:
                tracker.write(step, numbers)
            except Exception as error:
                self._drop(which, error)

    def close(self) -> None:
        """Send what is still on its way; later writes go nowhere."""
        for which, tracker in list(self._trackers.items()):
            try:
                tracker.close()
            except Exception as error:
                self._drop(which, error)
        self._trackers.clear()

    def _open(self, which: str, tracker: Callable[[], _Tracker]) -> None:
        try:
            self._trackers[which] = tracker()
        except Exception as error:
            self._drop(which, error)

    def _drop(self, which: str, error: Exception) -> None:
        self._trackers.pop(which, None)  # first, since a warning may be made an error
        warnings.warn(
            f"{which} failed ({type(error).__name__}: {error}) and is left out from here on; training goes on.",
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
        self._writer.flush()  # a run that is killed has shown all it did, as in its journal

    def close(self) -> None:
        self._writer.close()


class _Wandb:
    def __init__(self, wandb: ModuleType, folder: Path, name: str) -> None:
        known = folder / "wandb.id"  # a run that goes on is the same run there; the steps it does again are kept once
        if not known.is_file():
            known.write_text(secrets.token_hex(8), encoding="utf-8")
        self._run: Any = wandb.init(dir=folder, name=name, id=known.read_text(encoding="utf-8"), resume="allow")

    def write(self, step: int, numbers: dict[str, float]) -> None:
        self._run.log(numbers, step=step)

    def close(self) -> None:
        self._run.finish()
