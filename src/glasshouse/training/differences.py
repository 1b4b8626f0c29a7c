"""Which settings differ between two runs and may not: a run is resumed with the settings it began with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from glasshouse.config import JsonDict

# Settings that may change on resume: none changes the result of a step; train.patience only when the run stops.
CHANGEABLE_ON_RESUME = {
    *("train.out", "train.keep_checkpoints", "train.save_every", "train.eval_every", "train.eval_samples"),
    *("train.patience", "train.probes", "train.sample_prompts", "train.keep_snapshots", "train.parallel.kind"),
    *("train.device", "train.compile", "train.grad_accum", "train.workers", "train.on_nonfinite", "train.wandb"),
    "train.parallel.tensor",
}


def describe_differences(before: JsonDict, after: JsonDict) -> list[str]:
    """Describe the settings that differ between two nested tables and that may not change on resume."""
    old, new = dict(_flat(before)), dict(_flat(after))
    keys = [key for key in {**old, **new} if key not in CHANGEABLE_ON_RESUME and old.get(key) != new.get(key)]
    return [f"{key} was {_shown(old.get(key))} and is {_shown(new.get(key))}" for key in keys]


def _flat(table: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{path}{key}.")
        else:
            yield f"{path}{key}", value


def _shown(value: object) -> str:
    return "not given" if value is None else repr(value)
