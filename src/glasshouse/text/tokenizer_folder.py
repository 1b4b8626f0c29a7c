"""The files of a tokenizer in a folder, as transformers lays them out: read and written, not interpreted."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path

from glasshouse.config import JsonDict
from glasshouse.errors import StoreError

TOKENIZER, CONFIG, SPECIAL_FILE = "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"
TEMPLATE = "chat_template.jinja"
LARGEST = 200_000_000  # bytes
CODE = ("auto_map", "trust_remote_code")  # settings that make a folder run its own Python code


@dataclass(frozen=True)
class TokenizerFiles:
    """The contents of a tokenizer's files."""

    tokenizer_json: str
    config: JsonDict = field(default_factory=dict)
    special_tokens_map: JsonDict = field(default_factory=dict)
    chat_template: str | None = None
    source: str = TOKENIZER  # the path, named in errors

    @classmethod
    def read(cls, path: Path) -> TokenizerFiles:
        """Read a tokenizer.json and the files beside it; what is missing is empty."""
        config, special_map = (read_json_object(path.with_name(name)) for name in (CONFIG, SPECIAL_FILE))
        file = path.with_name(TEMPLATE)
        template = read_text(file) if file.is_file() else None
        return cls(read_text(path) if path.is_file() else "", config, special_map, template, str(path))

    def write(self, folder: str | Path) -> None:
        """Write the files, each atomically."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        for name, table in ((CONFIG, self.config), (SPECIAL_FILE, self.special_tokens_map)):
            write_text(folder / name, json.dumps(table, indent=2, ensure_ascii=False) + "\n")
        write_text(folder / TOKENIZER, self.tokenizer_json)
        if self.chat_template is not None:
            write_text(folder / TEMPLATE, self.chat_template)


def refuse_code(config: JsonDict, source: str) -> None:
    """Raise StoreError for a tokenizer_config.json that asks to run code."""
    for key in CODE:
        if config.get(key):
            raise StoreError(f"the {CONFIG} of {source!r} asks to run code with {key!r}; choose one that needs none.")


def read_bytes(path: Path, largest: int = LARGEST) -> bytes:
    """Read a file of at most `largest` bytes."""
    if (size := path.stat().st_size) > largest:
        raise StoreError(f"{str(path)!r} has {size} bytes, but at most {largest} are allowed; choose a smaller one.")
    return path.read_bytes()


def read_text(path: Path, largest: int = LARGEST) -> str:
    """Read a UTF-8 file of at most `largest` bytes."""
    try:
        text = read_bytes(path, largest).decode()
    except UnicodeDecodeError as error:
        raise StoreError(f"{str(path)!r} is not UTF-8 at byte {error.start}; download it again.") from None
    return text.replace("\r\n", "\n")


def read_json_object(path: Path, largest: int = LARGEST) -> JsonDict:
    """Read a JSON object; a missing file is an empty one."""
    return parse(read_text(path, largest), str(path)) if path.is_file() else {}


def parse(text: str, source: str) -> JsonDict:
    """Parse the text of a JSON object; `source` is named in errors."""
    try:
        table = json.loads(text)
    except RecursionError:
        raise StoreError(f"{source!r} is nested too deeply to be parsed; download it again.") from None
    except ValueError as error:
        raise StoreError(f"{source!r} is not JSON ({error}); download it again.") from None
    if not isinstance(table, dict):
        raise StoreError(f"{source!r} contains {type(table).__name__} instead of a JSON object; download it again.")
    return table


def write_text(path: Path, text: str) -> None:
    """Write a file atomically."""
    temporary = path.with_name(f".{path.name}.new")
    with temporary.open("w", encoding="utf-8", newline="\n") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
