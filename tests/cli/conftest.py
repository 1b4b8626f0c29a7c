"""A command in this process."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest

import glasshouse as gh
from cli.runner import Call, Done
from glasshouse.cli import main


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]) -> Call:
    def call(*words: str | Path, stdin: bytes = b"") -> Done:
        monkeypatch.setattr(sys, "argv", ["glasshouse", *map(str, words)])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        code: object = 0
        try:
            main()
        except SystemExit as stop:
            code = stop.code or 0
        out, err = capfdbinary.readouterr()
        assert isinstance(code, int)
        return Done(code, out.decode(), err.decode())

    return call


@pytest.fixture
def tok(tmp_path: Path) -> Path:
    """A tokenizer whose tokens are single bytes, so that rows can be worked out by hand."""
    gh.Tokenizer.train(texts=["bytes"], vocab_size=263).save(tmp_path / "tok")
    return tmp_path / "tok"
