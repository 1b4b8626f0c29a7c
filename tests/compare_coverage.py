"""Compare the lines that two states of the tests execute.

    python tests/compare_coverage.py BEFORE AFTER [--before-root CHECKOUT] [--long DATA ...]

BEFORE and AFTER are data files of coverage. Prints both shares of src/ and each line that was executed before and is
not now, with whether a long suite (--long, data files of its own) executes it. Lines of files that were changed in
between are matched by their text. Exits with 1 if the share fell by more than 0.3 points, or if no suite executes a
lost line.
"""

from __future__ import annotations

import argparse
import difflib
import sys
from itertools import groupby
from pathlib import Path

from coverage import Coverage

ROOT = Path(__file__).parents[1]
SOURCE = "src/glasshouse"
ALLOWED = 0.3  # percentage points


def executed(data_file: Path, root: Path) -> tuple[dict[str, set[int]], dict[str, set[int]]]:
    """Return the statements of each file below src/glasshouse, and those that were executed."""
    coverage, statements, lines = Coverage(data_file=str(data_file)), {}, {}
    coverage.load()
    for path in sorted((root / SOURCE).rglob("*.py")):
        file = path.relative_to(root / SOURCE).as_posix()
        _, every, _, missing, _ = coverage.analysis2(str(path))
        statements[file], lines[file] = {*every}, {*every} - {*missing}
    return statements, lines


def line_map(before: Path, after: Path) -> dict[int, int]:
    """Return the lines of a file that still exist, by their number before."""
    if not after.exists():
        return {}
    texts = [path.read_text(encoding="utf-8").splitlines() for path in (before, after)]
    blocks = difflib.SequenceMatcher(None, *texts, autojunk=False).get_matching_blocks()
    return {one.a + k + 1: one.b + k + 1 for one in blocks for k in range(one.size)}


def ranges(numbers: list[int]) -> str:
    """Write line numbers briefly.

    >>> ranges([3, 4, 5, 9])
    '3-5, 9'
    """
    runs = [[one for _, one in group] for _, group in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0])]
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def main() -> int:
    """Print the comparison and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--before-root", type=Path, default=ROOT, help="the checkout that BEFORE was measured in")
    parser.add_argument("--long", type=Path, nargs="*", default=[], help="data files of long suites")
    given = parser.parse_args()
    (all_before, before), (all_after, after) = executed(given.before, given.before_root), executed(given.after, ROOT)
    shares = [
        100 * sum(map(len, lines.values())) / sum(map(len, statements.values()))
        for statements, lines in ((all_before, before), (all_after, after))
    ]
    long = [executed(one, ROOT)[1] for one in given.long]
    lost, uncovered = 0, 0
    for file, lines in before.items():
        paths = (given.before_root / SOURCE / file, ROOT / SOURCE / file)
        moved = line_map(*paths)
        gone = sorted(
            {moved[one] for one in lines if one in moved} & all_after.get(file, set()) - after.get(file, set())
        )
        if gone:
            covered = [one for one in gone if any(one in suite.get(file, ()) for suite in long)]
            alone = [one for one in gone if one not in covered]
            lost, uncovered = lost + len(gone), uncovered + len(alone)
            said = [f"in a long suite: {ranges(covered)}"] * bool(covered) + [f"nowhere: {ranges(alone)}"] * bool(
                alone
            )
            print(f"{SOURCE}/{file}: {'; '.join(said)}")
    print(f"{shares[0]:.2f}% of the lines before, {shares[1]:.2f}% after: {lost} lost, {uncovered} executed nowhere")
    return int(shares[1] < shares[0] - ALLOWED or uncovered > 0)


if __name__ == "__main__":
    sys.exit(main())
