"""A command in this process."""

from __future__ import annotations

import functools
import io
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

import glasshouse as gh
from cli.runner import Call, Done
from glasshouse.cli import main


@pytest.fixture(scope="session", autouse=True)
def commands_made_once() -> Iterator[None]:
    """Typer makes all commands anew for each that is called, in 60 ms."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(typer.main, "get_command", functools.cache(typer.main.get_command))
        yield


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
