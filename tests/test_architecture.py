"""docs/architecture.md: its call paths are the real ones, its picture shows every package; no import circles."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

import call_path
import pytest
import source
import structure
import torch
from call_path import Call, CallPath
from test_imports import LAYERS, ROOT

import glasshouse as gh

LONGEST = 600  # lines of a file without a reason
REPEATED = 6  # lines


def compare(made: list[Call], path: CallPath) -> None:
    """Hold a documented path against the calls: in that order, no file more than twice, and no other file entered."""
    first = {call: number for number, call in reversed(list(enumerate(made)))}
    for step in path.steps:
        assert step in first, f"{step} is documented, but was not called"
    order = sorted(path.steps, key=first.__getitem__)
    assert [str(step) for step in path.steps] == [str(step) for step in order], "the order of the first calls"
    most, times = Counter(step.file for step in path.steps).most_common(1)[0]
    assert times <= 2, f"{most} is entered {times} times"
    entered = {call.file for call in made} - {step.file for step in path.steps}
    assert entered == path.besides, "files that were entered and are not steps of the path"


@pytest.mark.slow
def test_settings_and_training_step(tmp_path: Path) -> None:
    text = tmp_path / "hamlet.txt"
    text.write_text("to be or not to be, that is the question. " * 50)
    data = {"path": str(text), "seq_len": 16, "vocab_size": 270}
    # No validation and no checkpoint between the first step and the last.
    train = {
        "steps": 3,
        "batch_tokens": 64,
        "out": str(tmp_path / "run"),
        "eval_every": 3,
        "save_every": 3,
        "workers": 0,
    }
    run = gh.Run.from_dict({"model": {"preset": "tiny-decoder"}, "data": data, "train": train})
    path = call_path.documented("A training step")
    with call_path.calls() as made:
        gh.train(run, progress=False)
    begins = [number for number, call in enumerate(made) if call == path.steps[0]]
    compare(made[begins[1] : begins[2]], path)
    before = [call for call in made[: begins[0]] if call.file.startswith("training/")]
    compare(before, call_path.documented("A run's settings"))


def test_request() -> None:
    model = gh.build(gh.preset("tiny-decoder")).eval()
    engine = gh.Engine(model, slots=2, max_len=16)
    with call_path.calls() as made:
        request = engine.submit([1, 2, 3], max_new_tokens=3)
        engine.run()
        request.completions()
    compare(made, call_path.documented("A request"))


def test_recording() -> None:
    model = gh.build(gh.preset("tiny-decoder")).eval()
    record = gh.record  # imported before, not on the way
    with call_path.calls() as made:
        with record(model, "pattern.1", "resid_post.*") as seen:
            model(torch.tensor([[1, 2, 3]]))
        assert seen["pattern.1"].shape[-1] == 3
    compare(made, call_path.documented("A recording"))


def test_comparison_fails_for_a_wrong_order_and_for_a_file_left_out() -> None:
    steps = [Call("a.py", "f"), Call("b.py", "g")]
    compare(steps, CallPath(steps))
    with pytest.raises(AssertionError, match="order"):
        compare(steps, CallPath(steps[::-1]))
    with pytest.raises(AssertionError, match="not steps"):
        compare([*steps, Call("c.py", "h")], CallPath(steps))
    with pytest.raises(AssertionError, match=r"b\.py is entered 3 times"):
        compare(
            [*steps, *(Call("b.py", name) for name in "hi")], CallPath([*steps, Call("b.py", "h"), Call("b.py", "i")])
        )


def test_picture_shows_every_package() -> None:
    picture = (call_path.DOCUMENT.parent / "pictures" / "packages.svg").read_text()
    for package in (package for layer in LAYERS for package in layer if package != "__main__"):
        assert f">{package}<" in picture, f"{package} is not in the picture"


def test_long_files_say_why() -> None:
    for path in ROOT.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        if (count := len(text.splitlines())) > LONGEST:
            first = next((line for line in text.splitlines() if line.startswith("#")), "")
            assert "lines" in first, f"{path} has {count} lines; its first comment must say why"


def test_no_import_circles() -> None:
    """Inside a package, and for the type checker, either."""
    graph = structure.import_graph(structure.modules(ROOT.parent))
    assert len(graph) > 300
    assert structure.circle(graph) == []


def test_nothing_is_written_twice() -> None:
    """No six lines of code stand in two places; imports, parameters and arguments do not count."""
    found: dict[tuple[str, ...], str] = {}
    for path in sorted([*ROOT.rglob("*.py"), *ROOT.rglob("*.js")]):
        lines = [(n, line.strip()) for n, line in enumerate(path.read_text().splitlines(), 1) if line.strip()]
        code = [
            (n, line)
            for n, line in lines
            if not line.startswith(("import ", "from ", ")", "]", "}", "@", "def ", "/**", "* @", "*/"))
            and line[-1] not in ",([{"
        ]
        for start in range(len(code) - REPEATED + 1):
            window = tuple(line for _, line in code[start : start + REPEATED])
            here = f"{path.relative_to(ROOT)}:{code[start][0]}"
            assert window not in found, f"{here} repeats {found[window]}:\n" + "\n".join(window)
            found[window] = here


def test_no_constant_is_set_twice() -> None:
    """The second would replace the first where both are read, as when two files become one."""
    for path in ROOT.rglob("*.py"):
        targets = (
            target for node in source.parse(path).body if isinstance(node, ast.Assign) for target in node.targets
        )
        names = Counter(name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name))
        twice = [name for name, times in names.items() if times > 1]
        assert not twice, f"{path} sets {twice[0]} {names[twice[0]]} times"
