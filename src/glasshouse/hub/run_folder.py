"""The folder of a training run, read as the model that came of it: `model/`, or its newest intact checkpoint."""

from __future__ import annotations

import hashlib
import json
import re
import warnings
from pathlib import Path
from typing import Any

from glasshouse import store
from glasshouse.errors import StoreError
from glasshouse.hub.model_folder import CONFIG

RUN, MODEL, CHECKPOINTS = "run.toml", "model", "checkpoints"
FORMAT = 2  # of a checkpoint
TENSORS, STATE = "training_state.safetensors", "training_state.json"  # what a checkpoint holds besides its model
NAME = re.compile(r"step-(\d{8,})")


def is_run(folder: str | Path) -> bool:
    """Say whether a folder is that of a run, and not of a model.

    >>> is_run("no such folder")
    False
    """
    folder = Path(folder).expanduser()
    return (folder / RUN).is_file() and not (folder / CONFIG).exists()


def find_run_model(folder: Path) -> Path:
    """Return where the model of a run is, or with a warning its newest intact checkpoint if it has not finished."""
    done = store.surviving_folder(folder / MODEL)
    if (done / CONFIG).is_file():
        return done
    damaged: list[str] = []
    for step in reversed(saved_steps(folder / CHECKPOINTS)):
        found = folder / CHECKPOINTS / step_folder_name(step)
        try:
            check_manifest(found, but=(TENSORS,))
        except StoreError as error:
            damaged.append(str(error))
            continue
        passed = f" (passed over: {' '.join(damaged)})" if damaged else ""
        warnings.warn(
            f"the run in {str(folder)!r} has not finished, so its newest checkpoint is loaded, that of step {step}"
            f"{passed}.",
            stacklevel=4,
        )
        return found
    if damaged:
        raise StoreError(f"the run in {str(folder)!r} has no checkpoint that is intact: {damaged[0]}")
    raise StoreError(
        f"the run in {str(folder)!r} has saved no model and no checkpoint yet; wait for one, or train it on."
    )


def step_folder_name(step: int) -> str:
    """Return the name of the folder of a step.

    >>> name_of(100)
    'step-00000100'
    """
    return f"step-{step:08d}"


def saved_steps(place: Path) -> list[int]:
    """Return the steps that have a folder in a place, the oldest first."""
    found = (NAME.fullmatch(path.name) for path in place.glob("step-*") if path.is_dir())
    return sorted(int(match[1]) for match in found if match)


def check_manifest(folder: Path, but: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return what a checkpoint says about itself, if its files, `but` for these, are as they were written."""
    try:
        table = json.loads((folder / STATE).read_text(encoding="utf-8"))
        sound = table == with_checksum({name: value for name, value in table.items() if name != "sha256"})
        sound = sound and {"format", "files", "metadata"} <= table.keys()
    except FileNotFoundError:
        raise StoreError(f"{str(folder / STATE)!r} is missing, so this is no whole checkpoint.") from None
    except (ValueError, AttributeError, RecursionError):
        sound = False
    if not sound:
        raise StoreError(f"{str(folder / STATE)!r} is damaged; use another checkpoint.")
    if table["format"] != FORMAT:
        raise StoreError(
            f"{str(folder / STATE)!r} is of format {table['format']!r}, but this version reads format {FORMAT}."
        )
    for name, expected in table["files"].items():
        if name in but:
            continue
        if not (folder / name).is_file():
            raise StoreError(f"{str(folder / name)!r} is missing; use another checkpoint.")
        if size_and_hash(folder / name) != expected:
            raise StoreError(f"{str(folder / name)!r} is not what was written; use another checkpoint.")
    return table


def size_and_hash(path: Path) -> list[int | str]:
    """Return the size and the hash of a file."""
    return [path.stat().st_size, store.sha256(path)]


def with_checksum(table: dict[str, Any]) -> dict[str, Any]:
    """Return a table with the hash of what it says, so that a changed letter is found."""
    return {**table, "sha256": hashlib.sha256(json.dumps(table, sort_keys=True).encode()).hexdigest()}
