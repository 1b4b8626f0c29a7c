"""Plant mistakes in the figures of the notes, one at a time, and see that the tests of their cards fail.

A mistake is planted in memory: the module is executed anew with the changed line, and its figure of the card takes
the place of the right one.

    python tests/claims/figure_faults.py            all of them
    python tests/claims/figure_faults.py A12 P6     those of some cards
"""

from __future__ import annotations

import contextlib
import importlib
import io
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest

HERE = Path(__file__).parent
PACKAGE = "glasshouse.page.views.notes"
MODULES = {  # of the figures, and the file of their tests
    "text": "text",
    "embedding": "vectors",
    "positions": "vectors",
    "attention": "attention",
    "heads": "attention",
    "families": "attention",
    "block": "block",
    "models": "models",
    "training": "models",
    "inspection": "inspection",
}


@dataclass(frozen=True)
class Fault:
    """A mistake: the text of a file as it is, and as it must not be."""

    card: str
    file: str
    line: str
    fault: str

    @property
    def module(self) -> str:
        """The module that draws the card."""
        return next(name for name in MODULES if self.card in importlib.import_module(f"{PACKAGE}.{name}").FIGURES)

    @property
    def test(self) -> str:
        """The test of the card."""
        return f"{HERE / f'test_figures_{MODULES[self.module]}.py'}::test_figure_{self.card.lower()}"

    def source(self) -> str:
        """Return the file as it is."""
        return (Path(importlib.import_module(PACKAGE).__path__[0]) / self.file).read_text(encoding="utf-8")

    @contextlib.contextmanager
    def planted(self) -> Iterator[None]:
        """Let the card be drawn with the mistake."""
        figures, right = importlib.import_module(PACKAGE).FIGURES, importlib.import_module(f"{PACKAGE}.{self.module}")
        changed = self.source().replace(self.line, self.fault)
        if self.file == f"{self.module}.py":
            wrong = execute(self.module, changed)
        else:  # a module that the card's imports from
            shared = f"{PACKAGE}.{self.file.removesuffix('.py')}"
            kept = sys.modules[shared]
            sys.modules[shared] = execute(self.file.removesuffix(".py"), changed)
            try:
                wrong = execute(self.module, Path(str(right.__file__)).read_text(encoding="utf-8"))
            finally:
                sys.modules[shared] = kept
        figures[self.card] = wrong.FIGURES[self.card]
        try:
            yield
        finally:
            figures[self.card] = right.FIGURES[self.card]


def execute(name: str, source: str) -> ModuleType:
    """Return a module made from source, which other modules do not see."""
    module = ModuleType(f"{PACKAGE}.{name}")
    kept = sys.modules[module.__name__]
    sys.modules[module.__name__] = module  # where dataclasses look for it
    try:
        exec(compile(source, f"{name}.py, changed", "exec"), module.__dict__)
    finally:
        sys.modules[module.__name__] = kept
    return module


def faults() -> list[Fault]:
    """Return the mistakes."""
    return [
        Fault(**one) for one in tomllib.loads((HERE / "figure_faults.toml").read_text(encoding="utf-8"))["faults"]
    ]


class Failed:
    """The tests that failed, as pytest reports them."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep the name of a test that failed."""
        if report.failed:
            long = ", which is long" if "long" in report.keywords else ""
            self.names.append(report.nodeid.rpartition("::")[2] + long)


def run(*tests: str) -> list[str]:
    """Run tests in this process, the long ones too, up to the first that fails."""
    failed, output = Failed(), io.StringIO()
    with contextlib.redirect_stdout(output):
        code = pytest.main([*tests, "-q", "-x", "-m", "", "--tb=no", "-p", "no:cacheprovider"], plugins=[failed])
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        raise SystemExit(f"pytest could not run {' '.join(tests)}:\n{output.getvalue()}")
    return failed.names


def main(cards: list[str]) -> int:
    """Try mistakes; return the exit code, which is 1 if one survives."""
    tried = [one for one in faults() if not cards or one.card in cards]
    if wrong := run(*dict.fromkeys(one.test for one in tried)):
        print(f"{wrong[0]} fails without a mistake")
        return 1
    caught = 0
    for one in tried:
        with one.planted():
            names = run(one.test)
        caught += bool(names)
        said = f"caught by {names[0]}" if names else "SURVIVES"
        print(f"{one.card:4} {one.file:14} {one.fault[:70]:70} {said}", flush=True)
    print(f"caught {caught} of {len(tried)} planted mistakes in the figures")
    return 0 if caught == len(tried) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
