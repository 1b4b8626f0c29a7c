"""Every statement of the notes, checked: those that need training by experiments, the others by their tests.

    python benchmarks/claims.py [--parts t6 p6 p9 a11 a13 b6 b8 m7 l1] [--jobs 2] [--no-tests] [--no-save]

Prints one table, and exits with an error if a statement does not hold as src/glasshouse/notes/ has it: figures are
compared with the thresholds there, and saved beside them for the page and the docs. Text is the Python standard
library, byte level, or the built-in langid dataset. Batches depend on the seed alone, so models of one seed are
trained on the same batches.
"""

from __future__ import annotations

import argparse
import datetime
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from xml.etree import ElementTree

import torch
from trained_claims import (
    attention_patterns,
    key_value_heads,
    norm_placement,
    positions,
    pretraining,
    recall,
    tokens,
)
from trained_claims.experiment import Result, log

from glasshouse import notes
from glasshouse.notes.measurement import Measurement, save, verdicts

ROOT = Path(__file__).parents[1]
# The longest first, so that none is left alone at the end.
EXPERIMENTS: dict[str, tuple[Callable[[], Result], tuple[str, ...]]] = {
    "l1": (pretraining.fine_tuning, ("L1",)),
    "m7": (recall.by_distance, ("M7", "M8")),
    "b6": (norm_placement.stability, ("B6",)),
    "a11": (attention_patterns.patterns, ("A11",)),
    "t6": (tokens.bits_per_byte, ("T6",)),
    "a13": (key_value_heads.compare_heads, ("A13", "A16")),
    "p9": (positions.naive_positions, ("P9",)),
    "b8": (norm_placement.trained_range, ("B8",)),
    "p6": (positions.position_norms, ("P6",)),
}


def run(part: str) -> Result:
    """Run an experiment, in a process of its own."""
    torch.set_num_threads(1)  # models this small gain nothing from more
    start = time.perf_counter()
    result = EXPERIMENTS[part][0]().rounded()
    log(f"{part} took {time.perf_counter() - start:.0f} s")
    return result


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="*", choices=EXPERIMENTS, default=[*EXPERIMENTS], help="(default: all)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes (default: one per core)")
    parser.add_argument("--no-tests", action="store_true", help="do not run tests/claims")
    parser.add_argument("--quick", action="store_true", help="leave out the tests that take seconds")
    parser.add_argument("--no-save", action="store_true", help="leave the saved figures as they are")
    args = parser.parse_args()
    outcomes = {} if args.no_tests else test_outcomes(args.jobs, args.quick)
    with ProcessPoolExecutor(args.jobs) as pool:
        results = dict(zip(args.parts, pool.map(run, args.parts), strict=True))
    measured = {number: results[part] for part in args.parts for number in EXPERIMENTS[part][1]}

    broken, kept = [], {}
    for statement in (one for part in notes.parts() for one in part.statements):
        number = statement.number
        lines, wrong = [], False
        if tests := outcomes.get(number):
            lines.append(", ".join(f"{count} tests {outcome}" for outcome, count in tests.items()))
            wrong = bool(tests["failed"])
        if number in measured:
            result = measured[number]
            found = verdicts(statement, result.figures)
            lines += map(str, found)
            wrong |= not all(one.as_stated for one in found)
            today = datetime.datetime.now(datetime.UTC).date().isoformat()
            kept[number] = Measurement(today, result.figures, result.curves, result.along)
        if lines:
            print(f"{number:4} {'FAILS' if wrong else 'holds':6} {statement.title}")
            print("\n".join(f"{'':12}{line}" for line in lines), flush=True)
            broken += [number] * wrong
    if not args.no_save:
        save({number: one for number, one in kept.items() if number not in broken})
    if broken:
        raise SystemExit(f"not as stated: {', '.join(broken)}")


if __name__ == "__main__":
    main()
