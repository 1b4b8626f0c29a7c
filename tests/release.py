"""Build a release and check it: version and changelog, wheel and sdist in empty environments, the docs, `make check`.

    python tests/release.py [--skip-check]

Each supported Python that is found on PATH gets the wheel; the first of them also the sdist, and the oldest torch.
README's examples run in each. Nothing is uploaded: it ends in what to upload. Exits with 1 at the first failure.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
DIST, ENVIRONMENTS = ROOT / "dist", ROOT / "build" / "release"
NEWEST_MINOR = 14  # of the Pythons that are looked for


def read_version() -> str:
    found = re.search(r'__version__ = "(.*)"', (ROOT / "src/glasshouse/version.py").read_text(encoding="utf-8"))
    assert found is not None
    return found.group(1)


def problems(version: str, changelog: str, citation: str, status: str) -> Iterator[str]:
    """Yield what must be put right before a release.

    >>> list(problems("0.1.0", "## 0.1.0 (2026-12-01)", "version: 0.1.0", ""))
    []
    >>> for one in problems("0.2.0.dev0", "## 0.2.0 (unreleased)", "version: 0.1.0", " M README.md"):
    ...     print(one)
    the version is 0.2.0.dev0; set that of the release in src/glasshouse/version.py
    CHANGELOG.md has no heading "## 0.2.0.dev0 (date)"
    CITATION.cff has another version
    there are changes that are not committed
    """
    if not re.fullmatch(r"\d+\.\d+\.\d+((a|b|rc)\d+)?", version):
        yield f"the version is {version}; set that of the release in src/glasshouse/version.py"
    if not re.search(rf"^## {re.escape(version)} \(\d{{4}}-\d\d-\d\d\)$", changelog, re.MULTILINE):
        yield f'CHANGELOG.md has no heading "## {version} (date)"'
    if not re.search(rf"^version: {re.escape(version)}$", citation, re.MULTILINE):
        yield "CITATION.cff has another version"
    if status.strip():
        yield "there are changes that are not committed"


def call(*command: str | Path, cwd: Path = ROOT) -> None:
    print("+", *command, flush=True)
    if subprocess.run([str(part) for part in command], cwd=cwd, check=False).returncode:
        sys.exit(f"failed: {' '.join(str(part) for part in command)}")


def pythons(oldest_minor: int) -> dict[str, str | None]:
    """Return the supported Pythons and where each is, None for those that are not there or do not start."""
    found = {
        name: shutil.which(name) for name in (f"python3.{minor}" for minor in range(oldest_minor, NEWEST_MINOR + 1))
    }
    return {
        name: path if path and not subprocess.run([path, "-V"], capture_output=True, check=False).returncode else None
        for name, path in found.items()
    }


def try_package(name: str, python: str, package: Path, torch: str) -> None:
    """Install a built package in an empty environment and run README's examples with it."""
    folder = ENVIRONMENTS / name
    call(python, "-m", "venv", "--clear", folder)
    constraints = folder / "constraints.txt"
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    kept = [line for line in lines if torch == "torch" or not line.startswith("torch==")]
    constraints.write_text("\n".join(kept), encoding="utf-8")
    for what in (torch, package):
        call(folder / "bin/pip", "install", "--quiet", "--constraint", constraints, what)
    call(folder / "bin/python", "-m", "doctest", ROOT / "README.md", cwd=folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--skip-check", action="store_true", help="leave out `make check`, which takes a day")
    args = parser.parse_args()
    version, project = read_version(), tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    texts = [(ROOT / name).read_text(encoding="utf-8") for name in ("CHANGELOG.md", "CITATION.cff")]
    command = ["git", "status", "--porcelain"]
    status = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    unready = list(problems(version, *texts, status))
    shutil.rmtree(DIST, ignore_errors=True)
    call(sys.executable, "-m", "build", "--no-isolation", "--outdir", DIST)
    (wheel,), (sdist,) = DIST.glob("*.whl"), DIST.glob("*.tar.gz")
    oldest = re.search(r"torch>=([\d.]+)", " ".join(project["dependencies"]))
    assert oldest is not None
    found = pythons(int(project["requires-python"].removeprefix(">=3.")))
    present = {name: path for name, path in found.items() if path is not None}
    if not present:
        sys.exit(f"none of {', '.join(found)} is on PATH")
    for name, path in present.items():
        try_package(name, path, wheel, "torch")
    name, path = next(iter(present.items()))
    try_package(f"{name}-sdist", path, sdist, "torch")
    try_package(f"{name}-oldest-torch", path, wheel, f"torch=={oldest.group(1)}")
    call("make", "docs")
    if not args.skip_check:
        call("make", "check")
    missing = [name for name in found if name not in present]
    print(f"\nchecked on {', '.join(present)}" + (f"; not on PATH: {', '.join(missing)}" if missing else ""))
    for one in (wheel, sdist):
        print(f"{hashlib.sha256(one.read_bytes()).hexdigest()}  {one.relative_to(ROOT)}")
    if unready:
        sys.exit("\nnot yet a release: " + "; ".join(unready) + ".")
    print(f"\nto release {version}:\n  git tag v{version} && git push origin v{version}")
    print(
        f"  twine upload {wheel.relative_to(ROOT)} {sdist.relative_to(ROOT)}\n  build/site goes to where the docs are"
    )


if __name__ == "__main__":
    main()
