"""The tokens that a folder's configuration adds to a vocabulary, and those found in a text before the rest."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Collection, Iterator

from glasshouse.config import JsonDict
from glasshouse.errors import StoreError
from glasshouse.text.conversion.pipeline import Pipeline

FLAGS = ("single_word", "lstrip", "rstrip", "normalized")
LISTS = ("additional_special_tokens", "extra_special_tokens")


def added_tokens(
    steps: Pipeline, config: JsonDict, declared: JsonDict, special_tokens: Collection[str], source: str
) -> list[JsonDict]:
    """Return the added tokens of a tokenizer.json, in the order of their ids.

    `declared` is added_tokens.json: ids of tokens. What is not in the vocabulary follows it, in the order given.
    """
    ids = dict(steps.ids())
    flags = dict(_flags(config))
    tokens: dict[str, JsonDict] = {}
    for number, content, token in sorted(_numbered(config, declared, source), key=lambda one: one[0]):
        if (assigned := ids.setdefault(content, len(ids))) != number:
            raise StoreError(
                f"{source!r} has no place for the added token {content[:80]!r} with the id {number}, as its "
                f"vocabulary gives it {assigned}; download it again."
            )
        tokens[content] = token
    for content in (*(text for text, _ in steps.added), *special_tokens, *flags):
        tokens.setdefault(content, flags.get(content, {}))
        ids.setdefault(content, len(ids))
    special = {text for text, is_special in steps.added if is_special}.union(special_tokens, flags)
    made = [
        {"id": ids[content], "content": content}
        | {flag: bool(token.get(flag, False)) for flag in FLAGS}
        | {"special": content in special or bool(token.get("special", False))}
        for content, token in tokens.items()
    ]
    return sorted(made, key=lambda token: token["id"])


def _numbered(config: JsonDict, declared: JsonDict, source: str) -> Iterator[tuple[int, str, JsonDict]]:
    """Yield the id, the text and the flags of tokens that have their ids in added_tokens.json or the config."""
    listed = config.get("added_tokens_decoder") or {}
    seen: set[str] = set()
    for number, token in listed.items() if isinstance(listed, dict) else [("", listed)]:
        content = token.get("content") if isinstance(token, dict) else None
        if not isinstance(content, str) or not re.fullmatch("[0-9]{1,9}", number):
            shown = f"{reprlib.repr(number)}: {reprlib.repr(token)}"
            raise StoreError(f"{source!r} has the added token {shown}, which has no id or text; download it again.")
        seen.add(content)
        yield int(number), content, token
    for content, number in declared.items():
        if not isinstance(number, int):
            raise StoreError(f"{source!r} has the id {reprlib.repr(number)} for an added token; download it again.")
        if content not in seen:
            yield number, content, {}


def _flags(config: JsonDict) -> Iterator[tuple[str, JsonDict]]:
    """Yield additional special tokens, which are strings or tables with flags, and the flags of the others."""
    for key, value in config.items():
        if key in LISTS:
            values = value if isinstance(value, list) else []
        elif key.endswith("_token") and isinstance(value, dict):
            values = [value]
        else:
            continue
        for one in values:
            match one:
                case str(content):
                    yield content, {}
                case {"content": str(content)}:
                    yield content, one
