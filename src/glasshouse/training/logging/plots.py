"""Plots of loss, learning rate and gradient norm over the steps, from metrics.jsonl."""

from __future__ import annotations

import math
from array import array
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from glasshouse.training.logging.journal import Journal

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Line = tuple[NDArray[np.float64], NDArray[np.float64]]  # steps, values

BINS = 1000  # a line is drawn with at most two points per bin
BLUE, VERMILION, GREEN, PURPLE = "#0072B2", "#D55E00", "#009E73", "#AA4499"  # distinct for colour-blind readers
STYLE: dict[Any, Any] = {  # matplotlib types the keys as a Literal
    "axes.axisbelow": True,
    "axes.edgecolor": "#888888",
    "axes.grid": True,
    "axes.labelcolor": "#222222",
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.xmargin": 0.02,
    "font.size": 11,
    "grid.color": "#E6E6E6",
    "grid.linewidth": 0.8,
    "legend.edgecolor": "none",
    "legend.framealpha": 0.7,
    "path.simplify": False,  # lines are downsampled here, keeping spikes
    "svg.fonttype": "none",  # text stays searchable and accessible
    "svg.hashsalt": "glasshouse",  # deterministic output
    "xtick.color": "#555555",
    "ytick.color": "#555555",
}


def draw(journal: Journal, folder: Path) -> list[Path]:
    """Draw plots.png and plots.svg into the folder; nothing without matplotlib or with fewer than two lines.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> journal = Journal(folder / "metrics.jsonl")
    >>> for step in range(3):
    ...     journal.write(step, loss=5.0 - step, lr=0.001, grad_norm=0.9)
    >>> [path.name for path in draw(journal, folder)]
    ['plots.png', 'plots.svg']
    """
    try:
        import matplotlib
        from matplotlib.figure import Figure
        from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator, StrMethodFormatter
    except ImportError:
        return []
    lines = _read(journal)
    if lines is None:
        return []
    with matplotlib.rc_context(STYLE):  # restored afterwards; a Figure of its own does not touch pyplot
        figure = Figure(figsize=(8, 8.5), dpi=150, layout="constrained")
        loss, lr, norm = figure.subplots(3, sharex=True, height_ratios=[2.4, 1, 1])
        _noisy(loss, "training", lines["loss"], BLUE)
        steps, values = lines["validation_loss"]
        if len(values):
            lowest = values.argmin()
            label = f"validation, lowest {values[lowest]:.4g} at step {steps[lowest]:,.0f}"
            loss.plot(steps, values, "o-", color=VERMILION, ms=4, lw=1.2, label=label, gid="validation")
        loss.legend(loc="upper right")  # "best" is slow, and a loss falls away from this corner
        lr.plot(*_downsampled(lines["lr"]), color=GREEN, lw=1.6, gid="lr")
        lr.set_ylim(bottom=0)
        _noisy(norm, "grad_norm", lines["grad_norm"], PURPLE)
        for axes, label in ((loss, "loss"), (lr, "learning rate"), (norm, "gradient norm")):
            axes.set_ylabel(label)
            if axes.get_yscale() == "log":
                axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
                axes.yaxis.set_minor_locator(NullLocator())
            else:
                axes.yaxis.set_major_locator(MaxNLocator("auto", steps=[1, 2, 5, 10]))
            axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        norm.set_xlabel("step")
        norm.xaxis.set_major_locator(MaxNLocator("auto", steps=[1, 2, 5, 10], integer=True))
        norm.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
        figure.align_ylabels()
        paths = []
        for kind, metadata in (("png", {}), ("svg", {"Date": None})):
            path = folder / f"plots.{kind}"
            fresh = path.with_name(f".{path.name}.new")
            figure.savefig(fresh, format=kind, metadata=metadata)
            paths.append(fresh.replace(path))
    return paths


def _read(journal: Journal) -> dict[str, Line] | None:
    """Return each series, without missing and non-finite values; None if the journal has fewer than two lines."""
    found = {name: (array("d"), array("d")) for name in ("loss", "validation_loss", "lr", "grad_norm")}
    count = 0
    for entry in journal.lines():
        count += 1
        for name, (steps, values) in found.items():
            value = entry.get(name)
            if isinstance(value, (int, float)) and math.isfinite(value):
                steps.append(entry["step"])
                values.append(value)
    if count < 2:
        return None
    return {name: (np.asarray(steps), np.asarray(values)) for name, (steps, values) in found.items()}


def _noisy(axes: Axes, name: str, line: Line, color: str) -> None:
    """Draw a pale line with its smoothed version on top; on a log scale if it spans more than a factor of 10."""
    axes.plot(*_downsampled(line), color=color, alpha=0.35, lw=0.7, label=name, gid=name)
    axes.plot(*_smoothed(line), color=color, lw=1.8, label=f"{name}, smoothed", gid=f"{name}-smoothed")
    values = line[1]
    if len(values) and values.max() > 10 * values.min() > 0:
        axes.set_yscale("log")


def _downsampled(line: Line) -> Line:
    """Downsample a long line to the minimum and maximum of each bin, so that no spike is lost."""
    steps, values = line
    if len(values) <= 2 * BINS:
        return line
    kept = set()
    for start, end in pairwise(np.linspace(0, len(values), BINS + 1, dtype=int)):
        kept |= {start + values[start:end].argmin(), start + values[start:end].argmax()}
    indices = np.array(sorted(kept))
    return steps[indices], values[indices]


def _smoothed(line: Line) -> Line:
    """Return the running median over a fiftieth of the run to either side, which ignores spikes.

    Near the start, where a loss falls steeply, the window is symmetric and shorter, so that the line starts at the
    first value.
    """
    steps, values = line
    last = len(values) - 1
    radius = max(1, len(values) // 50)
    indices = np.unique(np.linspace(0, last, min(len(values), BINS), dtype=int))
    reach = np.minimum(indices, radius)
    ends = np.minimum(indices + reach, last) + 1
    medians = [np.median(values[start:end]) for start, end in zip(indices - reach, ends, strict=True)]
    return steps[indices], np.array(medians)
