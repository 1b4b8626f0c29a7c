"""Every statement of the notes, checked: those that need training by experiments, the others by their tests.

    python benchmarks/claims.py [--parts t6 m8 ...] [--jobs 2] [--no-tests] [--no-save] [--fresh]

Prints one table, and exits with an error if a statement does not hold as src/glasshouse/notes/ has it: figures are
compared with the thresholds there, and saved beside them for the page and the docs. Text is the Python standard
library, byte level, or the built-in langid dataset. Batches depend on the seed alone, so models of one seed are
trained on the same batches. Finished parts are kept in build/claims until their code changes, so that a run which was
interrupted resumes.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from xml.etree import ElementTree

import torch
from trained_claims.experiment import Result, log
from trained_claims.parts import PARTS

from glasshouse import notes
from glasshouse.notes.measurement import Measurement, Verdict, save, verdicts

ROOT = Path(__file__).parents[1]
FINISHED = ROOT / "build" / "claims"


@dataclass(frozen=True)
class Finished:
    """The result of a part, kept for a run that resumes."""

    key: str  # of the code that it comes from
    on: str  # date
    seconds: float  # of one core
    result: Result

    @classmethod
    def load(cls, part: str) -> Finished | None:
        """Return the result of a part if its code is still the same."""
        path = FINISHED / f"{part}.json"
        if not path.exists():
            return None
        kept = json.loads(path.read_text(encoding="utf-8"))
        found = cls(**(kept | {"result": Result(**kept["result"])}))
        return found if found.key == PARTS[part].key else None

    def save(self, part: str) -> None:
        """Keep it; a run that is killed meanwhile leaves no half of a file."""
        FINISHED.mkdir(parents=True, exist_ok=True)
        path = FINISHED / f"{part}.json"
        path.with_suffix(".part").write_text(json.dumps(asdict(self)), encoding="utf-8")
        path.with_suffix(".part").replace(path)


def run(part: str) -> Finished:
    """Run an experiment, in a process of its own, or return what is kept of it."""
    if (kept := Finished.load(part)) is not None:
        log(f"{part} was finished on {kept.on}; --fresh runs it again")
        return kept
    torch.set_num_threads(1)  # models this small gain nothing from more
    start = time.process_time()  # whatever else the machine does
    result = PARTS[part].run().rounded()
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    found = Finished(PARTS[part].key, today, time.process_time() - start, result)
    found.save(part)
    log(f"{part} took {found.seconds:.0f} s of one core")
    return found


def test_outcomes(jobs: int, quick: bool) -> dict[str, Counter[str]]:
    """Run tests/claims; return how many tests of each statement passed and failed."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-n", str(jobs), "tests/claims", f"--junitxml={report}"]
        command += ["--ignore=tests/claims/test_faults.py"]  # which runs this script
        command += ["-m", "not slow and not long"] * quick
        subprocess.run(command, cwd=ROOT, check=False, stdout=sys.stderr)
        cases = ElementTree.parse(report).iter("testcase")
        found: dict[str, Counter[str]] = defaultdict(Counter)
        for case in cases:
            named = re.match(r"test_(?:figure_)?([a-z]\d+)[_[]", case.get("name", ""))
            failed = case.find("failure") is not None or case.find("error") is not None
            if named:
                found[named[1].upper()]["failed" if failed else "passed"] += 1
    return found


def with_spread(found: Verdict, figures: Mapping[str, float]) -> str:
    """Return a figure beside its threshold, and its standard deviation over seeds where it is a mean."""
    spread = figures.get(f"{found.threshold.figure}, standard deviation")
    said = str(found) if spread is None else f"{found}, standard deviation {spread:.2g}"
    return said if found.as_stated else f"{said}: NOT AS STATED"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=[*PARTS], help="(default: all)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes (default: one per core)")
    parser.add_argument("--no-tests", action="store_true", help="do not run tests/claims")
    parser.add_argument("--quick", action="store_true", help="leave out the tests that take seconds")
    parser.add_argument("--no-save", action="store_true", help="leave the saved figures as they are")
    parser.add_argument("--fresh", action="store_true", help="run parts again that were finished before")
    args = parser.parse_args()
    start = time.perf_counter()
    if args.fresh:
        for part in args.parts:
            (FINISHED / f"{part}.json").unlink(missing_ok=True)
    outcomes = {} if args.no_tests else test_outcomes(args.jobs, args.quick)
    tested = time.perf_counter() - start
    with ProcessPoolExecutor(args.jobs) as pool:
        results = dict(zip(args.parts, pool.map(run, args.parts), strict=True))
    measured = {number: results[part] for part in args.parts for number in PARTS[part].statements}

    broken, kept = [], {}
    for statement in (one for part in notes.parts() for one in part.statements):
        number = statement.number
        lines, wrong = [], False
        if tests := outcomes.get(number):
            lines.append(", ".join(f"{count} tests {outcome}" for outcome, count in tests.items()))
            wrong = bool(tests["failed"])
        if number in measured:
            part = measured[number]
            found = verdicts(statement, part.result.figures)
            lines += [with_spread(one, part.result.figures) for one in found]
            wrong |= not all(one.as_stated for one in found)
            kept[number] = Measurement(part.on, part.result.figures, part.result.curves, part.result.along)
        outcome = ("FAILS" if wrong else "holds") if lines else "-"  # what was not run now
        if number not in measured and (before := notes.measurements().get(number)) is not None:
            found = verdicts(statement, before.figures)
            lines += [f"{with_spread(one, before.figures)}, on {before.on}" for one in found]
        print(f"{number:4} {outcome:6} {statement.title}")
        print("".join(f"{'':12}{line}\n" for line in lines), end="", flush=True)
        broken += [number] * wrong
    seconds = {part: one.seconds for part, one in results.items()}
    print("seconds of one core: " + ", ".join(f"{part} {one:.0f}" for part, one in seconds.items()))
    took = time.perf_counter() - start
    print(f"{sum(seconds.values()):.0f} s for these parts; this run took {took:.0f} s, {tested:.0f} s for tests")
    if not args.no_save:
        save({number: one for number, one in kept.items() if number not in broken})
    if broken:
        raise SystemExit(f"not as stated: {', '.join(broken)}")


if __name__ == "__main__":
    main()
