"""Mutation run: draw small faults in the source, run each against the tests of its package, list those that survive.

`make mutants` works on a copy of the tree, adds each result to build/mutants.jsonl, and goes on from there when it is
run again. Of the tests of make test in the folder of its package, a mutant is run against those that execute its
line, by the contexts that `make coverage` records; of a line that runs at import or in a process of its own, against
all. `--tests FOLDER` takes the tests of another checkout, to compare two states of the tests.
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
import tomllib
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path

from coverage import CoverageData

ROOT = Path(__file__).parents[1]
FAULTS = Path(__file__).with_name("planted_faults.toml")
SOURCE = Path("src/glasshouse")
DRAWN = (
    "layers", "text", "data", "store.py", "generation", "training", "inspection", "objectives", "hub", "serve"
)  # fmt: skip
# Not drawn: what runs on CUDA alone, and what changes the speed alone.
SKIPPED_FILES = {
    "layers/attend/decode.py", "layers/linear/matvec.py", "text/gigatoken_backend.py", "text/prefetch.py",
    "generation/engine/cuda_graphs.py", "generation/sampling/logits_kernels.py",
    "objectives/loss/softmax_gradient.py",
}  # fmt: skip
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


def planted() -> list[Mutant]:
    """Return the mistakes of planted_faults.toml."""
    found = []
    for fault in tomllib.loads(FAULTS.read_text(encoding="utf-8"))["fault"]:
        source = (ROOT / SOURCE / fault["file"]).read_text(encoding="utf-8")
        start = source.index(fault["before"])
        line, end = source.count("\n", 0, start) + 1, start + len(fault["before"])
        found.append(Mutant(fault["file"], line, start, end, fault["before"], fault["after"]))
    return found


def first_line(source: str, line: int) -> int:
    """Return where the statement of a line begins."""
    statements = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.stmt))
    return max((one.lineno for one in statements if one.lineno <= line <= (one.end_lineno or 0)), default=line)


class Selection:
    """The tests that run for a mutant."""

    def __init__(self, coverage_data: Path) -> None:
        self.data = CoverageData(str(coverage_data))
        self.data.read()
        self.measured = {path.partition(f"/{SOURCE}/")[2]: path for path in self.data.measured_files()}

    def tests_for(self, mutant: Mutant) -> list[list[str]]:
        """Return the tests of its package that run its line; then all, if it runs at import or in another process."""
        by_line = self.data.contexts_by_lineno(self.measured.get(mutant.file, ""))
        first = first_line((ROOT / SOURCE / mutant.file).read_text(encoding="utf-8"), mutant.line)
        found = {one.partition("|")[0] for line in range(first, mutant.line + 1) for one in by_line.get(line, [])}
        package = f"tests/{mutant.package}" if "/" in mutant.file else f"tests/test_{mutant.file}"
        doctests = f"{SOURCE}/{mutant.file}"
        own = [one for one in found if one.startswith((f"{package}/", f"{package}::", f"{doctests}::"))]
        named = Path(mutant.file).stem
        stages = [sorted(own, key=lambda one: (named not in one.partition("::")[0], one))] if own else []
        return [*stages, [doctests, package]] if "" in found or not found else stages


def run_tests(tree: Path, tests: list[str], seconds: float) -> tuple[str, str]:
    """Run tests in a copy of the tree; return passed, failed or timed out, and the test that failed."""
    paths = [f"{tree}/src", f"{tree}/tests", *filter(None, [os.environ.get("PYTHONPATH")])]
    variables = {"PYTHONPATH": os.pathsep.join(paths), "PYTHONDONTWRITEBYTECODE": "1"}
    (tree / "selected.txt").write_text("\n".join(tests))
    options = ["-x", "-q", "-p", "no:cacheprovider", "-m", "not long", "--durations=0"]
    command = [sys.executable, "-m", "pytest", *options, "@selected.txt"]
    with subprocess.Popen(
        command,
        cwd=tree,
        env={**os.environ, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            said, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)  # and what the tests started
            return "timed out", ""
    if process.returncode in (0, 5):  # 5: no test was collected
        return "passed", ""
    failed = re.search(r"^(?:FAILED|ERROR) (\S+(?: \S+)*?)(?: - |$)", said, re.MULTILINE)
    return "failed", failed[1] if failed else ""


def judge(mutant: Mutant, stages: list[list[str]], tree: Path, seconds: float) -> tuple[str, str]:
    """Run a mutant against its tests; return killed, survived, timed out or not judged, and the killing test."""
    path = tree / SOURCE / mutant.file
    source = path.read_text(encoding="utf-8")
    for tests in stages:
        path.write_text(mutant.apply(source), encoding="utf-8")
        # An endless loop is common; a test takes a second at most, but for a few.
        result, test = run_tests(tree, tests, seconds if "::" not in tests[0] else min(seconds, 60 + len(tests)))
        path.write_text(source, encoding="utf-8")
        if result == "timed out":
            return result, ""
        if result == "failed":
            fails_without = test and run_tests(tree, [test], seconds)[0] != "passed"
            return ("not judged" if fails_without else "killed"), test
    return "survived", ""


def copy_tree(to: Path, tests: Path) -> Path:
    """Copy what the tests need, so that mutants do not change the checkout."""
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "src", to / "src", ignore=ignore)
    for name in ("tests", "docs", "benchmarks", "examples"):
        shutil.copytree(tests / name, to / name, ignore=ignore)
    for name in ("pyproject.toml", "README.md", "Makefile", "constraints.txt"):
        shutil.copy(tests / name, to / name)
    return to


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=40)
    parser.add_argument("--count", type=int, default=100, help="mutants to draw")
    parser.add_argument("--seconds", type=float, default=300, help="that the tests of one mutant may take")
    parser.add_argument("--jobs", type=int, default=2, help="mutants at a time, each with its own copy of the tree")
    parser.add_argument("--results", type=Path, default=ROOT / "build" / "mutants.jsonl")
    parser.add_argument("--coverage", type=Path, default=ROOT / "build" / ".coverage", help="with a context per test")
    parser.add_argument("--faults", action="store_true", help="the mistakes of planted_faults.toml instead")
    parser.add_argument("--tests", type=Path, default=ROOT, help="the checkout whose tests are run")
    given = parser.parse_args()
    given.results.parent.mkdir(parents=True, exist_ok=True)
    done = {}
    if given.results.exists():
        rows = (json.loads(line) for line in given.results.read_text().splitlines())
        done = {(row["file"], row["line"], row["before"], row["after"]): row["result"] for row in rows}
    drawn = planted() if given.faults else draw(given.seed, given.count)
    selection = Selection(given.coverage)
    left = [mutant for mutant in drawn if mutant.key not in done]
    trees = queue.SimpleQueue[Path]()

    def judge_next(mutant: Mutant, stages: list[list[str]]) -> tuple[str, str]:
        tree = trees.get()
        try:
            return judge(mutant, stages, tree, given.seconds)
        finally:
            trees.put(tree)

    with tempfile.TemporaryDirectory() as folder, given.results.open("a") as results:
        for number in range(given.jobs):
            trees.put(copy_tree(Path(folder).resolve() / str(number), given.tests))
        with ThreadPoolExecutor(given.jobs) as pool:
            judged = {pool.submit(judge_next, mutant, selection.tests_for(mutant)): mutant for mutant in left}
            for number, future in enumerate(as_completed(judged), 1):
                mutant, (result, test) = judged[future], future.result()
                done[mutant.key] = result
                if result != "not judged":
                    print(json.dumps({**asdict(mutant), "result": result, "test": test}), file=results, flush=True)
                print(f"{number}/{len(left)} {result}: {mutant.file}:{mutant.line} {test}", flush=True)
    sys.exit(summarize(drawn, done, 1.0 if given.faults else ENOUGH))


def summarize(drawn: list[Mutant], done: dict[tuple[str, int, str, str], str], enough: float) -> int:
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
    return int(share < enough)


if __name__ == "__main__":
    main()
