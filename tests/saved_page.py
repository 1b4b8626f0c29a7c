"""What is packed in a saved page."""

from __future__ import annotations

import base64
import gzip
import json
import re
from typing import Any


def scripts(page: str) -> dict[str, str]:
    """Return the scripts of a saved page by name."""
    found: dict[str, str] = _packed(page)["scripts"]
    return found


def unpack(page: str) -> dict[str, Any]:
    """Return the data of a saved page: its fragment, what can be selected, and its responses."""
    (data,) = _packed(page)["elements"].values()
    unpacked: dict[str, Any] = json.loads(data)
    return unpacked


def _packed(page: str) -> dict[str, Any]:
    found = re.search(r'id="packed">([^<]*)<', page)
    assert found is not None
    packed: dict[str, Any] = json.loads(gzip.decompress(base64.b64decode(found[1])))
    return packed
