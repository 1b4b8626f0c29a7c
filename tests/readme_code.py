"""Write the Python of README.md, without its output, to build/types/readme.py, for type checkers."""

from __future__ import annotations

import doctest
from pathlib import Path

ROOT = Path(__file__).parents[1]


def readme_code() -> str:
    """Return the statements of README's examples, those left out that are there to raise an error."""
    found = doctest.DocTestParser().get_examples((ROOT / "README.md").read_text(encoding="utf-8"))
    return "".join(one.source for one in found if one.exc_msg is None)


if __name__ == "__main__":
    path = ROOT / "build/types/readme.py"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(readme_code(), encoding="utf-8")
