"""The audit of what loading does: it lets valid folders pass, and sees what is forbidden."""

from __future__ import annotations

import os
import pickle
import signal
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from hub.audit import audited, recorded
from hub.damage import CONFIG, FIRST, SECOND, WEIGHTS, Bomb
from hub.valid_checkpoints import SPECS

import glasshouse as gh


@pytest.mark.parametrize("name", [*SPECS, "ours", "sharded", "worded"])
def test_valid_checkpoints_are_loaded_and_nothing_else_is_read(valid_checkpoints: Path, name: str) -> None:
    with audited(valid_checkpoints / name) as forbidden:
        model, tok = gh.load(valid_checkpoints / name)
    assert forbidden == []
    assert model.spec == SPECS.get(name, model.spec) or name != "own"
    assert (tok is not None) == (name == "worded")
    opened = {Path(arguments[0]).name for event, arguments in recorded if event == "open"}
    assert opened >= {CONFIG, FIRST, SECOND} if name == "sharded" else opened >= {CONFIG, WEIGHTS}


def connect() -> None:
    with socket.socket() as one, pytest.raises(OSError, match=r"refused|denied|unreachable"):
        one.connect(("127.0.0.1", 9))


PROVOKED: dict[str, tuple[str, Callable[[Path], object]]] = {
    "reading-outside": ("open", lambda model: (model.parent / "secret.json").read_text()),
    "reading-through-a-link": ("open", lambda model: (model / "link.json").read_text()),
    "reading-code-inside": ("open", lambda model: (model / "hostile.py").read_text()),
    "writing-inside": ("open", lambda model: (model / CONFIG).open("a").close()),
    "removing": ("os.remove", lambda model: (model / CONFIG).unlink()),
    "listing-outside": ("os.listdir", lambda model: list(model.parent.iterdir())),
    "connecting": ("socket.connect", lambda model: connect()),
    "looking-a-name-up": ("socket.getaddrinfo", lambda model: socket.getaddrinfo("127.0.0.1", 9)),
    "a-process": ("subprocess.Popen", lambda model: subprocess.run(["true"], check=True)),
    "a-shell": ("os.system", lambda model: os.system("true")),
    "a-pickle": ("pickle.find_class", lambda model: pickle.loads(pickle.dumps(Bomb(str(model / "gone-off"))))),
    "compiling": ("compile", lambda model: compile("1 + 1", "<string>", "eval")),
    "evaluating": ("compile", lambda model: eval("1 + 1")),
    "running-code-inside": ("exec", lambda model: exec(compile("1", str(model / "hostile.py"), "exec"))),
}


@pytest.mark.parametrize("name", PROVOKED)
def test_the_audit_hook_sees_forbidden_events(model: Path, name: str) -> None:
    (model / "hostile.py").write_text("1")
    (model.parent / "secret.json").write_text("{}")
    (model / "link.json").symlink_to("../secret.json")
    event, provoke = PROVOKED[name]
    with audited(model) as forbidden:
        provoke(model)
    assert any(line.startswith(f"{event} ") for line in forbidden), forbidden


def test_the_audit_hook_sees_a_hang(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(model / "pipe.json")
    monkeypatch.setattr(signal, "alarm", lambda seconds: signal.setitimer(signal.ITIMER_REAL, seconds / 50))
    with pytest.raises(pytest.fail.Exception, match="not done"), audited(model):
        (model / "pipe.json").read_text()
