"""Types of request fields: each parses a JSON value within its bounds, and describes itself for OpenAPI."""

from __future__ import annotations

import json
import reprlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from glasshouse.config import JsonDict, did_you_mean
from glasshouse.serve.schema.errors import ApiError

Value = Any  # parsed: of the field's own type


def invalid(name: str, value: object, rule: str) -> ApiError:
    """Return the error of a value that breaks a rule."""
    return ApiError(f"{name} is {reprlib.repr(value)}, but it must be {rule}.", param=name, code="invalid_value")


@dataclass(frozen=True)
class Field(ABC):
    """A field of a request; null is the same as leaving it out."""

    required: bool = field(default=False, kw_only=True)
    default: Value = field(default=None, kw_only=True)

    @abstractmethod
    def parse(self, value: object, name: str) -> Value:
        """Return the checked value; raise ApiError."""

    @abstractmethod
    def schema(self) -> JsonDict:
        """Return the JSON schema of a value."""


@dataclass(frozen=True)
class Whole(Field):
    """A whole number from `low` to `high`.

    >>> Whole(1, 128).parse(3, "n")
    3
    >>> Whole(1, 128).parse(10**6, "n")
    Traceback (most recent call last):
    ...
    glasshouse.serve.schema.errors.ApiError: n is 1000000, but it must be a whole number from 1 to 128.
    """

    low: int
    high: int

    def parse(self, value: object, name: str) -> Value:
        if not isinstance(value, int) or isinstance(value, bool) or not self.low <= value <= self.high:
            raise invalid(name, value, f"a whole number from {self.low} to {self.high}")
        return value

    def schema(self) -> JsonDict:
        return {"type": "integer", "minimum": self.low, "maximum": self.high}


@dataclass(frozen=True)
class Real(Field):
    """A number from `low` to `high`."""

    low: float
    high: float

    def parse(self, value: object, name: str) -> Value:
        if not isinstance(value, int | float) or isinstance(value, bool) or not self.low <= value <= self.high:
            raise invalid(name, value, f"a number from {self.low:g} to {self.high:g}")  # NaN compares as false
        return float(value)

    def schema(self) -> JsonDict:
        return {"type": "number", "minimum": self.low, "maximum": self.high}


@dataclass(frozen=True)
class Flag(Field):
    """True or false."""

    default: bool = field(default=False, kw_only=True)

    def parse(self, value: object, name: str) -> Value:
        if not isinstance(value, bool):
            raise invalid(name, value, "true or false")
        return value

    def schema(self) -> JsonDict:
        return {"type": "boolean"}


@dataclass(frozen=True)
class Text(Field):
    """A string."""

    longest: int | None = None  # characters; the body limits the others
    shortest: int = 0

    def parse(self, value: object, name: str) -> Value:
        if not isinstance(value, str) or len(value) < self.shortest:
            raise invalid(name, value, "a string" + " that is not empty" * (self.shortest > 0))
        if self.longest is not None and len(value) > self.longest:
            raise invalid(name, value, f"a string of at most {self.longest} characters")
        try:
            value.encode()
        except UnicodeEncodeError:
            raise invalid(name, value, "valid Unicode, without lone surrogates") from None
        return value

    def schema(self) -> JsonDict:
        limits = {"minLength": self.shortest, "maxLength": self.longest}
        return {"type": "string"} | {name: limit for name, limit in limits.items() if limit}


@dataclass(frozen=True)
class Choice(Field):
    """One of a few strings."""

    choices: tuple[str, ...]

    def parse(self, value: object, name: str) -> Value:
        if value not in self.choices:
            raise invalid(name, value, f"one of {', '.join(self.choices)}")
        return value

    def schema(self) -> JsonDict:
        return {"type": "string", "enum": list(self.choices)}


@dataclass(frozen=True)
class Many(Field):
    """A list of `fewest` to `most` items."""

    item: Field
    most: int
    fewest: int = 0

    def parse(self, value: object, name: str) -> Value:
        if not isinstance(value, list) or not self.fewest <= len(value) <= self.most:
            size = f" of {len(value)}" if isinstance(value, list) else ""
            rule = f"a list of {self.fewest} to {self.most} items"
            raise (
                invalid(name, value, rule)
                if not size
                else ApiError(f"{name} is a list{size}, but it must be {rule}.", param=name, code="invalid_value")
            )
        return [self.item.parse(one, f"{name}[{index}]") for index, one in enumerate(value)]

    def schema(self) -> JsonDict:
        return {"type": "array", "items": self.item.schema(), "minItems": self.fewest, "maxItems": self.most}


@dataclass(frozen=True)
class Either(Field):
    """The first of several kinds that takes a value's JSON type; `noun` names them all."""

    kinds: tuple[Field, ...]
    noun: str

    def parse(self, value: object, name: str) -> Value:
        errors = []
        for kind in self.kinds:
            try:
                return kind.parse(value, name)
            except ApiError as error:
                errors.append(error)
        # Where several alternatives are lists, an error about an item is more specific than one about the list.
        deepest = max(errors, key=lambda error: len(error.param or ""))
        raise deepest if (deepest.param or "") != name else invalid(name, value, self.noun)

    def schema(self) -> JsonDict:
        return {"anyOf": [kind.schema() for kind in self.kinds]}


@dataclass(frozen=True)
class Biases(Field):
    """A bias from -100 to 100 for each of some token ids, which JSON has as strings."""

    most: int = 1024

    def parse(self, value: object, name: str) -> Value:
        if not isinstance(value, dict) or len(value) > self.most:
            raise invalid(name, value, f"an object of at most {self.most} numbers by token id")
        found = {}
        for key, bias in value.items():
            if not (key.isascii() and key.isdigit() and len(key) <= 10):
                raise invalid(f"{name}.{key[:20]}", key, "a token id")
            found[int(key)] = Real(-100, 100).parse(bias, f"{name}.{key}")
        return found

    def schema(self) -> JsonDict:
        return {
            "type": "object",
            "propertyNames": {"pattern": "^[0-9]{1,10}$"},
            "additionalProperties": Real(-100, 100).schema(),
            "maxProperties": self.most,
        }


@dataclass(frozen=True)
class ByName(Field):
    """Items by name, as many as `most`."""

    item: Field
    most: int
    noun: str  # what they are

    def parse(self, value: object, name: str) -> Value:
        if not isinstance(value, dict) or len(value) > self.most:
            raise invalid(name, value, f"an object of at most {self.most} {self.noun} by name")
        return {key: self.item.parse(one, f"{name}.{key[:40]}") for key, one in value.items()}

    def schema(self) -> JsonDict:
        return {"type": "object", "additionalProperties": self.item.schema(), "maxProperties": self.most}


@dataclass(frozen=True)
class JsonText(Field):
    """An object of any content, kept as the text of its JSON."""

    longest: int  # characters

    def parse(self, value: object, name: str) -> Value:
        if not isinstance(value, dict):
            raise invalid(name, value, "a JSON object")
        try:
            text = json.dumps(value)
        except RecursionError:
            raise ApiError(f"{name} is nested too deep; flatten it.", param=name, code="invalid_value") from None
        if len(text) > self.longest:
            raise invalid(name, value, f"at most {self.longest} characters of JSON")
        return text

    def schema(self) -> JsonDict:
        return {"type": "object"}


@dataclass(frozen=True)
class Table(Field):
    """An object with fields of its own.

    Fields in `ignored` are accepted without effect; a field in `refused` is an error, with the reason given there,
    unless its value is null, false or empty.
    """

    fields: Mapping[str, Field]
    ignored: Sequence[str] = ()
    refused: Mapping[str, str] = field(default_factory=dict)

    def parse(self, value: object, name: str) -> Value:
        where = f"{name}." if name else ""
        if not isinstance(value, dict):
            raise invalid(name or "the request", value, "a JSON object")
        for key, given in value.items():
            if key in self.refused and given:
                raise ApiError(f"{where}{key} is not supported: {self.refused[key]}", param=where + key)
            if key not in self.fields and key not in self.ignored and key not in self.refused:
                raise ApiError(
                    f"there is no parameter {reprlib.repr(where + key)}; {did_you_mean(key[:40], self.fields)}",
                    param=(where + key)[:80],
                    code="unknown_parameter",
                )
        found = {}
        for key, kind in self.fields.items():
            if value.get(key) is not None:
                found[key] = kind.parse(value[key], where + key)
            elif kind.required:
                raise ApiError(f"{where}{key} is missing; give it.", param=where + key, code="missing_parameter")
            else:
                found[key] = kind.default
        return found

    def schema(self) -> JsonDict:
        return {
            "type": "object",
            "properties": {name: kind.schema() for name, kind in self.fields.items()},
            "required": [name for name, kind in self.fields.items() if kind.required],
            "additionalProperties": False,
        }
