"""`glasshouse steer make`, and `glasshouse serve --steer`."""

from __future__ import annotations

from pathlib import Path

import pytest

import glasshouse as gh
from cli.runner import Call


def test_made_served_and_refused(call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    positive, negative, out = (tmp_path / name for name in ("yes.txt", "no.txt", "numbers.safetensors"))
    positive.write_text("1, 2, 3\n\n10, 20\\n30\n")
    negative.write_text("a, b, c\n")
    options = ("--positive", positive, "--negative", negative, "--out", out, "--device", "cpu")
    done = call("steer", "make", "python-3m", *options, "--layer", "2")
    assert done.code == 0, done.err
    assert done.out.startswith(f"{out}: resid_post.2, norm ")
    assert done.out.endswith("from 2 positive and 1 negative texts\n")
    model, tok = gh.load("python-3m", device="cpu")
    expected = gh.steering_vector(model, tok, ["1, 2, 3", "10, 20\n30"], ["a, b, c"], site="resid_post.2")
    assert gh.inspection.SteeringVector.load(out).vector.allclose(expected.vector)

    made: list[gh.serve.Server] = []
    monkeypatch.setattr(gh.serve.Server, "run", lambda self, started: (made.append(self), started(), self.close()))
    serve = ("--port", "0", "--slots", "1", "--max-len", "16", "--device", "cpu")
    assert call("serve", "python-3m", "--steer", f"numbers={out}", *serve).code == 0
    engine = made[0].api.models["python-3m"].generator()
    assert list(engine.steering) == ["numbers"]
    refused = call("serve", "dates-1m", "--steer", f"numbers={out}", *serve)
    assert refused.code == 1
    assert refused.err.startswith("error: the steering vector 'numbers' was made for another model")
    assert len(refused.err.splitlines()) == 1
    assert "must be NAME=FILE" in call("serve", "python-3m", "--steer", "numbers", *serve).err
    both = ("--steer", f"a={out}", "--steer", f"a={out}")
    assert "two steering vectors are named 'a'" in call("serve", "python-3m", *both, *serve).err


def test_files_without_texts(call: Call, tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("\n")
    options = ("--negative", tmp_path / "empty", "--out", tmp_path / "out")
    assert "has no texts" in call("steer", "make", "python-3m", "--positive", tmp_path / "empty", *options).err
    assert "cannot be read" in call("steer", "make", "python-3m", "--positive", tmp_path / "nothing", *options).err
