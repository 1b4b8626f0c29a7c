"""What all commands have in common: help without torch, one sentence for a mistake, a line for a warning."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import glasshouse as gh
from cli.runner import Call, command_at_terminal, run
from glasshouse.cli import screen
from glasshouse.escaping import show_whitespace

COMMANDS = {
    ("train",): ("[default: stdlib]", "[default: baselines]"),
    ("eval",): ("[default: validation]", "[default: 32]", "[default: (all)]", "auto"),
    ("export",): (),
    ("verify",): (),
    ("doctor",): (),
    ("tokenizer", "train"): ("8192", "gpt2|gpt4", "text", "strict", "750000"),
    ("tokenizer", "encode"): (),
    ("tokenizer", "decode"): (),
    ("tokenizer", "show"): ("10 MB",),
    ("tokenizer", "watch"): ("20", "3", "5 MB", "gpt2"),
    ("data", "prepare"): ("train", "text|pairs|labelled|tagged|chat", "strict"),
    ("data", "list"): (),
    ("data", "show"): ("[default: 0]", "[default: 8]", "[default: 128]"),
    ("data", "verify"): (),
}


def test_help_needs_no_torch_and_shows_defaults_and_an_example() -> None:
    code = (
        "import sys, glasshouse.cli\n"
        f"for words in {[*map(list, COMMANDS), [], ['tokenizer'], ['data']]!r}:\n"
        "    try: glasshouse.cli.app([*words, '--help'])\n"
        "    except SystemExit: print('end of', *words)\n"
        "print('torch' in sys.modules, 'tokenizers' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={"COLUMNS": "200", "PYTHONIOENCODING": "utf-8"},
    )
    assert done.stdout.splitlines()[-1] == "False False"
    for words, shown in COMMANDS.items():
        helped, _, rest = done.stdout.partition(f"end of {' '.join(words)}\n")
        assert rest, words
        helped = helped.rpartition("end of ")[2]
        assert f"glasshouse {' '.join(words)}" in helped.partition("Example: ")[2]
        for default in shown:
            assert default in helped, (words, default)


@pytest.mark.parametrize(
    "words",
    [
        ("tokenizer", "train", "absent", "--out", "never"),
        ("tokenizer", "encode", "absent", "text"),
        ("tokenizer", "decode", "absent", "1"),
        ("tokenizer", "decode", "tok", "one"),
        ("tokenizer", "decode", "tok", "263"),
        ("tokenizer", "encode", "tok", "text", "--file", "plain.txt"),
        ("tokenizer", "encode", "tok", "--file", "absent"),
        ("tokenizer", "show", "tok", "--compare", "tok"),
        ("tokenizer", "show", "tok", "--text", "absent"),
        ("tokenizer", "watch", "empty.txt"),
        ("data", "prepare", "absent", "--tokenizer", "tok", "--out", "never"),
        ("data", "prepare", "plain.txt", "--tokenizer", "absent", "--out", "never"),
        ("data", "prepare", "plain.txt", "--tokenizer", "tok", "--out", "never", "--kind", "pairs"),
        ("data", "show", "absent"),
        ("data", "verify", "tok"),
    ],
)
def test_a_mistake_is_one_sentence_and_exit_code_one(
    words: tuple[str, ...], call: Call, tok: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tok.parent)
    Path("plain.txt").write_text("plain")
    Path("empty.txt").write_text("")
    done = call(*words)
    assert (done.code, done.out) == (1, "")
    assert done.err.startswith("error: ")
    assert done.err.count("\n") == 1
    assert not Path("never").exists() or words[1] == "prepare"


def test_a_warning_is_one_line_without_its_place_in_the_code(call: Call, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("ab")
    done = call("tokenizer", "train", tmp_path / "a.txt", "--out", tmp_path / "tok", "--vocab-size", "300")
    assert done.code == 0
    assert done.err == ("warning: the text has no more pairs to merge, so the vocabulary has 264 tokens, not 300.\n")


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        ("a b\tc\nd", "a␣b⇥c⏎d"),
        ("\x1b[31m\r\x00\x7f", r"\x1b[31m\r\x00\x7f".replace(r"\r", r"\x0d")),
        (b"caf\xc3\xa9 \xc3", r"café␣\xc3"),
        ("\x85\u202e\U000e0001", r"\u0085\u202e\U000e0001"),
        (r"\x1b", r"\\x1b"),
        ("␣⏎⇥¶←", r"\u2423\u23ce\u21e5\u00b6\u2190"),
        ("[bold]x[/bold] :smile:", "[bold]x[/bold]␣:smile:"),
    ],
)
def test_what_cannot_be_seen_is_spelled_out_and_each_sign_has_one_meaning(text: str | bytes, seen: str) -> None:
    assert show_whitespace(text) == seen


def test_a_terminal_that_is_closed_takes_what_is_printed() -> None:
    far, near = os.openpty()
    with os.fdopen(near, "w") as plain:
        stream = screen.outlive_terminal(plain)
        assert stream.isatty()
        print("to be", file=stream)
        assert os.read(far, 99) == b"to be\r\n"
        os.close(far)
        print("or not to be", file=stream, flush=True)
        with pytest.raises(OSError, match="Input/output error"):
            print("or not to be", file=plain, flush=True)
        os.dup2(os.open(os.devnull, os.O_WRONLY), near)  # so that what is held back can be let go


@pytest.mark.long
@pytest.mark.slow
def test_progress_bar_is_drawn_at_a_terminal_only(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("to be or not to be " * 1000)
    words = ("tokenizer", "train", tmp_path / "a.txt", "--out", tmp_path / "tok", "--vocab-size", "270")
    drawn = command_at_terminal(*words)
    assert "reading" in drawn
    assert "100%" in drawn
    assert "19.0 kB of 19.0 kB" in drawn
    assert "270 of 270 tokens" in drawn
    done = run(*words)
    assert (done.returncode, done.stderr) == (0, "")
    assert "\x1b" not in done.stdout


@pytest.mark.long
@pytest.mark.slow
def test_python_dash_m_is_the_command() -> None:
    words = [sys.executable, "-m", "glasshouse"]
    done = subprocess.run([*words, "--version"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    device = gh.device.describe(gh.device.fastest())
    assert done.stdout == f"glasshouse {gh.__version__}, torch {torch.__version__}, {device}\n"
    helped = subprocess.run([*words, "data", "list", "--help"], capture_output=True, text=True, check=False)
    assert "Usage: python -m glasshouse data list" in helped.stdout
    wrong = subprocess.run(
        [*words, "tokenizer", "decode", "absent", "1"], capture_output=True, text=True, check=False
    )
    assert (wrong.returncode, wrong.stderr.count("\n")) == (1, 1)
