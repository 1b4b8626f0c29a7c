"""The architecture: a file imports only from layers above its own, and packages on one layer not from each other."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import source

import glasshouse

LAYERS = [
    ["errors", "escaping", "hints", "pretrained", "version"],
    ["registry"],
    ["config"],
    ["spec", "device", "store", "web", "notes"],
    ["layers", "text"],
    ["models"],
    ["data", "hub", "inspection", "embeddings"],
    ["objectives", "classification", "activation_store"],
    ["generation"],
    ["evaluation"],
    ["training"],
    ["page"],
    ["serve"],
    ["cli"],
    ["__main__"],
]
LAYER_OF = {package: number for number, packages in enumerate(LAYERS) for package in packages}
ROOT = Path(glasshouse.__file__).parent


def imports(path: Path) -> Iterator[tuple[str, bool]]:
    """Yield the package of each import of ours, and whether the import is inside a function."""
    tree = source.parse(path)
    nested = set[int]()
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef) and id(function) not in nested:
            nested.update(id(node) for node in ast.walk(function))
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
            assert node.level == 0, f"{path} has a relative import; write the absolute one"


def test_every_package_has_a_layer() -> None:
    found = {path.stem if path.is_file() else path.name for path in ROOT.iterdir() if path.suffix in ("", ".py")}
    assert found - {"__init__", "__pycache__"} == set(LAYER_OF)


def test_imports_point_up() -> None:
    for path in ROOT.rglob("*.py"):
        package = path.relative_to(ROOT).parts[0].removesuffix(".py")
        if package == "__init__":
            continue
        for other, nested in imports(path):
            assert not nested, f"{path} imports {other} inside a function"
            assert other == package or LAYER_OF[other] < LAYER_OF[package], f"{path} ({package}) imports {other}"
