"""What loading a folder did, by Python's audit events: all but reading that folder's data is forbidden."""

from __future__ import annotations

import inspect
import os
import re
import signal
import sys
import sysconfig
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import glasshouse as gh
from glasshouse import registry

SECONDS = 10  # all of this takes milliseconds; only a hang takes longer
TRUSTED = [Path(p).resolve() for p in (sys.prefix, sys.base_prefix, sysconfig.get_path("stdlib"), gh.__path__[0])]
PROCESSES = re.compile(r"socket\.|subprocess\.|pickle\.|shutil\.|os\.(system|exec|fork|posix_spawn|spawn|startfile)")
CHANGES = re.compile(r"os\.(remove|rename|mkdir|rmdir|link|symlink|truncate|chmod|chown|utime)")
HINTS = {  # which `get_type_hints` evaluates; any other text that is compiled came from elsewhere
    hint
    for kind in (*vars(gh.spec).values(), gh.config.Settings, registry.Kind)
    if isinstance(kind, type)
    for hint in inspect.get_annotations(kind).values()
}

recorded: list[tuple[str, tuple[Any, ...]]] = []
watching = False


def listen(event: str, arguments: tuple[Any, ...]) -> None:
    if watching:
        recorded.append((event, arguments))


sys.addaudithook(listen)


def is_within(path: object, roots: list[Path]) -> bool:
    real = Path(os.fsdecode(path)).resolve()  # type: ignore[arg-type]
    return any(real.is_relative_to(root) for root in roots)


def is_forbidden(event: str, arguments: tuple[Any, ...], roots: list[Path]) -> bool:
    """Return whether an audit event is more than reading data under the roots, or an import of installed code."""
    if event == "open":
        path, _, flags = arguments
        if isinstance(path, int):
            return False
        suffix = Path(os.fsdecode(path)).suffix
        data = suffix in (".json", ".safetensors", ".txt", ".model") and not flags & (os.O_WRONLY | os.O_RDWR)
        return not (is_within(path, TRUSTED) or (data and is_within(path, roots)))
    if event in ("os.listdir", "os.scandir"):
        return not is_within(arguments[0] or ".", [*TRUSTED, *roots])
    if event == "compile":
        source, name = arguments
        if source is None or not str(name).startswith("<"):
            return not is_within(name, TRUSTED)
        return (source.decode() if isinstance(source, bytes) else str(source)) not in HINTS
    if event == "exec":
        name = arguments[0].co_filename
        return not (name.startswith("<") or is_within(name, TRUSTED))
    return bool(PROCESSES.match(event) or CHANGES.match(event))


@contextmanager
def audited(*roots: Path) -> Iterator[list[str]]:
    """Record audit events; at the end put those that reading these folders does not need into the list."""

    def too_long(*_: object) -> None:
        pytest.fail(f"not done after {SECONDS} seconds")

    for group in (registry.KINDS, registry.FAMILIES):  # which packages are installed is looked up once: before
        registry.entry_points(group)
    global watching
    found: list[str] = []
    recorded.clear()
    before = signal.signal(signal.SIGALRM, too_long)
    signal.alarm(SECONDS)
    watching = True
    try:
        yield found
    finally:
        watching = False
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
        real = [root.resolve() for root in roots]
        found += [f"{event} {arguments}" for event, arguments in recorded if is_forbidden(event, arguments, real)]


def refuse(folder: Path, file: str, reason: str, **options: object) -> str:
    """Load, and assert that the error is one readable sentence that names the file and the reason."""
    root = folder.parents[1] if folder.parent.name == "snapshots" else folder
    quiet, refused = warnings.catch_warnings(action="error"), pytest.raises(gh.GlasshouseError)
    with quiet, audited(root) as forbidden, refused as caught:
        gh.load(folder, **options)  # type: ignore[arg-type]
    assert forbidden == []
    text = str(caught.value)
    assert text.isprintable(), repr(text[:400])
    shown = text.replace(str(folder.parent), "")
    assert len(shown) < 500, shown[:500]
    assert re.search(r"[.?]$", shown), shown
    assert any(name in shown for name in file.split("|")), shown
    assert re.search(reason, shown), shown
    return text
