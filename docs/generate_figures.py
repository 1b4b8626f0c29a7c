"""Writes docs/figures.md from benchmarks/figures.toml, and its values into the pages that quote them.

A page quotes a figure as a link to its row, `[1.76](figures.md#training_peers.masked_eager)`, whose text this script
fills. `make docs` runs it; a test fails while a page is stale.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
FIGURES = DOCS.parent / "benchmarks" / "figures.toml"
QUOTING = (DOCS.parent / "README.md", DOCS / "performance.md", DOCS / "benchmarks.md")
QUOTED = re.compile(r"\[[^]\n]*\]\(((?:docs/)?figures\.md#([\w.-]+))\)")
HEAD = """<!-- Written by docs/generate_figures.py from benchmarks/figures.toml; `make docs` writes it again. -->
# Figures

Every measured figure that the README, [performance](performance.md) and [benchmarks](benchmarks.md) quote, with the
machine, the command and the date of its measurement. A value is the median over rounds; the spread is their range, or
the quartiles where there are more than five (and in train_loop and inspection of 2026-11-15). Machines are shared:
compare ratios, which come from one run, rather than times of different runs. With `--save` a benchmark writes its
figures to `benchmarks/figures.toml`, from which this page is generated.
"""
COLUMNS = "| figure | value | spread | goal | machine | command | date |\n|---|---|---|---|---|---|---|"


def figures() -> dict[str, dict[str, Any]]:
    """Return all figures by name, as in "train_loop.small"."""
    sections = tomllib.loads(FIGURES.read_text(encoding="utf-8"))
    return {f"{section}.{key}": one for section, found in sections.items() for key, one in found.items()}


def shown(figure: dict[str, Any], value: float) -> str:
    """Return a value with the digits of its figure, and a percent sign; other units are the page's."""
    return f"{value:,.{figure['digits']}f}" + "%" * (figure["unit"] == "%")


def figures_page() -> str:
    """Return docs/figures.md: a table for each section of the file."""
    blocks, section = [HEAD], ""
    for name, one in figures().items():
        if name.partition(".")[0] != section:
            section = name.partition(".")[0]
            blocks.append(f"\n## {section}\n\n{COLUMNS}\n")
        unit = "" if one["unit"] == "%" else f" {one['unit']}".rstrip()
        spread = f"{shown(one, one['low'])} - {shown(one, one['high'])}" if "low" in one else ""
        goal = f"{one['goal']:,}" + "%" * (one["unit"] == "%") if "goal" in one else ""
        command = one["command"] if one["command"].startswith("a script") else f"`{one['command']}`"
        cells = (one["what"], shown(one, one["value"]) + unit, spread, goal, one["machine"], command, one["date"])
        row = "|".join(f" {cell} " if cell else " " for cell in cells)
        blocks.append(f'| <a id="{name}"></a>{row.lstrip()}|\n')
    return "".join(blocks)


def filled(text: str) -> str:
    """Return a page with the value of every figure that it quotes."""
    known = figures()
    return QUOTED.sub(lambda found: f"[{shown(known[found[2]], known[found[2]]['value'])}]({found[1]})", text)


def main() -> None:
    """Write the page of figures, and fill those that quote them."""
    (DOCS / "figures.md").write_text(figures_page(), encoding="utf-8")
    for page in QUOTING:
        page.write_text(filled(page.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
