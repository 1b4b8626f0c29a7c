"""Find the model in the folder of a training run: `model/`, or its latest intact checkpoint."""

from __future__ import annotations

import hashlib
import json
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from glasshouse import store
from glasshouse.errors import StoreError
from glasshouse.hub.model_folder import CONFIG

RUN, MODEL, CHECKPOINTS = "run.toml", "model", "checkpoints"
FORMAT = 2  # of a checkpoint
STATE_STEM = "training_state"  # of the names of all files of a checkpoint next to its model
TENSORS, STATE = f"{STATE_STEM}.safetensors", f"{STATE_STEM}.json"
STATE_OF_FORMAT_1 = "training.json"
NAME = re.compile(r"step-(\d{8,})")


def is_run(folder: str | Path) -> bool:
    """Return whether a folder is a run folder, not a model folder.

    >>> is_run("no such folder")
    False
    """
    folder = Path(folder).expanduser()
    return (folder / RUN).is_file() and not (folder / CONFIG).exists()


def find_run_model(folder: Path) -> Path:
    """Return the folder of a run's final model, or with a warning the latest checkpoint of an unfinished run."""
    done = store.surviving_folder(folder / MODEL)
    if (done / CONFIG).is_file():
        return done
    damaged: list[str] = []
    for step in reversed(saved_steps(folder / CHECKPOINTS)):
        found = folder / CHECKPOINTS / step_folder_name(step)
        try:
            check_manifest(found, only=is_weights)
        except StoreError as error:
            damaged.append(str(error))
            continue
        skipped = f" (skipped: {' '.join(damaged)})" if damaged else ""
        warnings.warn(
            f"the run in {str(folder)!r} has not finished, so its latest checkpoint is loaded, that of step {step}"
            f"{skipped}.",
            stacklevel=4,
        )
        return found
    if damaged:
        raise StoreError(f"the run in {str(folder)!r} has no intact checkpoint: {damaged[0]}")
    raise StoreError(
        f"the run in {str(folder)!r} has saved no model and no checkpoint yet; wait for one, or resume training."
    )


def step_folder_name(step: int) -> str:
    """Return the folder name of a step.

    >>> step_folder_name(100)
    'step-00000100'
    """
    return f"step-{step:08d}"


def saved_steps(root: Path) -> list[int]:
    """Return the steps that have a folder under root, in ascending order."""
    found = (NAME.fullmatch(path.name) for path in root.glob("step-*") if path.is_dir())
    return sorted(int(match[1]) for match in found if match)


def is_weights(name: str) -> bool:
    """Return whether a file of a checkpoint belongs to its model, not to the training state.

    >>> is_weights("model.safetensors"), is_weights("training_state.shard-00001-of-00002.safetensors")
    (True, False)
    """
    return not name.startswith(f"{STATE_STEM}.")


def check_manifest(
    folder: Path, only: Callable[[str], bool] = lambda name: True, share: slice = slice(None)
) -> dict[str, Any]:
    """Return the manifest of a checkpoint, after verifying its files: `only` of these, and a `share` of them."""
    try:
        table = json.loads((folder / STATE).read_text(encoding="utf-8"))
        intact = table == with_checksum({name: value for name, value in table.items() if name != "sha256"})
        intact = intact and {"format", "files", "metadata"} <= table.keys()
    except FileNotFoundError:
        if (folder / STATE_OF_FORMAT_1).is_file():
            raise StoreError(
                f"{str(folder)!r} has the old checkpoint format 1, but this version reads format {FORMAT}; use the "
                "version of glasshouse that wrote it, or train again."
            ) from None
        raise StoreError(f"{str(folder / STATE)!r} is missing, so the checkpoint is incomplete.") from None
    except (ValueError, AttributeError, RecursionError):
        intact = False
    if not intact:
        raise StoreError(f"{str(folder / STATE)!r} is damaged; use another checkpoint.")
    if table["format"] != FORMAT:
        raise StoreError(
            f"{str(folder / STATE)!r} has format {table['format']!r}, but this version reads format {FORMAT}."
        )
    for name, expected in list(table["files"].items())[share]:
        if not only(name):
            continue
        if not (folder / name).is_file():
            raise StoreError(f"{str(folder / name)!r} is missing; use another checkpoint.")
        if size_and_hash(folder / name) != expected:
            raise StoreError(f"{str(folder / name)!r} does not match its checksum; use another checkpoint.")
    return table


def size_and_hash(path: Path) -> list[int | str]:
    """Return the size and the SHA-256 hash of a file."""
    return [path.stat().st_size, store.sha256(path)]


def with_checksum(table: dict[str, Any]) -> dict[str, Any]:
    """Return a table with a checksum of its contents."""
    return {**table, "sha256": hashlib.sha256(json.dumps(table, sort_keys=True).encode()).hexdigest()}
