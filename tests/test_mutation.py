"""The mutation run draws faults in what the code does, and finds out whether tests notice."""

from __future__ import annotations

from pathlib import Path

import mutation
import pytest

SOURCE = '''"""A docstring of 1 < 2."""
from __future__ import annotations

__all__ = ["f"]
BATCH_BYTES = 7


def f(a: int = 3, *, b: list[int] | None = None) -> int | None:
    """Return 1."""
    if a < 4 and b:
        raise ValueError(f"{a + 1} is {2 * a}")
    b.append(a)
    return g("é", a) - 5
'''


def test_each_kind_of_fault_is_drawn_and_nothing_but_behaviour() -> None:
    drawn = {(one.line, one.before, one.after) for one in mutation.mutants_of("f.py", SOURCE)}
    assert drawn == {
        (8, "3", "4"),
        (10, "a < 4 and b", "(not (a < 4 and b))"),
        (10, "a < 4 and b", "(a < 4 or b)"),
        (10, "a < 4", "(a <= 4)"),
        (10, "4", "5"),
        (12, "b.append(a)", "pass"),
        (13, 'g("é", a) - 5', "None"),
        (13, 'g("é", a) - 5', "(g('é', a) + 5)"),
        (13, 'g("é", a)', "(g(a, 'é'))"),
        (13, "5", "6"),
    }


def test_a_mutant_replaces_its_own_text_alone() -> None:
    for one in mutation.mutants_of("f.py", SOURCE):
        assert SOURCE[one.start : one.end] == one.before
        changed = one.apply(SOURCE).splitlines()
        lines = enumerate(zip(changed, SOURCE.splitlines(), strict=True), 1)
        different = [number for number, (ours, theirs) in lines if ours != theirs]
        assert different == [one.line]
        assert mutation.is_other_program(one, SOURCE)


def test_the_same_seed_draws_the_same_and_a_larger_count_more() -> None:
    few, more = mutation.draw(1, 3, ("store.py",)), mutation.draw(1, 6, ("store.py",))
    assert more[:3] == few
    assert mutation.draw(2, 6, ("store.py",)) != more


@pytest.mark.parametrize(
    ("file", "tests"),
    [
        ("store.py", [["src/glasshouse/store.py", "tests/test_store.py"]]),
        (
            "layers/residual.py",
            [["src/glasshouse/layers/residual.py", "tests/layers/test_residual.py"], ["tests/layers"]],
        ),
        ("data/shards.py", [["src/glasshouse/data/shards.py"], ["tests/data"]]),
        (
            "layers/cache/view.py",
            [["src/glasshouse/layers/cache/view.py", "tests/layers/test_cache.py"], ["tests/layers"]],
        ),
    ],
)
def test_mirrored_tests(file: str, tests: list[list[str]]) -> None:
    assert mutation.tests_for(file) == tests


@pytest.mark.long
@pytest.mark.slow
def test_a_fault_is_killed_where_a_test_notices_and_survives_where_none_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / mutation.SOURCE
    package.mkdir(parents=True)
    (tmp_path / "tests").mkdir()
    source = "def f(a):\n    return a < 4\n"
    (package / "__init__.py").write_text("")
    (package / "store.py").write_text(source)
    (tmp_path / "tests" / "test_store.py").write_text(
        "from glasshouse.store import f\n\n\ndef test_f():\n    assert f(3) and not f(5)\n"
    )
    monkeypatch.setattr(mutation, "ROOT", tmp_path)
    green: dict[str, bool] = {}
    results = {one.after: mutation.judge(one, tmp_path, 120, green) for one in mutation.draw(0, 99, ("store.py",))}
    assert results == {"None": "killed", "(a <= 4)": "survived", "5": "survived"}
    assert (package / "store.py").read_text() == source
