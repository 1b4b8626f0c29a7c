"""Every flag, setting, Python name and command that a message names exists, in all of the package.

Read from the source, so that a message which no test provokes is held to it too.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import source
import typer

import glasshouse as gh
from glasshouse import cli, registry, spec
from glasshouse.training.run import Data, Train

PACKAGE = Path(gh.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))
SETTINGS = {
    "data": {field.name for field in dataclasses.fields(Data)},
    "train": {field.name for field in dataclasses.fields(Train)},
    "model": {"from", "preset", "kind", "depth"}.union(
        *({field.name for field in dataclasses.fields(kind)} for kind in spec.Spec.__args__)
    ),
}
ENTRY_POINTS = {registry.KINDS, registry.FAMILIES, registry.RECIPES, registry.VIEWS}
SUFFIXES = {"safetensors", "gguf", "toml", "json", "jsonl", "txt", "py"}  # train.txt, model.safetensors: files


def strings(path: Path) -> Iterator[tuple[int, str, str]]:
    """Yield all strings of a file but docstrings, an f-string with {} for what is filled in, and their functions."""
    tree = source.parse(path)
    skipped = set()
    function = {
        id(node): outer.name for outer in tree.body if isinstance(outer, ast.FunctionDef) for node in ast.walk(outer)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            skipped.add(id(node.body[0].value))
        if isinstance(node, ast.JoinedStr):
            skipped.update(id(part) for part in node.values)
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, function.get(id(node), ""), node.value
        elif isinstance(node, ast.JoinedStr):
            parts = (str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
            yield node.lineno, function.get(id(node), ""), "".join(parts)


@functools.cache
def commands() -> dict[tuple[str, ...], Any]:
    """Return all commands by their words, such as ("data", "prepare")."""

    def walk(words: tuple[str, ...], one: Any) -> Iterator[tuple[tuple[str, ...], Any]]:  # noqa: ANN401 - click's
        yield words, one
        for name, inner in getattr(one, "commands", {}).items():
            yield from walk((*words, name), inner)

    return dict(walk((), typer.main.get_command(cli.app)))


def flags(words: tuple[str, ...]) -> set[str]:
    options = (one for one in commands()[words].params if one.param_type_name == "option")
    return {"--help"}.union(*({*one.opts, *one.secondary_opts} for one in options))


@functools.cache
def speakers(path: Path) -> tuple[dict[str, tuple[str, ...]], list[tuple[str, ...]]]:
    """Return the commands that a module of the command line defines, by function, and all that can run its code."""
    own: dict[Path, dict[str, tuple[str, ...]]] = {}
    for words, one in commands().items():
        if one.callback is not None:
            code = inspect.unwrap(one.callback).__code__
            own.setdefault(Path(code.co_filename), {})[code.co_name] = words
    users = {path}
    for _ in range(3):  # as deep as imports go
        stems = {user.stem for user in users}
        users |= {
            other
            for other in (PACKAGE / "cli").rglob("*.py")
            if other.stem != "__init__"
            and any(
                re.search(rf"glasshouse\.cli\b.*\b{stem}\b", line)
                for stem in stems
                for line in other.read_text().splitlines()
                if line.startswith("from ")
            )
        }
    return own.get(path, {}), [words for user in users for words in own.get(user, {}).values()]


def has(path: Path, function: str, flag: str) -> bool:
    """Say whether who prints a message has a flag: its command, or of code that several share, each of them."""
    own, users = speakers(path)
    if function in own:
        return flag in flags(own[function])
    return (any if own else all)(flag in flags(words) for words in users)


def problems(path: Path, function: str, text: str) -> Iterator[str]:
    """Yield what a string names that is not there."""
    inside = path.relative_to(PACKAGE).parts
    for flag in re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", text):
        if inside[0] != "cli":
            yield f"{flag}: outside the command line a message names settings and parameters, which Python has too"
        elif example := re.match(r"(?:Example: |`)?glasshouse ((?:[a-z]+ ?)+)", text):
            words = command_of(example[1].split())
            if words is None or flag not in flags(words):
                yield f"{flag} of {example[1]}"
        elif not has(path, function, flag):
            yield f"{flag}, which a command that says so lacks"
    for table, name in re.findall(r"(?<![\w./-])(data|train|model)\.([a-z_]+)\b(?![./(])", text):
        known = name in SETTINGS[table] or name in SUFFIXES or inside[0] == "hub"  # where tensors are named so
        if not known and resolve(f"{table if table == 'data' else table + 'ing'}.{name}") is None:
            yield f"{table}.{name}"
    for name in re.findall(r"(?<![\w/.])(?:gh|glasshouse)\.([a-zA-Z_][\w.]*\w)", text):
        if f"glasshouse.{name}" in ENTRY_POINTS:
            continue
        if resolve(name) is None and not (PACKAGE / Path(*name.split("."))).exists():
            yield f"gh.{name}"
    packages = "|".join(gh.__all__[-16:])
    for package, name in re.findall(rf"(?<![\w/.'])({packages}|lora)\.([a-z_]+)\b(?=[\s,;.(])", text):
        if package in SETTINGS or name in SUFFIXES or f"{package}.{name}" == "text.encode":  # of any str
            continue
        if resolve(f"{'layers.' if package == 'lora' else ''}{package}.{name}") is None:
            yield f"{package}.{name}"
    for said in re.findall(r"(?:`|Example: |^ *)glasshouse ((?:[a-z]+\b ?)+)", text):
        if command_of(said.split()) is None:
            yield f"glasshouse {said}"


def command_of(words: list[str]) -> tuple[str, ...] | None:
    """Return the command that words begin with, None if there is none."""
    for count in (2, 1):
        one = commands().get(tuple(words[:count]))
        if one is not None and (len(words) == count or not hasattr(one, "commands")):
            return tuple(words[:count])
    return None


def resolve(name: str) -> object:
    found: object = gh
    for part in name.split("."):
        try:
            found = getattr(found, part)
        except AttributeError:
            return None
    return found


def test_what_a_message_names_is_there() -> None:
    found = [
        f"{path.relative_to(PACKAGE)}:{line}: {problem}"
        for path in FILES
        for line, *said in strings(path)
        for problem in problems(path, *said)
    ]
    assert not found, "\n".join(found)


WRONG = [
    ("text/sources/file.py", "fix it, or pass --errors replace."),
    ("cli/training.py", "give --errors replace."),
    ("cli/generation/stdin_prompts.py", "give --nothing."),
    ("cli/data.py", "Example: glasshouse data prepare a.txt --tokeniser tok"),
    ("training/trainer.py", "try a lower train.rate, or {}"),
    ("data/corpus.py", "set data.eror, please"),
    ("training/trainer.py", "see model.n_layer"),
    ("hub/adapters/peft.py", "call gh.loads first"),
    ("hub/adapters/peft.py", "write it by hub.save_adaptor."),
    ("data/corpus.py", "a folder that `glasshouse data prepair` wrote"),
    ("cli/training.py", "glasshouse generates {} {}"),
]


def test_a_way_out_that_is_not_there_is_found() -> None:
    assert [one for one in WRONG if not list(problems(PACKAGE / one[0], "", one[1]))] == []
