"""The browser of the page's tests: the one that is there, or else one that is installed.

    python tests/chromium.py [--get]

prints its path. With --get a missing one is installed: by apt-get as root, otherwise by Playwright's own download. A
machine where neither works gets one line that says so, and exit status 0 unless REQUIRE_BROWSER=1.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

# The headless shell is the same engine without windows, and starts and draws in half the time.
NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
MISSING = (
    "NO BROWSER: the page's tests need Chromium. Install one (apt-get install chromium, or "
    "python -m playwright install chromium), or set CHROMIUM to its path."
)
APT = "apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq chromium chromium-headless-shell"
DOWNLOAD = [sys.executable, "-m", "playwright", "install", "chromium"]
WHERE = (
    "from playwright.sync_api import sync_playwright\n"
    "with sync_playwright() as playwright: print(playwright.chromium.executable_path)"
)
PATIENCE = 600  # seconds for one way to install


def find() -> str | None:
    """Return the path of a browser on this machine: $CHROMIUM, one on the PATH, or one that Playwright downloaded."""
    if given := os.environ.get("CHROMIUM"):
        return given
    for name in NAMES:
        if path := shutil.which(name):
            return path
    # In a process of its own: Playwright does not start twice in one, and a test may be running in it.
    asked = subprocess.run([sys.executable, "-c", WHERE], capture_output=True, text=True, check=True)
    downloaded = asked.stdout.strip()
    return downloaded if Path(downloaded).exists() else None


def get() -> str | None:
    """Return the path of a browser, and install one if there is none and a way to."""
    if found := find():
        return found
    if shutil.which("apt-get") and os.geteuid() == 0:
        _install("apt-get", ["sh", "-c", APT])
        if found := find():
            return found
    _install("Playwright", DOWNLOAD)
    return find()


def is_required() -> bool:
    """Tell whether a missing browser is an error, as it is in CI."""
    return os.environ.get("REQUIRE_BROWSER") == "1"


def _install(way: str, command: list[str]) -> None:
    print(f"installing Chromium by {way} for the page's tests", file=sys.stderr, flush=True)
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=PATIENCE, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        print(f"{way} did not install it: {error}", file=sys.stderr)
        return
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines()
        reason = next(
            (line for line in said if "rror" in line), said[-1] if said else f"exit status {done.returncode}"
        )
        print(f"{way} did not install it: {reason.strip()}", file=sys.stderr)


def main() -> int:
    """Print where the browser is; return the exit status."""
    found = get() if "--get" in sys.argv[1:] else find()
    print(found or MISSING, file=sys.stdout if found else sys.stderr)
    return 0 if found or not is_required() else 1


if __name__ == "__main__":
    sys.exit(main())
