"""All saved weights in a run folder: checkpoints, snapshots and the final model, also during training."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from glasshouse.hub.model_folder import CONFIG
from glasshouse.hub.run_checkpoints import CHECKPOINTS, MODEL, saved_steps, step_folder_name
from glasshouse.training.snapshots import SNAPSHOTS


@dataclass(frozen=True)
class SavedCheckpoint:
    """Weights saved after a step, in a folder for `gh.load`.

    >>> SavedCheckpoint(100, "step 100", Path("runs/mine/snapshots/step-00000100")).name
    'step 100'
    """

    step: int
    name: str  # "step 100", or "final": the final model, which may be the best or the EMA
    folder: Path


def list_checkpoints(folder: str | Path) -> list[SavedCheckpoint]:
    """Return the saved checkpoints of a run, oldest first; empty if it has no weights yet.

    During training a folder may move or be deleted before it is loaded: list them again then.
    """
    folder = Path(folder).expanduser()
    # A checkpoint that becomes a snapshot meanwhile is found in the first folder, or in both.
    parents = {step: folder / name for name in (CHECKPOINTS, SNAPSHOTS) for step in saved_steps(folder / name)}
    found = [
        SavedCheckpoint(step, f"step {step}", parents[step] / step_folder_name(step)) for step in sorted(parents)
    ]
    if (folder / MODEL / CONFIG).is_file():
        found.append(SavedCheckpoint(max(parents, default=0), "final", folder / MODEL))
    return found
