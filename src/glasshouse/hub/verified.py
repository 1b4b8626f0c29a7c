"""What `glasshouse verify` found, as it stands beside the weights."""

from __future__ import annotations

import re

from glasshouse.errors import StoreError
from glasshouse.hub.folder import VERIFIED, Folder


def describe(folder: Folder) -> str | None:
    """Say in one line what was found, None where nothing is; a file that makes no sense stops nobody.

    It reads like `verified 2026-11-15, largest differences: cached 2.4e-07, round trip 0.0e+00`.
    """
    if folder.file(VERIFIED) is None:
        return None
    try:
        table = folder.json(VERIFIED) or {}
        (date,) = re.findall(r"^\d{4}-\d\d-\d\d$", table["date"], re.ASCII)
        sizes = {name: found["bytes"] for name, found in table["weights"].items()}
        compared = {name: float(value) for name, value in table["differences"].items() if value is not None}
        listed = ", ".join(f"{name} {value:.1e}" for name, value in compared.items())
    except (StoreError, LookupError, TypeError, ValueError, AttributeError, OverflowError):
        return f"{VERIFIED} is damaged; run `glasshouse verify` again"
    if not compared or not listed.isprintable() or "nan" in listed or "inf" in listed:
        return f"{VERIFIED} is damaged; run `glasshouse verify` again"
    if sizes != {path.name: path.stat().st_size for path in folder.path.glob("*.safetensors")}:
        return f"{VERIFIED} speaks of other weights; run `glasshouse verify` again"
    return f"verified {date}, largest differences: {listed}"
