"""The notebooks of examples/: they run in a Jupyter kernel, and their checks accept a solution and nothing else."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import glasshouse as gh

FOLDER = Path(__file__).parents[2] / "examples"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
every_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)

# What a reader of the notebook is told, which no assert of its own repeats; and how many results draw themselves.
SAID = {
    "01-transformer-by-parts": (["logits: shape [1, 7, 100]", "49,984 parameters a block"], 0),
    "02-induction-head": (["3.4657 nats", "of layer 1: induction"], 2),
    "03-dates-cross-attention": (["March 23, 2033               2033-03-23", "12 of 12 are right"], 3),
    "04-fine-tune": (["query value", "rank 4"], 1),
    "05-circuit": (["' he'      0.7", "through k: K-composition"], 5),
}

# Runs an exercise with a wrong answer, which its check must not accept; then again as it stands.
WRONG = """
try:
    exec({wrong!r})
    exec({check!r})
except AssertionError:
    pass
else:
    raise RuntimeError("the check accepts " + {wrong!r})
"""


@cache
def load(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def tag(cell: dict[str, Any]) -> str:
    return next(iter(cell["metadata"].get("tags", [])), "")


def exercises(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield each exercise with its index; its solution and its check follow it."""
    cells = load(path)["cells"]
    for index, cell in enumerate(cells):
        if tag(cell) == "exercise":
            yield index, cell


def names_used(path: Path) -> set[str]:
    """Return what the code takes from the package, such as inspection.run."""
    found = set()
    for cell in load(path)["cells"]:
        if cell["cell_type"] == "code":
            for node in ast.walk(ast.parse("".join(cell["source"]))):
                name = ast.unparse(node) if isinstance(node, ast.Attribute) else ""
                if name.startswith("gh.") and name.replace(".", "").isidentifier():
                    found.add(name.removeprefix("gh."))
    return found


def test_there_are_five() -> None:
    assert [path.stem for path in NOTEBOOKS] == list(SAID)
    listed = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert all(f"({path.name})" in listed for path in NOTEBOOKS)


@every_notebook
def test_is_valid_and_has_no_outputs(path: Path) -> None:
    notebook = load(path)
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    ids = [cell["id"] for cell in notebook["cells"]]
    assert len({*ids}) == len(ids)
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            assert (cell["outputs"], cell["execution_count"]) == ([], None), "clear the outputs before you commit"


@every_notebook
def test_exercises_are_followed_by_solution_and_check(path: Path) -> None:
    cells = load(path)["cells"]
    found = list(exercises(path))
    assert len(found) >= 4
    for index, _ in found:
        assert [tag(cell) for cell in cells[index : index + 3]] == ["exercise", "solution", "check"]
        assert cells[index + 1]["metadata"]["jupyter"] == {"source_hidden": True}
        assert "assert " in "".join(cells[index + 2]["source"]) or "compare(" in "".join(cells[index + 2]["source"])


@every_notebook
def test_every_name_exists(path: Path) -> None:
    for name in names_used(path):
        found: object = gh
        for part in name.split("."):
            found = getattr(found, part)  # an AttributeError names it


@pytest.mark.long
@every_notebook
def test_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import nbclient  # `make notebooks` installs them
    import nbformat

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    for index, cell in reversed(list(exercises(path))):
        solution, check = notebook.cells[index + 1 : index + 3]
        sources = {"wrong": cell["metadata"]["glasshouse"]["wrong"], "check": check.source}
        wrong = nbformat.v4.new_code_cell(WRONG.format_map(sources))
        again = [nbformat.v4.new_code_cell(one) for one in ("".join(cell["source"]), solution.source, check.source)]
        notebook.cells[index + 3 : index + 3] = [wrong, *again]
    nbclient.NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(tmp_path)}}).execute()

    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    printed = "".join(output.text for output in outputs if output.output_type == "stream" and output.name == "stdout")
    drawn = [output.data["text/html"] for output in outputs if "text/html" in output.get("data", {})]
    texts, n_drawn = SAID[path.stem]
    for text in texts:
        assert text in printed
    assert len([html for html in drawn if html.startswith('<div class="gh">')]) == n_drawn
    assert all(len(html) < 200_000 for html in drawn)
    frames = [html for html in drawn if html.startswith("<iframe ")]
    assert all(' src="http://127.0.0.1:' in html and len(html) < 2000 for html in frames)
    assert len(frames) == len([cell for cell in notebook.cells if cell.source.startswith("gh.look(")])
    assert [output.text for output in outputs if output.get("name") == "stderr"] == []
