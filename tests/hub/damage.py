"""What can be wrong with a model folder: functions that damage a valid one, and cases of what is then said."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers

Table = dict[str, Any]
Damage = Callable[[Path], object]

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
TOKENIZER, TOKENIZER_CONFIG, SPECIAL = "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"
GENERATION, POOLING, VERIFIED = "generation_config.json", "1_Pooling/config.json", "verified.json"
LONG = "x" * 5000
UGLY = "red\x1b[31m\nline"
DIGITS = 10**4000  # the most that Python's json reads is 4300 digits
ENDLESS = 10**400  # no float holds it


def read(path: Path) -> Table:
    return json.loads(path.read_text())


def write(name: str, content: object) -> Damage:
    """Replace a file by bytes, text or (as JSON) anything else."""

    def damage(folder: Path) -> None:
        (folder / name).parent.mkdir(exist_ok=True)
        text = content if isinstance(content, str | bytes) else json.dumps(content)
        (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())

    return damage


def edit(name: str, change: Callable[[Table], object]) -> Damage:
    def damage(folder: Path) -> None:
        table = read(folder / name)
        change(table)
        (folder / name).write_text(json.dumps(table))

    return damage


def config(**changes: object) -> Damage:
    return edit(CONFIG, lambda table: table.update(changes))


def spec(**changes: object) -> Damage:
    return edit(CONFIG, lambda table: table["glasshouse"]["spec"].update(changes))


def rope(**changes: object) -> Damage:
    return config(rope_parameters=changes, rope_scaling=None)


def cut(name: str, length: int) -> Damage:
    return lambda folder: os.truncate(
        folder / name, (folder / name).stat().st_size + length if length < 0 else length
    )


def gone(name: str) -> Damage:
    return lambda folder: (folder / name).unlink()


def instead(name: str, make: Damage) -> Damage:
    """Remove a file and put something else under its name."""

    def damage(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / name).parent.mkdir(exist_ok=True)
        make(folder / name)

    return damage


def link(name: str, target: str) -> Damage:
    """Create a symlink; OUTSIDE in its target is the absolute path of the folder next to it."""
    return instead(name, lambda path: path.symlink_to(target.replace("OUTSIDE", str(sibling(path)))))


def sibling(path: Path) -> Path:
    return next(parent for parent in path.parents if parent.name == "model").with_name("outside")


def fifo(name: str) -> Damage:
    return instead(name, os.mkfifo)


def directory(name: str) -> Damage:
    return instead(name, Path.mkdir)


def both(*damages: Damage) -> Damage:
    return lambda folder: [damage(folder) for damage in damages]


def words(count: int = 61) -> Table:
    model = tokenizers.models.WordLevel({"[UNK]": 0, **{f"w{i}": i for i in range(1, count)}}, unk_token="[UNK]")
    made = tokenizers.Tokenizer(model)
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return json.loads(made.to_str())


def tokenizer(count: int = 61, **changes: object) -> Damage:
    return write(TOKENIZER, {**words(count), **changes})


def nested(depth: int) -> str:
    return "[" * depth + "]" * depth


class Case(NamedTuple):
    base: str
    damage: Damage
    file: str  # which the message has to name; `|` separates alternatives
    reason: str  # and the reason it has to give, as a regular expression


RefuseCase = Callable[[Case], None]  # the type of a fixture


def on(base: str, file: str, cases: dict[str, tuple[Damage, str]]) -> dict[str, Case]:
    return {name: Case(base, damage, file, reason) for name, (damage, reason) in cases.items()}


EITHER = f"{CONFIG}|{WEIGHTS}"  # where the two do not fit together


class Bomb:
    """Unpickling it creates the file at its path."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path(self.path),)
