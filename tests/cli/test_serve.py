"""`glasshouse serve`: what it prints, and what it refuses; tests/serve has the rest."""

from __future__ import annotations

from pathlib import Path

import pytest

import glasshouse as gh
from cli.runner import Call


def test_the_address_is_the_last_line(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[gh.serve.Server] = []
    monkeypatch.setattr(gh.serve.Server, "run", lambda self, started: (made.append(self), started(), self.close()))
    monkeypatch.setenv("GLASSHOUSE_API_KEY", "a-key-of-enough-characters")
    done = call("serve", "small=python-3m", "--port", "0", "--slots", "2", "--max-len", "32", "--device", "cpu")
    assert done.code == 0
    assert done.out.splitlines()[-1] == f"{made[0].address}/v1"
    assert "small" in done.out
    assert "1 key" in done.out
    assert "a-key" not in done.out + done.err
    served = made[0].api.models["small"]
    assert (len(served.generator().slots), served.max_len, len(made[0].gate.keys)) == (2, 32, 1)
    assert made[0].api.answers is None
    done = call("serve", "python-3m", "--look", "--port", "0", "--slots", "1", "--max-len", "32", "--device", "cpu")
    assert done.out.splitlines()[0] == f"The page: {made[1].address}/"
    assert made[1].api.answers is not None


def test_what_is_not_safe_is_refused(call: Call, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    assert "no key" in call("serve", "python-3m", "--host", "0.0.0.0", "--port", "0").err
    keys.write_text("short\n")
    assert "key 1 is not 16" in call("serve", "python-3m", "--api-key-file", keys).err
    keys.write_text("# none\n")
    assert "has no keys" in call("serve", "python-3m", "--api-key-file", keys).err
    assert "cannot be read" in call("serve", "python-3m", "--api-key-file", tmp_path / "nothing").err
