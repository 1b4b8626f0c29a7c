"""Mutation run: draw small faults in the source, run each against its mirrored tests, and list those that survive.

`make mutants` works on a copy of the tree, adds each result to build/mutants.jsonl, and goes on from there when it is
run again. A mutant is run against the test files named after its file, its doctests included, and if it survives,
against the whole folder of its package.
"""

from __future__ import annotations

import argparse
import ast
import copy
import itertools
import json
import os
import queue
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = Path("src/glasshouse")
DRAWN = ("layers", "text", "data", "store.py")
# Not drawn: what runs on CUDA alone, and what changes the speed alone.
SKIPPED_FILES = {"layers/decode_attention.py", "text/gigatoken_backend.py", "text/prefetch.py"}
SKIPPED_NAMES = {
    "Decode",
    "Flex",
    "_compiled_flex_attention",
    "_compiled_create_block_mask",
    "extra_repr",
    "__repr__",
}
TUNING = re.compile(r"[A-Z_]*(BATCH|BLOCK|BUFFER|BYTES|CHUNK|SECONDS|THREADS)[A-Z_]*")
UNORDERED = {"isinstance", "max", "min"}  # whose arguments are not swapped: the same, or always an error
ENOUGH = 0.8  # of the mutants killed

COMPARISONS = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip
ARITHMETIC = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv, ast.Pow: ast.Mult, ast.BitAnd: ast.BitOr, ast.LShift: ast.RShift, ast.RShift: ast.LShift,
}  # fmt: skip


@dataclass(frozen=True)
class Mutant:
    file: str  # below src/glasshouse
    line: int
    start: int  # characters from the start of the file
    end: int
    before: str
    after: str

    @property
    def package(self) -> str:
        return self.file.partition("/")[0]

    @property
    def key(self) -> tuple[str, int, str, str]:
        return self.file, self.line, self.before, self.after

    def apply(self, source: str) -> str:
        return source[: self.start] + self.after + source[self.end :]


def relevant(node: ast.AST) -> Iterator[ast.AST]:
    """Yield a node and all below it that say what the code does: no annotations, decorators, errors and f-strings."""
    skipped = ast.Raise | ast.JoinedStr | ast.Import | ast.ImportFrom | ast.Assert
    if isinstance(node, skipped) or getattr(node, "name", None) in SKIPPED_NAMES:
        return
    if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
        return
    if isinstance(node, ast.Call) and ast.unparse(node.func) in ("warnings.warn", "InputError", "StoreError"):
        return
    if isinstance(node, ast.Assign | ast.AnnAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        if any(isinstance(one, ast.Name) and (one.id == "__all__" or TUNING.fullmatch(one.id)) for one in targets):
            return
    yield node
    for field, value in ast.iter_fields(node):
        if field not in ("annotation", "returns", "decorator_list", "bases"):
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from relevant(child)


def changes(node: ast.AST) -> Iterator[tuple[ast.AST, ast.AST]]:
    """Yield a part of a node and what may stand in its place."""
    match node:
        case ast.Compare(ops=[operator]) if type(operator) in COMPARISONS:
            yield node, ast.Compare(node.left, [COMPARISONS[type(operator)]()], node.comparators)
        case ast.BinOp(left=left) if type(node.op) in ARITHMETIC and not is_text(left) and not is_text(node.right):
            yield node, ast.BinOp(left, ARITHMETIC[type(node.op)](), node.right)
        case ast.BoolOp():
            yield node, ast.BoolOp(ast.Or() if isinstance(node.op, ast.And) else ast.And(), node.values)
        case ast.Constant(value=bool(value)):
            yield node, ast.Constant(not value)
        case ast.Constant(value=int(value) | float(value)):
            yield node, ast.Constant(value + 1)
        case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test):
            yield test, ast.UnaryOp(ast.Not(), test)
        case ast.Return(value=ast.expr() as value) if not (isinstance(value, ast.Constant) and value.value is None):
            yield value, ast.Constant(None)
        case ast.Expr(value=ast.Call()) | ast.AugAssign():
            yield node, ast.Pass()
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            yield node, ast.Pass()
    match node:
        case ast.Call(args=[first, second, *rest]) if not (
            any(isinstance(one, ast.Starred) for one in node.args) or ast.unparse(node.func) in UNORDERED
        ):
            swapped = copy.copy(node)
            swapped.args = [second, first, *rest]
            yield node, swapped


def is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str | bytes))


def mutants_of(file: str, source: str) -> Iterator[Mutant]:
    """Yield every mutant of a file."""
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    lines = source.splitlines()

    def offset(line: int, column: int) -> int:  # ast counts the bytes of a line
        return starts[line - 1] + len(lines[line - 1].encode()[:column].decode())

    for node in relevant(ast.parse(source)):
        for part, other in changes(node):
            start, end = offset(part.lineno, part.col_offset), offset(part.end_lineno, part.end_col_offset)
            text = ast.unparse(ast.fix_missing_locations(other))
            after = f"({text})" if isinstance(other, ast.expr) and not isinstance(other, ast.Constant) else text
            yield Mutant(file, part.lineno, start, end, source[start:end], after)


def is_other_program(mutant: Mutant, source: str) -> bool:
    """Say whether a mutant still is Python, and another program."""
    try:
        return ast.dump(ast.parse(mutant.apply(source))) != ast.dump(ast.parse(source))
    except SyntaxError:
        return False


def draw(seed: int, count: int, below: tuple[str, ...] = DRAWN) -> list[Mutant]:
    """Draw mutants of the checkout; those of a smaller count are the first of a larger one."""
    files = sorted(path for one in below for path in [ROOT / SOURCE / one, *(ROOT / SOURCE / one).rglob("*.py")])
    every, sources = list[Mutant](), dict[str, str]()
    for path in (path for path in files if path.is_file()):
        file = path.relative_to(ROOT / SOURCE).as_posix()
        if file not in SKIPPED_FILES:
            sources[file] = path.read_text(encoding="utf-8")
            every += mutants_of(file, sources[file])
    random.Random(seed).shuffle(every)
    return list(itertools.islice((one for one in every if is_other_program(one, sources[one.file])), count))


def tests_for(file: str) -> list[list[str]]:
    """Return the mirrored tests of a file: those named after it, then the folder of its package."""
    path, tests = Path(file), Path("tests")
    if len(path.parts) == 1:
        return [[f"{SOURCE}/{file}", f"tests/test_{path.name}"]]
    package = path.parts[0]
    names = {path.stem, *path.parts[1:-1]} - {"__init__"}
    named = sorted({one for name in names for one in (ROOT / tests / package).glob(f"test_{name}*.py")})
    first = [f"{SOURCE}/{file}", *(one.relative_to(ROOT).as_posix() for one in named)]
    return [first, [f"tests/{package}"]]


def run_tests(tree: Path, tests: list[str], seconds: float) -> str:
    """Run tests in a copy of the tree; return passed, failed or timed out."""
    paths = [f"{tree}/src", f"{tree}/tests", *filter(None, [os.environ.get("PYTHONPATH")])]
    variables = {"PYTHONPATH": os.pathsep.join(paths), "EXAMPLES": "few", "PYTHONDONTWRITEBYTECODE": "1"}
    options = ["-x", "-q", "-p", "no:cacheprovider", "-m", "not long and not slow"]
    command = [sys.executable, "-m", "pytest", *options, *tests]
    with subprocess.Popen(
        command,
        cwd=tree,
        env={**os.environ, **variables},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    ) as process:
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)  # and what the tests started
            return "timed out"
    return "passed" if code in (0, 5) else "failed"  # 5: no test was collected


def judge(mutant: Mutant, tree: Path, seconds: float, green: dict[str, bool]) -> str:
    """Run a mutant against its tests; return killed, survived, timed out or not judged."""
    path = tree / SOURCE / mutant.file
    source = path.read_text(encoding="utf-8")
    for tests in tests_for(mutant.file):
        name = " ".join(tests)
        if name not in green:
            green[name] = run_tests(tree, tests, seconds) == "passed"
        if not green[name]:
            print(f"{name}: fails without a mutant, or takes more than {seconds:g} seconds", flush=True)
            return "not judged"
        path.write_text(mutant.apply(source), encoding="utf-8")
        result = run_tests(tree, tests, seconds)
        path.write_text(source, encoding="utf-8")
        if result != "passed":
            return {"failed": "killed"}.get(result, result)
    return "survived"


def copy_tree(to: Path) -> Path:
    """Copy what the tests need, so that mutants do not change the checkout."""
    for name in ("src", "tests", "docs"):
        shutil.copytree(ROOT / name, to / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "Makefile", "constraints.txt"):
        shutil.copy(ROOT / name, to / name)
    return to


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=22)
    parser.add_argument("--count", type=int, default=200, help="mutants to draw")
    parser.add_argument("--seconds", type=float, default=600, help="that the tests of one mutant may take")
    parser.add_argument("--jobs", type=int, default=1, help="mutants at a time, each with its own copy of the tree")
    parser.add_argument("--results", type=Path, default=ROOT / "build" / "mutants.jsonl")
    given = parser.parse_args()
    given.results.parent.mkdir(parents=True, exist_ok=True)
    done = {}
    if given.results.exists():
        rows = (json.loads(line) for line in given.results.read_text().splitlines())
        done = {(row["file"], row["line"], row["before"], row["after"]): row["result"] for row in rows}
    drawn, green = draw(given.seed, given.count), dict[str, bool]()
    left = [mutant for mutant in drawn if mutant.key not in done]
    trees = queue.SimpleQueue[Path]()

    def judge_next(mutant: Mutant) -> str:
        tree = trees.get()
        try:
            return judge(mutant, tree, given.seconds, green)
        finally:
            trees.put(tree)

    with tempfile.TemporaryDirectory() as folder, given.results.open("a") as results:
        for number in range(given.jobs):
            trees.put(copy_tree(Path(folder).resolve() / str(number)))
        with ThreadPoolExecutor(given.jobs) as pool:
            judged = {pool.submit(judge_next, mutant): mutant for mutant in left}
            for number, future in enumerate(as_completed(judged), 1):
                mutant, result = judged[future], future.result()
                done[mutant.key] = result
                if result != "not judged":
                    print(json.dumps({**asdict(mutant), "result": result}), file=results, flush=True)
                print(f"{number}/{len(left)} {result}: {mutant.file}:{mutant.line}", flush=True)
    sys.exit(summarize(drawn, done))


def summarize(drawn: list[Mutant], done: dict[tuple[str, int, str, str], str]) -> int:
    """Print the counts of each package and the survivors; return the exit code."""
    counts = Counter((mutant.package, done[mutant.key]) for mutant in drawn)
    kinds = ("killed", "survived", "timed out", "not judged")
    print()
    for package in sorted({mutant.package for mutant in drawn}):
        print(f"{package:10}" + "".join(f"{counts[package, kind]:5} {kind}" for kind in kinds))
    for mutant in drawn:
        if done[mutant.key] == "survived":
            print(f"\n{SOURCE}/{mutant.file}:{mutant.line}")
            print(f"  - {' '.join(mutant.before.split())}\n  + {' '.join(mutant.after.split())}")
    survived = sum(done[mutant.key] in ("survived", "not judged") for mutant in drawn)
    share = 1 - survived / max(1, len(drawn))
    print(f"\n{len(drawn) - survived} of {len(drawn)} mutants killed or timed out ({share:.0%})")
    return int(share < ENOUGH)


if __name__ == "__main__":
    main()
