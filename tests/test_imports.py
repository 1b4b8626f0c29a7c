"""The house rule: a file imports only from rows above its own, rooms on one row leave each other alone."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import glasshouse

ROWS = [
    ["errors", "visible"],
    ["config"],
    ["spec", "device", "store"],
    ["layers", "text"],
    ["models"],
    ["data", "hub", "inspection", "vectors"],
    ["generation"],
    ["evaluation"],
    ["training"],
    ["page"],
    ["cli"],
    ["__main__"],
]
ROW_OF = {room: number for number, rooms in enumerate(ROWS) for room in rooms}
HOUSE = Path(glasshouse.__file__).parent


def imports(path: Path) -> Iterator[tuple[str, bool]]:
    """Yield the room of each import from the package, and whether it stands inside a function."""
    tree = ast.parse(path.read_text())
    nested = {id(node) for f in ast.walk(tree) if isinstance(f, ast.FunctionDef) for node in ast.walk(f)}
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.ImportFrom) and node.module == "glasshouse":
            names = [f"glasshouse.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        for name in names:
            if name.startswith("glasshouse."):
                yield name.split(".")[1], id(node) in nested
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports by dots; write the whole name"


def test_every_room_has_a_row() -> None:
    rooms = {path.stem if path.is_file() else path.name for path in HOUSE.iterdir() if path.suffix in ("", ".py")}
    assert rooms - {"__init__", "__pycache__"} == set(ROW_OF)


def test_imports_point_up() -> None:
    for path in HOUSE.rglob("*.py"):
        room = path.relative_to(HOUSE).parts[0].removesuffix(".py")
        if room == "__init__":
            continue
        for other, nested in imports(path):
            assert not nested, f"{path} imports {other} inside a function"
            assert other == room or ROW_OF[other] < ROW_OF[room], f"{path} ({room}) imports {other}"
