"""A sweep: one run with every combination of some settings, each trial in a process and a folder of its own."""

from __future__ import annotations

import itertools
import json
import math
import os
import queue
import re
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from glasshouse.errors import InputError
from glasshouse.training.checkpoint.folder import METRICS
from glasshouse.training.logging.journal import Journal
from glasshouse.training.logging.plots import STYLE

LOG, RESULTS = "log.txt", "sweep.json"
SEED = "train.seed"
LONGEST_NAME = 100  # characters of a folder


@dataclass(frozen=True)
class Trial:
    """One combination: the settings that differ between trials, and all that are given to its run."""

    swept: dict[str, str]
    settings: list[str]

    @property
    def name(self) -> str:
        """The name of its folder: `lr=1e-3,seed=0`."""
        text = ",".join(f"{key.rpartition('.')[2]}={value}" for key, value in self.swept.items()) or "run"
        return re.sub(r"[^\w.,=+-]", "_", text)[:LONGEST_NAME]


@dataclass
class Outcome:
    """How a trial ended, and its validation losses by step."""

    trial: Trial
    error: str | None = None
    seconds: float = 0.0
    losses: list[tuple[int, float]] = field(default_factory=list)

    @property
    def last(self) -> float:
        """The last validation loss; infinity if there is none."""
        return self.losses[-1][1] if self.losses else math.inf

    @property
    def lowest(self) -> tuple[int, float]:
        """The step with the lowest validation loss, and that."""
        return min(self.losses, key=lambda one: one[1], default=(0, math.inf))


def trials(settings: Sequence[str]) -> list[Trial]:
    """Return every combination of settings whose values have commas outside of brackets and quotes.

    >>> [one.name for one in trials(["train.lr=1e-3,3e-3", "train.steps=100", "train.seed=0,1"])]
    ['lr=1e-3,seed=0', 'lr=1e-3,seed=1', 'lr=3e-3,seed=0', 'lr=3e-3,seed=1']
    >>> trials(['data.columns=["en","de"]'])[0].settings
    ['data.columns=["en","de"]']
    """
    values = {key: split_values(text) for key, _, text in (one.partition("=") for one in settings)}
    if len(values) < len(settings):
        raise InputError("a setting is given twice; put its values behind one name, separated by commas.")
    found = []
    for combination in itertools.product(*values.values()):
        chosen = dict(zip(values, combination, strict=True))
        swept = {key: value for key, value in chosen.items() if len(values[key]) > 1}
        found.append(Trial(swept, [f"{key}={value}" for key, value in chosen.items()]))
    if len({one.name for one in found}) < len(found):
        raise InputError("two trials would have the same folder, since their settings differ in signs alone.")
    return found


def split_values(text: str) -> list[str]:
    """Split a value at commas outside of brackets and quotes.

    >>> split_values('[1, 2],[3]'), split_values('"a,b"'), split_values('{a=1,b=2}')
    (['[1, 2]', '[3]'], ['"a,b"'], ['{a=1,b=2}'])
    """
    parts, depth, quoted = [""], 0, ""
    for sign in text:
        if quoted:
            quoted = "" if sign == quoted else quoted
        elif sign in "\"'":
            quoted = sign
        depth += 0 if quoted else (sign in "[{") - (sign in "]}")
        if sign == "," and not depth and not quoted:
            parts.append("")
        else:
            parts[-1] += sign
    return [part.strip() for part in parts]


def sweep(
    command: Sequence[str],
    settings: Sequence[str],
    out: Path,
    devices: Sequence[str],
    on_end: Callable[[Outcome], None],
) -> list[Outcome]:
    """Train all trials, one at a time on each device; those that ended before are not trained again.

    `command` trains in a process, by the settings that are added to it, and resumes what was interrupted. A device is
    what CUDA_VISIBLE_DEVICES is for its trials, unless empty. `on_end` is called as each trial ends.
    """
    free: queue.SimpleQueue[str] = queue.SimpleQueue()
    for device in devices:
        free.put(device)

    def train(trial: Trial) -> Outcome:
        device = free.get()
        try:
            outcome = _train(command, trial, out / trial.name, device)
        finally:
            free.put(device)
        on_end(outcome)
        return outcome

    found = trials(settings)
    out.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(len(devices)) as threads:
        outcomes = list(threads.map(train, found))
    table = [
        {"name": one.trial.name, **one.trial.swept, "losses": one.losses, "error": one.error} for one in outcomes
    ]
    (out / RESULTS).write_text(json.dumps(table, indent=1), encoding="utf-8")
    return outcomes


def _train(command: Sequence[str], trial: Trial, folder: Path, device: str) -> Outcome:
    log, start = folder.with_name(f"{folder.name}.{LOG}"), time.monotonic()
    given = [*trial.settings, f"train.out={json.dumps(str(folder))}"]
    env = os.environ | ({"CUDA_VISIBLE_DEVICES": device} if device else {})
    with log.open("w", encoding="utf-8") as file:
        code = subprocess.run(
            [*command, *given], stdout=file, stderr=subprocess.STDOUT, env=env, check=False
        ).returncode
    losses = [
        (int(line["step"]), float(line["validation_loss"]))
        for line in Journal(folder / METRICS).lines()
        if isinstance(line.get("validation_loss"), int | float)
    ]
    error = None
    if code:
        said = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        error = f"exit code {code}: {said[-1] if said else 'nothing was said'} ({log})"
    return Outcome(trial, error, time.monotonic() - start, losses)


def by_settings(outcomes: Sequence[Outcome]) -> list[tuple[dict[str, str], list[Outcome]]]:
    """Group trials that differ in their seed alone, those with the lowest mean of the last loss first."""
    groups: dict[tuple[tuple[str, str], ...], list[Outcome]] = {}
    for one in outcomes:
        key = tuple((name, value) for name, value in one.trial.swept.items() if name != SEED)
        groups.setdefault(key, []).append(one)
    return sorted(((dict(key), found) for key, found in groups.items()), key=lambda one: _mean_of_last(one[1]))


def _mean_of_last(outcomes: Sequence[Outcome]) -> float:
    return statistics.fmean(one.last for one in outcomes)


def draw(outcomes: Sequence[Outcome], path: Path) -> bool:
    """Draw the validation loss of all trials over the steps; return whether matplotlib is there."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator
    except ImportError:
        return False
    groups = by_settings(outcomes)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(8, 5), dpi=150, layout="constrained")
        axes = figure.subplots()
        for number, (swept, found) in enumerate(groups):
            label = ", ".join(f"{key}={value}" for key, value in swept.items()) or "all seeds"
            color = matplotlib.colormaps["viridis"](0.85 * number / max(1, len(groups) - 1))
            for seed, one in enumerate(found):
                steps, losses = zip(*one.losses, strict=True) if one.losses else ((), ())
                axes.plot(steps, losses, "o-", ms=3, lw=1.2, color=color, label=label if seed == 0 else None)
        axes.xaxis.set_major_locator(MaxNLocator("auto", steps=[1, 2, 5, 10], integer=True))
        axes.set(xlabel="step", ylabel="validation loss")
        axes.legend(loc="upper right")
        figure.savefig(path, metadata={"Date": None})
    return True
