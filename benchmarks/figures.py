"""The measured figures that README.md and docs/ quote: benchmarks/figures.toml, which benchmarks write with --save.

A benchmark passes what it measured to `record`, and ends with `save`. Each figure has its machine, command and date;
docs/generate_figures.py puts the values into the pages. Figures of commands that are no benchmark (`glasshouse eval`,
`make test`) are entered by hand, in the same form.
"""

from __future__ import annotations

import argparse
import datetime
import shlex
import statistics
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tomli_w

FILE = Path(__file__).parent / "figures.toml"

_recorded: dict[str, dict[str, Any]] = {}


def add_save(parser: argparse.ArgumentParser) -> None:
    """Add the option --save."""
    parser.add_argument(
        "--save", type=Path, nargs="?", const=FILE, metavar="FILE", help=f"write the figures to {FILE.name}, or FILE"
    )


def record(name: str, measured: float | Sequence[float], digits: int, unit: str = "") -> None:
    """Keep a figure for `save`: the median of what was measured in each round, and its range or quartiles.

    `name` is the benchmark's file and the figure, as in "train_loop.small". A percentage is given as a fraction.
    """
    values = [measured] if isinstance(measured, int | float) else list(measured)
    few = len(values) <= 5
    low, _, high = (min(values), 0, max(values)) if few else statistics.quantiles(values, n=4, method="inclusive")
    scale = 100 if unit == "%" else 1
    low, value, high = (round(scale * one, digits or None) for one in (low, statistics.median(values), high))
    _recorded[name] = {"value": value, "digits": digits, "unit": unit}
    if len(values) > 1:
        _recorded[name] |= {"low": low, "high": high}


def save(file: Path | None, device: object = "cpu") -> None:
    """Write what was recorded to the file of --save; figures already there keep what else is said about them."""
    if file is None:
        return
    import torch  # here, as benchmarks of memory and start-up time import this module

    from glasshouse import device as machine

    where = f"{machine.cpu_cores()} cores of {machine.cpu_name()}"
    if str(device).startswith("cuda"):
        where = torch.cuda.get_device_name()
    words = [word for word in sys.argv[1:] if word not in ("--save", str(file))]
    taken = {
        "machine": f"{where}, torch {torch.__version__.partition('+')[0]}",
        "command": shlex.join([f"benchmarks/{Path(sys.argv[0]).name}", *words]),
        "date": datetime.datetime.now(tz=datetime.UTC).date(),
    }
    figures = tomllib.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    for name, figure in _recorded.items():
        section, _, key = name.partition(".")
        before = figures.setdefault(section, {}).get(key, {})
        figures[section][key] = {"what": before.get("what", name)} | figure | taken
        if "goal" in before:
            figures[section][key]["goal"] = before["goal"]
    file.write_text(tomli_w.dumps(figures), encoding="utf-8")
