"""Run make targets one after the other, and end in one table: what a release needs.

    python tests/check.py TARGET...

Each target's output goes to build/check/TARGET.log. A target that passed on this very state of the checkout is not
run again, so that an interrupted check goes on where it stopped. Exits with 1 if a target failed.
"""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "build" / "check"
RESULTS = FOLDER / "results.json"


def state() -> str:
    """Return a hash of the checkout: the commit and what is changed since."""
    commands = (["git", "rev-parse", "HEAD"], ["git", "diff", "HEAD"], ["git", "status", "--porcelain"])
    said = [subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout for command in commands]
    return hashlib.sha256(b"".join(said)).hexdigest()[:12]


def run(target: str) -> dict[str, object]:
    """Run a target; return its outcome."""
    log, start = FOLDER / f"{target}.log", time.monotonic()
    with log.open("w") as file:
        code = subprocess.run(
            ["make", target], cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, check=False
        ).returncode
    counts = re.findall(r"\d+ (?:passed|failed|error)\w*", log.read_text(errors="replace"))
    return {
        "state": state(),
        "passed": code == 0,
        "minutes": round((time.monotonic() - start) / 60, 1),
        "tests": ", ".join(counts),
    }


def main() -> int:
    """Run what has not passed yet, print the table and return the exit status."""
    targets = sys.argv[1:]
    FOLDER.mkdir(parents=True, exist_ok=True)
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for number, target in enumerate(targets, 1):
        known = results.get(target, {})
        if known.get("passed") and known["state"] == state():
            continue
        print(f"{number}/{len(targets)} make {target} (build/check/{target}.log)", flush=True)
        results[target] = run(target)
        RESULTS.write_text(json.dumps(results, indent=1))
    print(f"\n{'target':14}{'':8}{'minutes':>8}  tests")
    for target in targets:
        one = results[target]
        print(f"{target:14}{'passed' if one['passed'] else 'FAILED':8}{one['minutes']:8}  {one['tests']}")
    return int(not all(results[target]["passed"] for target in targets))


if __name__ == "__main__":
    sys.exit(main())
