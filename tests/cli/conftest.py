"""A command in this process, and what it is given."""

from __future__ import annotations

import functools
import io
import os
import sys
from collections.abc import Callable, Iterator
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
def lines(call: Call, tmp_path: Path) -> Callable[..., Done]:
    """Run a command with a real file as its standard input."""

    def lines(*words: str, stdin: bytes) -> Done:
        (tmp_path / "in").write_bytes(stdin)
        before = os.dup(0)
        with (tmp_path / "in").open("rb") as file:
            os.dup2(file.fileno(), 0)
        try:
            return call(*words)
        finally:
            os.dup2(before, 0)
            os.close(before)

    return lines


@pytest.fixture
def tok(tmp_path: Path) -> Path:
    """A tokenizer whose tokens are single bytes, so that rows can be worked out by hand."""
    gh.Tokenizer.train(texts=["bytes"], vocab_size=263).save(tmp_path / "tok")
    return tmp_path / "tok"
