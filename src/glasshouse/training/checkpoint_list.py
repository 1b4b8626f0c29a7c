"""The moments of a run: every set of weights that its folder holds, also while it is still learning."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from glasshouse.hub.model_folder import CONFIG
from glasshouse.hub.run_folder import CHECKPOINTS, MODEL, saved_steps, step_folder_name
from glasshouse.training.snapshots import SNAPSHOTS


@dataclass(frozen=True)
class SavedCheckpoint:
    """Weights, after so many steps, that `gh.load` reads from their folder.

    >>> SavedCheckpoint(100, "step 100", Path("runs/mine/snapshots/step-00000100")).name
    'step 100'
    """

    step: int
    name: str  # "step 100", or "final": the model that came of the run, which may be its best or an average
    folder: Path


def list_checkpoints(folder: str | Path) -> list[SavedCheckpoint]:
    """Return the moments of a run, the earliest first; none where it has no weights yet.

    While the run goes on, one may be gone, or have moved, when it is to be loaded: then list them again.
    """
    folder = Path(folder).expanduser()
    # What moves from one place to the other while they are listed is found in the first, or in both.
    places = {step: folder / place for place in (CHECKPOINTS, SNAPSHOTS) for step in saved_steps(folder / place)}
    found = [SavedCheckpoint(step, f"step {step}", places[step] / step_folder_name(step)) for step in sorted(places)]
    if (folder / MODEL / CONFIG).is_file():
        found.append(SavedCheckpoint(max(places, default=0), "final", folder / MODEL))
    return found
