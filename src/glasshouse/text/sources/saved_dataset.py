"""Folders that `save_to_disk` of Hugging Face `datasets` wrote: which of their files hold the data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from glasshouse.errors import InputError

STATE, SPLITS = "state.json", "dataset_dict.json"


def data_files(folder: Path) -> list[Path] | None:
    """Return the files with the rows of a saved dataset, which its cache lies beside; None for any other folder."""
    match _read(folder / SPLITS):
        case {"splits": [str(first), *others]}:
            second = f" data.validation={folder / str(others[0])}" if others else ""
            raise InputError(
                f"{str(folder)!r} has the splits {', '.join([first, *map(str, others)])}; give one, such as "
                f"{folder / first} (of a run, data.path={folder / first}{second})."
            )
    match _read(folder / STATE):
        case {"_data_files": [*entries]} if entries:
            return [folder / str(entry["filename"]) for entry in entries]
    return None


def _read(path: Path) -> Any:  # noqa: ANN401 - any JSON value
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
