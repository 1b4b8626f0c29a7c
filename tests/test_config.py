"""Parsing and dumping settings, and the errors for invalid ones."""

from __future__ import annotations

import os
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

import numpy
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from glasshouse import ConfigError, Run, config, spec


@dataclass(frozen=True)
class Round(config.Settings):
    kind: ClassVar[str] = "round"
    radius: float = 1.0


@dataclass(frozen=True)
class Square(config.Settings):
    kind: ClassVar[str] = "square"
    side: int


@dataclass(frozen=True)
class Garden(config.Settings):
    shape: Round | Square
    name: str = "eden"
    beds: tuple[int, ...] = ()
    soil: Literal["clay", "sand"] = "clay"
    depth: float | None = None
    open: bool = True


def test_round_trip() -> None:
    table = {"shape": {"kind": "square", "side": 3}, "beds": [1, 2], "depth": 2}
    garden = config.parse(Garden, table)
    assert garden == Garden(Square(3), "eden", (1, 2), "clay", 2.0, True)
    assert config.parse(Garden, config.dump(garden)) == garden


def test_kind_as_a_string() -> None:
    assert config.parse(Garden, {"shape": "round"}).shape == Round()


def test_numpy_integers() -> None:
    assert config.parse(Garden, {"shape": {"kind": "square", "side": numpy.int64(3)}}).shape == Square(3)


def test_none_unsets_a_number_that_a_preset_sets() -> None:
    """TOML has no null, so that on a command line a word has to do."""
    table = config.override({"model": {}}, ["model.logit_softcap=none"])["model"]
    assert spec.preset("modern-small", **table).logit_softcap is None
    with pytest.raises(ConfigError, match="d_model is 'none', but it must be a whole number"):
        spec.preset("modern-small", d_model="none")


def test_constructor_checks_types() -> None:
    assert Garden(shape="round", beds=[1], depth=3) == Garden(Round(), beds=(1,), depth=3.0)
    with pytest.raises(ConfigError, match="name is 3, but it must be a string"):
        Garden(Round(), name=3)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"shape": "round", "nmae": "x"}, "nmae is not a setting of 'Garden'; did you mean name?"),
        ({"shape": {"kind": "round", "q": 1}}, "shape.q is not a setting of 'round'; it has radius."),
        ({"shape": "oval"}, "shape.kind is 'oval', but it must be one of 'round', 'square'."),
        ({"shape": {"side": 3}}, "shape.kind is None, but it must be one of 'round', 'square'."),
        ({"shape": "square"}, "shape (square) lacks side; set it."),
        ({}, "'Garden' lacks shape; set it."),
        ({"shape": "round", "beds": 3}, "beds is 3, but it must be a list."),
        ({"shape": "round", "beds": [1, "x"]}, "beds[1] is 'x', but it must be a whole number."),
        ({"shape": "round", "open": 1}, "open is 1, but it must be true or false."),
        ({"shape": {"kind": "square", "side": True}}, "shape.side is True, but it must be a whole number."),
        ({"shape": {"kind": "square", "side": 2.0}}, "shape.side is 2.0, but it must be a whole number."),
        ({"shape": "round", "soil": "peat"}, "soil is 'peat', but it must be one of 'clay', 'sand'."),
        ({"shape": "round", "depth": "deep"}, "depth is 'deep', but it must be a number."),
        (7, "the configuration is 7, but it must be a table of settings."),
    ],
)
def test_invalid_settings(table: object, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        config.parse(Garden, table)
    assert str(error.value) == message


def test_override_nested_tables() -> None:
    table = {"model": {"shape": "square"}}
    changed = config.override(table, ["model.shape.side=4", "name = 'x = y'", "path=a/b", "x.y.z=[1, 2]"])
    assert changed == {
        "model": {"shape": {"kind": "square", "side": 4}},
        "name": "x = y",
        "path": "a/b",
        "x": {"y": {"z": [1, 2]}},
    }
    assert table == {"model": {"shape": "square"}}


@pytest.mark.parametrize("setting", ["steps", "=3", "a..b=3", ""])
def test_invalid_override(setting: str) -> None:
    with pytest.raises(ConfigError, match="write it as key=value"):
        config.override({}, [setting])


def test_read_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"there is no file .*none\.toml"):
        config.read(tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_text("a = = 3")
    with pytest.raises(ConfigError, match=r"bad\.toml.* is not valid TOML"):
        config.read(tmp_path / "bad.toml")
    (tmp_path / "good.toml").write_text(config.to_toml({"a": {"b": 1.5, "c": ["ü"]}}), encoding="utf-8")
    assert config.read(tmp_path / "good.toml") == {"a": {"b": 1.5, "c": ["ü"]}}


@given(st.text() | st.builds("{}={}".format, st.text("abc. "), st.text("a1.,\"'[]{}=\n# -")))
@example("a.b = 1")
@example("a.b=[1, {c = 'x=y'}]")
@example("a =nan")
@example("a=1 2")
def test_any_text_is_a_setting_or_an_error(text: str) -> None:
    key, equals, value = text.partition("=")
    names = key.strip().split(".")
    if not equals or "" in names:
        with pytest.raises(ConfigError, match="write it as key=value"):
            config.override({}, [text])
        return
    found: object = config.override({}, [text])
    for name in names:
        assert isinstance(found, dict)
        assert list(found) == [name]
        found = found[name]
    try:
        expected = tomllib.loads(f"value = {value.strip()}")["value"]
    except tomllib.TOMLDecodeError:
        expected = value.strip()
    assert repr(found) == repr(expected)  # NaN is not equal to itself


@dataclass(frozen=True)
class Lists:
    names: tuple[str, ...] = ()
    maybe: tuple[str, ...] | None = None
    numbers: tuple[int, ...] = ()
    one: str = ""


@pytest.mark.parametrize(
    ("setting", "field", "value"),
    [
        ("names=a,b", "names", ("a", "b")),
        ("names=a, b ,c", "names", ("a", "b", "c")),
        ("names=1,2", "names", ("1", "2")),
        ("names=a", "names", ("a",)),
        ("names=", "names", ()),
        ("names=['a,b', 'c']", "names", ("a,b", "c")),
        ('names="a,b"', "names", ("a,b",)),  # a TOML string is one name
        ("maybe=a,b", "maybe", ("a", "b")),
        ("numbers=256,0", "numbers", (256, 0)),
        ("numbers=7", "numbers", "but it must be a list"),
        ("numbers=1,x", "numbers", r"numbers\[1\] is 'x', but it must be a whole number"),
        ("one=a,b", "one", "a,b"),
    ],
)
def test_lists_with_commas(setting: str, field: str, value: object) -> None:
    table = config.override({}, [setting])
    if isinstance(value, str) and field != "one":
        with pytest.raises(ConfigError, match=value):
            config.parse(Lists, table)
    else:
        assert getattr(config.parse(Lists, table), field) == value


def test_toml_string_is_not_split(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text('names = "a,b"\n')
    assert config.parse(Lists, config.read(tmp_path / "a.toml")).names == ("a,b",)


# A stranger's run folder.


DEEP = "a." * 32 + "a"
HOSTILE = {
    "digits": "[train]\nsteps = " + "1" * 5_000,
    "hexadecimal": "[train]\nsteps = 0x" + "f" * 100_000,  # Python converts it, and then cannot print it
    "one bit too many": "[train]\nsteps = 9223372036854775808",
    "dotted key": "a." * 12_000 + "a = 1",
    "dotted key with spaces and quotes": "a . 'b' . \"c\" . " * 3_000 + "a = 1",
    "dotted header": "[" + "a." * 50_000 + "a]",
    "dotted key in a table": "[train]\nlora = {" + DEEP + " = 1}",
    "brackets": "a = " + "[" * 100_000,
    "tables in tables": "a = " + "{a.b.c = " * 60 + "1" + "}" * 60,
    "arrays in arrays": "a = " + "[" * 33 + "]" * 33,
    "size": "a = '" + "x" * 2**20 + "'",
    "not UTF-8": b"a = '\xff'",
}


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_a_strangers_settings_are_bounded(text: str | bytes, tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError) as error:
        Run.load(path)
    assert str(error.value).startswith(f"{str(path)!r} is ")
    assert len(str(error.value)) < 500 + len(str(path))


def test_what_looks_deep_in_strings_comments_and_values_is_read(tmp_path: Path) -> None:
    path, dots = tmp_path / "a.toml", "." * 100
    lines = [f"# {dots}]", f"a = '{dots} = '", rf'b = "\"{dots}="', f'c = """\n{dots} = """', f"d = '''\n{dots}='''"]
    path.write_text("\n".join(lines))
    assert config.read(path) == {"a": f"{dots} = ", "b": f'"{dots}=', "c": f"{dots} = ", "d": f"{dots}="}
    path.write_text("a." * 31 + "a = 9223372036854775807")
    table = config.read(path)
    for _ in range(31):
        table = table["a"]
    assert table == {"a": 2**63 - 1}
    assert config.override({}, [f"path={dots}/x"]) == {"path": f"{dots}/x"}


@pytest.mark.parametrize("value", ["1" * 5_000, "0x" + "f" * 9_000, "[" * 5_000, "{" + DEEP + " = 1}"])
def test_a_setting_without_bounds_is_one_sentence(value: str) -> None:
    with pytest.raises(ConfigError, match="is not a value"):
        config.override({}, [f"train.steps={value}"])


def test_what_is_not_a_regular_file_is_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "run.toml")
    with pytest.raises(ConfigError, match="there is no file"):
        config.read(tmp_path / "run.toml")
