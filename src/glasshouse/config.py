"""Settings: TOML and `key=value` text to and from frozen dataclasses.

The type of a field is what it accepts, a union of dataclasses is selected by `kind`, and an unknown name is an error
that suggests the nearest one.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import math
import numbers
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, ClassVar, Literal, Self, TypeVar, Union, get_args, get_origin, get_type_hints

import tomli_w

from glasshouse import hints, registry
from glasshouse.errors import ConfigError

T = TypeVar("T")
LISTED = 24  # names, at most, where a name is unknown

JsonDict = dict[str, Any]

MAX_TOML_BYTES, MAX_TOML_DEPTH = 2**20, 32
# Each alternative matches to the end of the text if it is not closed, so that a scan takes linear time.
_STRINGS_AND_COMMENTS = re.compile(
    r'''"""(?:\\.|[^\\])*?(?:"""|\Z)|'{3}.*?(?:'{3}|\Z)|"(?:\\.|[^"\\\n])*+"?|'[^'\n]*+'?|#[^\n]*+''', re.DOTALL
)


def require(ok: bool, field: str, value: object, rule: str) -> None:
    """Raise an error that names the field, its value and the rule, unless `ok`."""
    if not ok:
        raise ConfigError(f"{field} is {value!r}, but it must be {rule}.")


def require_positive(choice: Settings, *fields: str) -> None:
    """Raise ConfigError for a number that is zero, negative, infinite or NaN."""
    for field in fields:
        value = getattr(choice, field)
        require(value > 0 and math.isfinite(value), f"{choice.kind}.{field}", value, "above 0")


class Settings:
    """Base class of frozen dataclasses that check their types, and `check`, on construction."""

    kind: ClassVar[str]

    def __post_init__(self) -> None:
        own: type = type(self)
        for name, hint in _hints(own).items():
            object.__setattr__(self, name, _parse(hint, getattr(self, name), name))
        self.check()

    def check(self) -> None:
        """Raise for invalid values of the right type."""

    def __deepcopy__(self, memo: object) -> Self:
        return self  # it is frozen, and modules that are copied for inference hold many


@functools.cache
def _hints(settings: type) -> dict[str, Any]:
    hints = get_type_hints(settings)
    return {field.name: hints[field.name] for field in dataclasses.fields(settings)}


def read(path: str | Path) -> JsonDict:
    """Read a TOML file into nested dictionaries; it may be untrusted, so size, depth and numbers are bounded."""
    path = Path(path)
    if not path.is_file():
        raise ConfigError(f"there is no file {str(path)!r}; give the path of a TOML file.")
    with path.open("rb") as file:
        data = file.read(MAX_TOML_BYTES + 1)
    if len(data) > MAX_TOML_BYTES:
        raise ConfigError(
            f"{str(path)!r} is larger than {MAX_TOML_BYTES:,} bytes, so it holds no settings; shorten it."
        )
    try:
        return _loads(data.decode("utf-8").replace("\r\n", "\n"))
    except (ValueError, RecursionError) as error:  # ValueError: invalid TOML or UTF-8, or too many digits
        raise ConfigError(f"{str(path)!r} is not valid TOML: {error}.") from None


def _loads(text: str) -> JsonDict:
    """Parse TOML; raise ValueError for keys and tables nested too deeply, and integers above TOML's 64 bits."""
    parts = re.split(r"([\n=,{}\[\]])", _STRINGS_AND_COMMENTS.sub("s", text))
    for name, mark in zip(parts[::2], parts[1::2], strict=False):
        if mark in "=]" and name.count(".") >= MAX_TOML_DEPTH:  # tomllib takes quadratic time and memory
            raise ValueError(f"a key has more than {MAX_TOML_DEPTH} parts")
    table = tomllib.loads(text)
    _check_values(table, "", 0)
    return table


def _check_values(value: object, where: str, depth: int) -> None:
    if depth > MAX_TOML_DEPTH:
        raise ValueError(f"a value is nested more than {MAX_TOML_DEPTH} deep")
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise ValueError(f"{where} is a whole number of more than 64 bits")
    if isinstance(value, dict):
        for key, inner in value.items():
            _check_values(inner, f"{where}.{key}" if where else key, depth + 1)
    elif isinstance(value, list):
        for inner in value:
            _check_values(inner, where, depth + 1)


def to_toml(table: Mapping[str, Any]) -> str:
    """Return nested dictionaries as TOML text.

    >>> print(to_toml({"d_model": 64, "position": {"kind": "rotary", "theta": 10000.0}}))
    d_model = 64
    <BLANKLINE>
    [position]
    kind = "rotary"
    theta = 10000.0
    <BLANKLINE>
    """
    return tomli_w.dumps(table)


def override(table: Mapping[str, Any], settings: Iterable[str]) -> JsonDict:
    """Return the table with `key=value` settings applied; dots in a key reach into nested tables.

    A value is parsed as TOML if possible, and else is a bare string; for a list, the commas of a bare string
    separate the items.

    >>> override({"model": {"d_model": 64}}, ["model.d_model=128", "model.position=alibi"])
    {'model': {'d_model': 128, 'position': 'alibi'}}
    """
    result = _copy(table)
    for setting in settings:
        key, equals, text = setting.partition("=")
        names = key.strip().split(".")
        if not equals or not all(names):
            raise ConfigError(f"{setting!r} is not a setting; write it as key=value, for example d_model=128.")
        inner = result
        for name in names[:-1]:
            below = inner.get(name)
            if isinstance(below, str):  # the short form of a choice: position = "rotary"
                below = {"kind": below}
            inner[name] = below = below if isinstance(below, dict) else {}
            inner = below
        inner[names[-1]] = _value(text.strip())
    return result


def _copy(table: Mapping[str, Any]) -> JsonDict:
    return {key: _copy(value) if isinstance(value, Mapping) else value for key, value in table.items()}


class _Bare(str):
    """A value without quotes, unlike a TOML string."""


def _value(text: str) -> object:
    try:
        return _loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return _Bare(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{text!r} is not a value: {error}; shorten it.") from None


def dump(settings: Any) -> JsonDict:  # noqa: ANN401 - any dataclass
    """Convert a dataclass to nested dictionaries, the inverse of `parse`; fields that are None are left out.

    So are fields with the metadata `omit_default` that have their default: added to a dataclass after files were
    written, they change neither those files nor their fingerprints.

    >>> from glasshouse.spec import Rotary
    >>> dump(Rotary(theta=500_000.0))
    {'kind': 'rotary', 'theta': 500000.0, 'layout': 'halves', 'scaling': {'kind': 'none'}}
    """
    table: JsonDict = {"kind": settings.kind} if is_choice(type(settings)) else {}
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if field.metadata.get("omit_default") and value == field.default:
            continue
        if dataclasses.is_dataclass(value):
            table[field.name] = dump(value)
        elif isinstance(value, tuple):
            table[field.name] = [dump(one) if dataclasses.is_dataclass(one) else one for one in value]
        elif value is not None:
            table[field.name] = value
    return table


def flat(table: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the settings of nested tables by their names with dots.

    >>> dict(flat({"train": {"steps": 5, "optimizer": {"lr": 0.1}}}))
    {'train.steps': 5, 'train.optimizer.lr': 0.1}
    """
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{path}{key}.")
        else:
            yield f"{path}{key}", value


def is_choice(settings: Any) -> bool:  # noqa: ANN401 - any dataclass
    """Whether `kind` is the tag of a dataclass, and not one of its fields."""
    return hasattr(settings, "kind") and "kind" not in (field.name for field in dataclasses.fields(settings))


def parse(target: type[T], value: object, where: str = "") -> T:
    """Build a `target` (a dataclass, or a union of dataclasses selected by `kind`) from plain values.

    >>> from glasshouse.spec import Rotary
    >>> parse(Rotary, {"theta": 500_000})
    Rotary(theta=500000.0, layout='halves', scaling=NoScaling(), fraction=1.0, local_theta=None)
    >>> parse(Rotary, {"thetta": 500_000})
    Traceback (most recent call last):
    ...
    glasshouse.errors.ConfigError: thetta is not a setting of 'rotary'; did you mean theta?
    """
    result: T = _parse(target, value, where)
    return result


def _parse(target: Any, value: Any, where: str) -> Any:  # noqa: ANN401 - types in, values out
    origin = get_origin(target)
    if origin in (Union, UnionType):
        return _parse_union(get_args(target), value, where)
    if origin is Literal:
        if value not in get_args(target):
            if isinstance(value, str) and hints.DTYPES.get(value) in get_args(target):
                raise ConfigError(f"{where} is {value!r}; {hints.renamed(value, hints.DTYPES[value])}")
            raise ConfigError(f"{where} is {value!r}, but it must be one of {_listed(get_args(target))}.")
        return value
    if origin is tuple:
        item = get_args(target)[0]
        if isinstance(value, _Bare):
            parts = [part.strip() for part in value.split(",")] if value else []
            value = parts if item is str else list(map(_value, parts))
        elif item is str and isinstance(value, str):  # a single string for a list
            value = [value]
        if not isinstance(value, list | tuple):
            raise ConfigError(f"{where} is {value!r}, but it must be a list.")
        return tuple(_parse(item, part, f"{where}[{i}]") for i, part in enumerate(value))
    if registry.is_sort(origin or target):  # a generic one has an origin
        return _parse_kind(origin or target, value, where)
    if dataclasses.is_dataclass(target):
        return _parse_dataclass(target, value, where)
    return _parse_plain(target, value, where)


def _parse_plain(target: type, value: object, where: str) -> object:
    if target in (int, float) and isinstance(value, numbers.Integral) and not isinstance(value, bool):
        return target(value)  # numpy integers too
    if isinstance(value, target) and (target is bool or not isinstance(value, bool)):
        return value
    noun = {int: "a whole number", float: "a number", bool: "true or false", str: "a string"}[target]
    raise ConfigError(f"{where} is {value!r}, but it must be {noun}.")


def _parse_union(options: tuple[Any, ...], value: object, where: str) -> object:
    optional = NoneType in options
    options = tuple(option for option in options if option is not NoneType)
    unset = (None, "none") if {*options} <= {int, float, bool} else (None,)  # TOML has no null
    if optional and value in unset:
        return None
    if len(options) == 1:
        return _parse(options[0], value, where)
    if isinstance(value, options):
        return value
    if isinstance(value, str):
        value = {"kind": value}
    kinds = {option.kind: option for option in options}
    kind = value.get("kind") if isinstance(value, Mapping) else value
    if not isinstance(kind, str) or kind not in kinds:
        field = f"{where}.kind" if where else "kind"
        raise ConfigError(f"{field} is {kind!r}, but it must be one of {_listed(kinds)}.")
    return _parse_dataclass(kinds[kind], value, where)


def _parse_kind(sort: type[registry.Kind], value: object, where: str) -> object:
    """Parse a choice among the kinds of a sort: ours, and those that other packages register."""
    if isinstance(value, sort):
        if not registry.is_registered(type(value)):
            name = type(value).__name__
            raise ConfigError(f"{where} is {value!r}, which is not registered; call gh.register({name}, ...) first.")
        return value
    if isinstance(value, str):
        value = {"kind": value}
    given = value.get("kind") if isinstance(value, Mapping) else value
    if (kind := registry.find_kind(sort, given)) is None:
        field = f"{where}.kind" if where else "kind"
        raise ConfigError(
            f"{field} is {given!r}, but it must be one of {_listed(sort.kinds)}, or be registered by a package that "
            "is installed or imported."
        )
    return _parse_dataclass(kind, value, where)


def _parse_dataclass(target: Any, value: object, where: str) -> object:  # noqa: ANN401 - any dataclass
    if isinstance(value, target):
        return value
    if is_choice(target) and isinstance(value, str):
        value = {"kind": value}
    if not isinstance(value, Mapping):
        raise ConfigError(f"{where or 'the configuration'} is {value!r}, but it must be a table of settings.")
    types = _hints(target)
    fields = {field.name: field for field in dataclasses.fields(target)}
    named = target.kind if is_choice(target) else target.__name__
    if is_choice(target) and value.get("kind", named) != named:
        field = f"{where}.kind" if where else "kind"
        raise ConfigError(f"{field} is {value['kind']!r}, but it must be {named!r}.")
    given = {}
    for key, part in value.items():
        path = f"{where}.{key}" if where else key
        if key in fields:
            given[key] = _parse(types[key], part, path)
        elif key != "kind" or not is_choice(target):
            table = hints.RUN if where.startswith(("train", "data")) else hints.SPEC
            if ours := table.get(key):
                raise ConfigError(hints.renamed(path, ours))
            raise ConfigError(f"{path} is not a setting of {named!r}; {did_you_mean(key, fields)}")
    required = (f.name for f in fields.values() if f.default is f.default_factory is dataclasses.MISSING)
    missing = [name for name in required if name not in given]
    if missing:
        name = f"{where} ({named})" if where else repr(named)
        raise ConfigError(f"{name} lacks {', '.join(missing)}; set it.")
    return target(**given)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Suggest the nearest known name, or list them, up to so many.

    >>> did_you_mean("colour", ["size", "depth"]), did_you_mean("dept", ["size", "depth"])
    ('it has size, depth.', 'did you mean depth?')
    """
    known = list(known)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    more = f" and {len(known) - LISTED} more" * (len(known) > LISTED)
    return f"did you mean {close[0]}?" if close else f"it has {', '.join(known[:LISTED]) or 'none'}{more}."


def _listed(values: Iterable[object]) -> str:
    return ", ".join(repr(value) for value in values)
