"""Read verified.json, the result of `glasshouse verify`, from a model folder."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from glasshouse.errors import StoreError
from glasshouse.hub.model_folder import CONFIG, VERIFIED, ModelFolder


def describe(folder: ModelFolder) -> str | None:
    """Return the result in one line, None if there is none; a damaged file is no error.

    For example `verified 2026-11-15, largest differences: cached 2.4e-07, round trip 0.0e+00`.
    """
    if folder.file(VERIFIED) is None:
        return None
    try:
        table = folder.json(VERIFIED) or {}
        (date,) = re.findall(r"^\d{4}-\d\d-\d\d$", table["date"], re.ASCII)
        compared = {name: float(value) for name, value in table["differences"].items() if value is not None}
        listed = ", ".join(f"{name} {value:.1e}" for name, value in compared.items())
    except (StoreError, LookupError, TypeError, ValueError, AttributeError, OverflowError):
        return f"{VERIFIED} is damaged; run `glasshouse verify` again"
    if not compared or not listed.isprintable() or "nan" in listed or "inf" in listed:
        return f"{VERIFIED} is damaged; run `glasshouse verify` again"
    if table.get("files") != fingerprints(folder.path):
        return f"{VERIFIED} is of other weights or another config; run `glasshouse verify` again"
    return f"verified {date}, largest differences: {listed}"


def fingerprints(folder: Path) -> dict[str, str]:
    """Hash the config and each weights file: only its size, beginning, middle and end, for speed."""
    return {path.name: _fingerprint(path) for path in (folder / CONFIG, *sorted(folder.glob("*.safetensors")))}


def _fingerprint(path: Path, length: int = 2**16) -> str:
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        for start in (0, size // 2, max(0, size - length)):
            file.seek(start)
            digest.update(file.read(length))
    return digest.hexdigest()
