"""Extension points for other packages: kinds of layers and settings by `register`, and entry points.

An entry point is imported when a name is met that is unknown without it, and never because a file asks for a module.
"""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from glasshouse.errors import InputError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

T = TypeVar("T")
K = TypeVar("K", bound="type[Kind]")
Builder = Callable[..., Any]

KINDS = "glasshouse.kinds"  # groups of entry points: modules that register kinds,
FAMILIES = "glasshouse.families"  # a Family by its model_type,
RECIPES = "glasshouse.recipes"  # the path of a TOML file by the recipe's name,
VIEWS = "glasshouse.views"  # a View by its name


class Kind:
    """A choice in the settings, by name. A direct subclass, such as `spec.Position`, is the sort of its kinds."""

    kind: ClassVar[str]  # the name in TOML
    kinds: ClassVar[dict[str, type[Kind]]]  # of its sort, by name
    build_arguments: ClassVar[str] = ""  # what the function that builds a kind is called with; "": nothing is built

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if Kind in cls.__bases__:
            cls.kinds = {}


_BUILDERS: dict[type[Kind], Builder] = {}


def register(kind: K, build: Builder | None = None) -> K:
    """Add a kind: a frozen dataclass with the settings, and the function or module class that is built from them.

    The dataclass derives from `gh.spec.Attention`, `Position`, `FeedForward` or `Norm`, from `gh.training.Optimizer`,
    `Schedule` or `Tracker`, or from an `Objective`; schedules and objectives need no `build`. The kind is then known
    in specs, in TOML, and to `gh.load`. Run again in a notebook, the call replaces the kind.

    >>> from dataclasses import dataclass
    >>> import torch, glasshouse as gh
    >>> @dataclass(frozen=True)
    ... class Mish(gh.spec.FeedForward):
    ...     kind = "mish"
    >>> from glasshouse.layers.feedforward import FeedForward
    >>> _ = gh.register(Mish, lambda s: FeedForward(s, torch.nn.Mish()))
    >>> gh.build(gh.preset("tiny-decoder", feedforward="mish")).stack.blocks[0].feedforward.layer.activation
    Mish()
    >>> del gh.spec.FeedForward.kinds["mish"]  # forget it
    """
    _check(kind)
    if build is None and kind.build_arguments and not _inherited(kind):
        raise InputError(
            f"{kind.__name__} is registered without build; give the function that builds it from "
            f"{kind.build_arguments}."
        )
    if build is not None and not callable(build):
        raise InputError(f"build is {build!r}, but it must be a function of {kind.build_arguments}.")
    add(kind)
    if build is not None:
        _BUILDERS[kind] = build
    return kind


def _check(kind: Any) -> None:  # noqa: ANN401 - whatever was given
    """Raise for something that cannot be a kind, or whose name another has."""
    if not isinstance(kind, type) or not issubclass(kind, Kind) or not dataclasses.is_dataclass(kind):
        raise InputError(
            f"{kind!r} cannot be registered: it must be a dataclass that derives from gh.spec.Attention, Position, "
            "FeedForward or Norm, from gh.training.Optimizer, Schedule or Tracker, or from an Objective."
        )
    if not isinstance(name := vars(kind).get("kind"), str) or not name.isidentifier():
        raise InputError(f"the kind of {kind.__name__} is {name!r}, but it must be a name of its own, as in TOML.")
    if any(field.name == "kind" for field in dataclasses.fields(kind)):
        raise InputError(f'kind is a field of {kind.__name__}; write kind: ClassVar[str] = "{name}" instead.')
    known = kind.kinds.get(name)
    if known is not None and _address(known) != _address(kind):
        raise InputError(
            f"{_address(kind)} is named {name!r}, which {_address(known)} already is; choose another name."
        )


def _address(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def add(*kinds: type[Kind]) -> None:
    """Make kinds known by their names."""
    for kind in kinds:
        kind.kinds[kind.kind] = kind


def is_sort(target: object) -> bool:
    """Whether a type stands for all kinds of one sort."""
    return isinstance(target, type) and Kind in target.__bases__


def find_kind(sort: type[Kind], name: object) -> type[Kind] | None:
    """Return a kind by name, from the entry points of installed packages if it is unknown; None if there is none."""
    if not isinstance(name, str):
        return None
    if name not in sort.kinds:
        load_entry_points(KINDS, object)
    return sort.kinds.get(name)


def is_registered(kind: type[Kind]) -> bool:
    """Whether settings may have this kind: by itself, or as it was before a notebook's cell ran again."""
    return kind in kind.kinds.values() or kind in _BUILDERS


def _inherited(kind: type[Kind]) -> bool:
    return any(is_registered(base) for base in kind.__mro__[1:] if issubclass(base, Kind) and hasattr(base, "kinds"))


def has_builder(choice: Kind) -> bool:
    """Whether a kind, or one that it derives from, was registered with what is built for it."""
    return any(base in _BUILDERS for base in type(choice).__mro__)


def build(choice: Kind, wanted: type[T], *arguments: object) -> T | None:
    """Return what was registered for a kind, or for the nearest that it derives from; None for our own."""
    made = next((_BUILDERS[base] for base in type(choice).__mro__ if base in _BUILDERS), None)
    if made is None:
        return None
    result = made(*arguments)
    if not isinstance(result, wanted):
        raise InputError(
            f"{choice.kind!r} was built as {type(result).__name__}, but it must be a {wanted.__module__}."
            f"{wanted.__name__}."
        )
    return result


# Entry points -----------------------------------------------------------------------------------------------


@functools.cache
def entry_points(group: str) -> dict[str, EntryPoint]:
    """Return the entry points that installed packages declare in a group, by name; nothing is imported."""
    from importlib import metadata  # costs milliseconds, which most commands need not pay

    return {entry.name: entry for entry in metadata.entry_points(group=group)}


def load_entry_point(group: str, name: str, wanted: type[T]) -> T | None:
    """Import what an entry point names; None if there is none; InputError, which names the package, if that fails."""
    if (entry := entry_points(group).get(name)) is None:
        return None
    package = f"the package {entry.value if entry.dist is None else entry.dist.name}"
    try:
        found = entry.load()
    except Exception as error:
        raise InputError(
            f"{package} could not be imported ({type(error).__name__}: {error}), so {name!r} of {group} is missing; "
            "repair or uninstall it."
        ) from error
    if not isinstance(found, wanted):
        raise InputError(
            f"{package} declares {name!r} in {group}, which is a {type(found).__name__}, but it must be a "
            f"{wanted.__name__}; repair or uninstall it."
        )
    return found


@functools.cache
def load_entry_points(group: str, wanted: type[T]) -> dict[str, T]:
    """Import a whole group; a package that fails, and that may not be needed, is a warning."""
    found = {}
    for name in entry_points(group):
        try:
            if (one := load_entry_point(group, name, wanted)) is not None:
                found[name] = one
        except InputError as error:
            warnings.warn(str(error), stacklevel=2)
    return found
