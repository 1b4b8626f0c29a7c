"""The structure of the package in numbers: lines, files, import circles and the longest import chain.

    python tests/structure.py [REVISION ...]

prints one column for the working tree and one for each revision. Imports for the type checker alone count too.
"""

from __future__ import annotations

import ast
import io
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[1]
SMALL = 60  # lines
Graph = Mapping[str, set[str]]  # module -> modules that it imports


def modules(source: Path) -> dict[str, Path]:
    """Return the files of the package in a folder `src`, by the name of their module."""
    names = {path: path.relative_to(source).with_suffix("").parts for path in source.glob("glasshouse/**/*.py")}
    return {".".join(parts[:-1] if parts[-1] == "__init__" else parts): path for path, parts in names.items()}


def import_graph(files: Mapping[str, Path]) -> dict[str, set[str]]:
    """Return which modules of the package each imports, also inside functions and for the type checker."""
    found = {}
    for name, path in files.items():
        direct = imports(ast.parse(path.read_text(encoding="utf-8")), files)
        packages = {parent for one in direct for parent in parents(one) if not name.startswith(f"{parent}.")}
        found[name] = (direct | packages) - {name}
    return found


def parents(name: str) -> list[str]:
    """Return the packages of a module, whose `__init__` runs before it does.

    >>> parents("glasshouse.layers.attend.mask")
    ['glasshouse', 'glasshouse.layers', 'glasshouse.layers.attend']
    """
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts))]


def imports(tree: ast.Module, files: Mapping[str, Path]) -> set[str]:
    """Return the modules of the package that a module imports."""
    found = set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module in files:
            within = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= (within & files.keys()) or {node.module}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names} & files.keys()
    return found


def circle(graph: Graph) -> list[str]:
    """Return modules that import each other in a circle; none if there is no circle.

    >>> circle({"a": {"b"}, "b": {"a"}, "c": {"a"}})
    ['a', 'b', 'a']
    """
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(reversed(error.args[1]))
    return []


def in_circles(graph: Graph) -> int:
    """Count the modules that import themselves through others.

    >>> in_circles({"a": {"b"}, "b": {"a"}, "c": {"a"}})
    2
    """

    def reached(start: str) -> set[str]:
        seen, left = set[str](), [*graph[start]]
        while left:
            if (one := left.pop()) not in seen:
                seen.add(one)
                left.extend(graph[one])
        return seen

    return sum(name in reached(name) for name in graph)


def longest_chain(graph: Graph) -> list[str]:
    """Return the longest chain of imports of a graph without circles.

    >>> longest_chain({"a": {"b", "c"}, "b": {"c"}, "c": set()})
    ['a', 'b', 'c']
    """
    chains: dict[str, list[str]] = {}
    for name in TopologicalSorter(graph).static_order():
        chains[name] = [name, *max((chains[one] for one in graph[name]), key=len, default=[])]
    return max(chains.values(), key=len)


def measure(source: Path) -> dict[str, object]:
    """Return the numbers of the package in a folder `src`."""
    files = modules(source)
    lengths = [len(path.read_text(encoding="utf-8").splitlines()) for path in files.values()]
    graph = import_graph(files)
    folders = [len([*path.glob("*.py"), *path.glob("*/__init__.py")]) for path in source.glob("glasshouse/**/")]
    return {
        "lines of Python": f"{sum(lengths):,}",
        "files": len(files),
        f"files under {SMALL} lines": sum(length < SMALL for length in lengths),
        "longest file": max(lengths),
        "entries of the largest folder": max(folders),
        "modules in import circles": in_circles(graph),
        "longest import chain": "none: there are circles" if circle(graph) else len(longest_chain(graph)),
    }


def main(revisions: Sequence[str]) -> None:
    """Print the numbers of the working tree, and of revisions."""
    columns = {"now": measure(ROOT / "src")}
    for revision in revisions:
        with tempfile.TemporaryDirectory() as folder:
            packed = subprocess.run(["git", "archive", revision, "src"], cwd=ROOT, check=True, capture_output=True)
            with tarfile.open(fileobj=io.BytesIO(packed.stdout)) as archive:
                archive.extractall(folder, filter="data")
            columns[revision[:12]] = measure(Path(folder) / "src")
    print(f"{'':32}" + "".join(f"{name:>24}" for name in columns))
    for row in columns["now"]:
        print(f"{row:32}" + "".join(f"{column[row]!s:>24}" for column in columns.values()))


if __name__ == "__main__":
    main(sys.argv[1:])
