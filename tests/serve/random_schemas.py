"""Random JSON schemas of the keywords that people use, and schemas that are made to cost much."""

from __future__ import annotations

import random
from typing import Any

Schema = dict[str, Any]

PATTERNS = ["^[a-c]{1,6}$", "^(to be|or not)$", r"^\d{3}-\d{2}$", "^x+y?$", "^[^0-9]{2}$"]
FORMATS = ["date", "time", "date-time", "uuid", "ipv4", "email"]


def random_schema(rng: random.Random, depth: int = 3) -> Schema:
    """Return a schema; nested at most `depth` deep, recursion by reference aside."""
    schema = _value(rng, depth)
    if rng.random() < 0.15:
        node = {
            "type": "object",
            "properties": {"value": _value(rng, 0), "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}},
            "required": ["value", "next"],
            "additionalProperties": False,
        }
        return {"$defs": {"node": node}, "type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 2}
    return schema


def _value(rng: random.Random, depth: int) -> Schema:
    leaves = [_string, _number, _integer, _enum, _boolean]
    makers = [*leaves, _object, _object, _array, _any_of] if depth else leaves
    return rng.choice(makers)(rng, depth - 1)


def _object(rng: random.Random, depth: int) -> Schema:
    names = rng.sample(["a", "name", "é", 'quo"te', "long name", "x1", "$id"], rng.randint(0, 4))
    schema: Schema = {"type": "object", "properties": {name: _value(rng, depth) for name in names}}
    schema["required"] = [name for name in names if rng.random() < 0.7]
    if rng.random() < 0.8:
        schema["additionalProperties"] = rng.choice([False, False, _value(rng, 0)])
    return schema


def _array(rng: random.Random, depth: int) -> Schema:
    low = rng.randint(0, 2)
    schema: Schema = {"type": "array", "minItems": low, "maxItems": low + rng.randint(0, 3)}
    if rng.random() < 0.25:
        return {"type": "array", "prefixItems": [_value(rng, depth) for _ in range(2)], "items": False, "minItems": 2}
    return schema | {"items": _value(rng, depth)}


def _any_of(rng: random.Random, depth: int) -> Schema:
    return {"anyOf": [_value(rng, depth) for _ in range(rng.randint(1, 3))]}


def _string(rng: random.Random, depth: int) -> Schema:
    kind = rng.randrange(4)
    if kind == 0:
        return {"type": "string", "pattern": rng.choice(PATTERNS)}
    if kind == 1:
        return {"type": "string", "format": rng.choice(FORMATS)}
    low = rng.randint(0, 3)
    return {"type": "string", "minLength": low, "maxLength": low + rng.randint(0, 8)}


def _number(rng: random.Random, depth: int) -> Schema:
    return {"type": "number", "minimum": -rng.randint(0, 50), "exclusiveMaximum": rng.randint(1, 50) / 4}


def _integer(rng: random.Random, depth: int) -> Schema:
    if rng.random() < 0.3:
        return {"type": "integer", "minimum": 0, "maximum": 100, "multipleOf": rng.randint(2, 7)}
    low = rng.randint(-1000, 1000)
    return {"type": ["integer", "null"], "minimum": low, "maximum": low + rng.randint(0, 500)}


def _enum(rng: random.Random, depth: int) -> Schema:
    values: list[Any] = ["a", "to be", 1, 2.5, None, True, {"k": [1]}, "é\n"]
    return {"enum": rng.sample(values, rng.randint(1, 4))} if rng.random() < 0.7 else {"const": rng.choice(values)}


def _boolean(rng: random.Random, depth: int) -> Schema:
    return {"type": "boolean"}


def _nested(depth: int) -> Schema:
    schema: Schema = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


def _doubled(key: str, count: int) -> Schema:
    """Return a schema of exponential size if references are expanded."""
    definitions: Schema = {"d0": {"type": "string"}}
    for number in range(1, count):
        before = {"$ref": f"#/$defs/d{number - 1}"}
        definitions[f"d{number}"] = {key: [before, before]}
    return {"$defs": definitions, "$ref": f"#/$defs/d{count - 1}"}


def _choices(count: int) -> Schema:
    """Return a conjunction of disjunctions, exponential in normal form."""
    pairs = ([{"type": "object", "properties": {f"{name}{i}": {}}} for name in "ab"] for i in range(count))
    return {"allOf": [{"anyOf": pair} for pair in pairs]}


HOSTILE: dict[str, Schema] = {
    "nested 200 deep": _nested(200),
    "2^60 alternatives": _doubled("anyOf", 60),
    "2^60 conjunctions": _doubled("allOf", 60),
    "2^10 normal form": _choices(10),
    "2^40 normal form": _choices(40),
    "nested quantifiers": {"type": "string", "pattern": "^(((a+)+)+)+$"},
    "nested counts": {"type": "string", "pattern": "^((a{1,100}){1,100}){1,100}$"},
    "2^200 states": {"type": "string", "pattern": "^[ab]*a[ab]{200}$"},
    "intersected expressions": {
        "allOf": [{"type": "string", "pattern": f"^[ab]*a[ab]{{{count}}}$"} for count in range(10, 40)]
    },
    "many classes": {
        "type": "string",
        "pattern": "^" + "".join(f"(\\w{{0,{count}}}|\\d)" for count in range(1, 200)) + "$",
    },
    "a billion characters": {"type": "string", "minLength": 10**6, "maxLength": 10**9},
    "a billion items": {"type": "array", "items": {"type": "integer"}, "minItems": 10**6, "maxItems": 10**9},
    "1,800 optional keys": {"type": "object", "properties": {f"p{number}": {} for number in range(1800)}},
    "5,000 values": {"enum": [f"v{number}" for number in range(5000)]},
    "large multiples": {"type": "integer", "multipleOf": 999_999_937},
    "only itself": {"$ref": "#"},
    "another machine": {"$ref": "http://127.0.0.1:9/schema.json"},
    "a file": {"$ref": "file:///etc/passwd"},
}
