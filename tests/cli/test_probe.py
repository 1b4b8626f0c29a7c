"""`glasshouse probe make` and `show`."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.text import Text

import glasshouse as gh
from cli.runner import Call
from glasshouse.cli import screen

COMMENTS = ["# one of these", "# of the two", '"""Return the list\\nof lines."""', "# see the other file"]
CODE = ["x = [1, 2]", "def f(a):\\n    return a", "import os", "if x is None: raise ValueError"]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    folder = tmp_path_factory.mktemp("probe")
    (folder / "comments").write_text("\n\n".join(COMMENTS))
    (folder / "code").write_text("\n".join(CODE))
    return folder / "out.safetensors", folder / "comments", folder / "code"


def test_made_and_shown(call: Call, files: tuple[Path, Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    out, positive, negative = files
    options = ("--positive", positive, "--negative", negative, "--device", "cpu")
    done = call("probe", "make", "python-3m", out, *options, "--site", "resid_post.2")
    assert done.code == 0, done.err
    model, tok = gh.load("python-3m", device="cpu")
    given = [text.replace("\\n", "\n") for text in COMMENTS + CODE]
    expected = gh.probe(model, tok, given, [True] * 4 + [False] * 4, site="resid_post.2")
    made = gh.inspection.LinearProbe.load(out)
    assert made.direction.allclose(expected.direction)
    assert (made.held_out, made.held_out_texts) == (expected.held_out, expected.held_out_texts)
    first, header, *rows = done.out.splitlines()
    assert first == f"{out}: resid_post.2, from 4 positive and 4 negative texts, of which a fifth is held out"
    assert header.split() == ["held", "out", "balanced", "accuracy", "AUC", "positive", "negative"]
    for row, name, one in zip(rows, ("tokens", "texts"), (made.held_out, made.held_out_texts), strict=True):
        assert one is not None
        assert row.split() == [name, f"{one.accuracy:.3f}", f"{one.auc:.3f}", str(one.positive), str(one.negative)]

    text = "x = 1  # of \x1b[31m"
    shown = call("probe", "show", "python-3m", out, text, "--device", "cpu")
    assert shown.code == 0, shown.err
    with gh.record(model, "resid_post.2", tok=tok) as seen:
        gh.inspection.run(model, text, tok=tok)
    scores = made.scores(seen["resid_post.2"][0]).tolist()
    first, header, *rows = shown.out.splitlines()
    assert first.startswith("resid_post.2, balanced accuracy ")
    assert header.split() == ["token", "score"]
    assert [row.split()[0] for row in rows] == seen.str_tokens[0]
    assert [float(row.split()[1]) for row in rows] == pytest.approx(scores, abs=0.0051)
    assert "\x1b" not in shown.out

    drawn: list[list[Text]] = []
    monkeypatch.setattr(screen, "table", lambda rows, **_: drawn.extend(rows))
    call("probe", "show", "python-3m", out, text, "--device", "cpu")
    assert [{cell.style for cell in row} for row in drawn] == [{"cyan" if one > 0 else "yellow"} for one in scores]

    refused = call("probe", "show", "english-4m", out, "text", "--device", "cpu")
    assert refused.code == 1
    assert refused.err == (
        f"error: the probe {str(out)!r} was made for another model, whose weights differ; make one for this model.\n"
    )


def test_what_cannot_be_made(call: Call, files: tuple[Path, Path, Path], tmp_path: Path) -> None:
    _, positive, negative = files
    (tmp_path / "one").write_text("x = 1\n")
    out = tmp_path / "out"
    few = call("probe", "make", "python-3m", out, "--positive", positive, "--negative", tmp_path / "one")
    assert "error: 4 texts are positive, 1 negative" in few.err
    wrong = call("probe", "make", "python-3m", out, "--positive", positive, "--negative", negative, "--site", "z.0")
    assert "error: the site is 'z.0'" in wrong.err
    assert few.code == wrong.code == 1
    assert not out.exists()
    assert "there is no" in call("probe", "show", "python-3m", out, "text").err
