"""The package's own source, parsed once for all tests that read it."""

from __future__ import annotations

import ast
import functools
from pathlib import Path


@functools.cache
def parse(path: Path) -> ast.Module:
    """Return the syntax tree of a file, which callers leave as it is."""
    return ast.parse(path.read_text(encoding="utf-8"))
