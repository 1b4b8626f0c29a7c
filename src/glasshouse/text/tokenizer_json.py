"""A tokenizer.json and the files beside it as tables: read, checked, and written.

A file may come from anyone, so it is checked before the tokenizers library sees it.
"""

from __future__ import annotations

import json
import os
import re
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from glasshouse.config import JsonDict
from glasshouse.errors import StoreError
from glasshouse.text import expansion_limits, regex_safety

SPECIAL_TOKEN_ROLES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
LARGEST = 200_000_000  # bytes
PREFIX = "continuing_subword_prefix"
BYTE_FALLBACK = re.compile("<0x([0-9A-Fa-f]{2})>")  # a byte to fall back on, as SentencePiece's vocabularies write it


def read_text(path: Path) -> str:
    """Read a file that is no larger than a tokenizer can be."""
    if (size := path.stat().st_size) > LARGEST:
        raise StoreError(f"{str(path)!r} has {size} bytes, but at most {LARGEST} are read; choose a smaller one.")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise StoreError(f"{str(path)!r} is not UTF-8 at byte {error.start}; fetch it again.") from None


def read_json_object(path: Path) -> JsonDict:
    """Read a JSON object; a file that is not there is an empty one."""
    return parse(read_text(path), str(path)) if path.is_file() else {}


def parse(text: str, source: str) -> JsonDict:
    """Read the text of a JSON object; `source` is named in errors."""
    try:
        table = json.loads(text)
    except RecursionError:
        raise StoreError(f"{source!r} is nested too deep to be read; fetch it again.") from None
    except ValueError as error:
        raise StoreError(f"{source!r} is not JSON ({error}); fetch it again.") from None
    if not isinstance(table, dict):
        raise StoreError(f"{source!r} holds {type(table).__name__} instead of a JSON object; fetch it again.")
    return table


def check(document: JsonDict, source: str) -> None:
    """Refuse what would hang or end the process inside the library, where nothing can be caught."""
    version, model = document.get("version"), document.get("model")
    if version != "1.0":
        raise StoreError(f"{source!r} is of version {version!r}, but only '1.0' is read; find another.")
    if not isinstance(model, dict):
        raise StoreError(f"{source!r} holds no model; fetch it again.")
    for expression in _expressions(document):
        try:
            regex_safety.check_regex(expression)
        except StoreError as error:
            raise StoreError(f"{source!r} is refused: {error}") from None
    _check_ids(document, model.get("vocab"), source)
    prefix, merges = model.get(PREFIX), model.get("merges")
    if isinstance(prefix, str) and isinstance(merges, list):
        # The library takes the prefix off without a look, and what it leaves need not be a string.
        for merge in (merge for merge in merges if not split_merge(merge)[1].startswith(prefix)):
            raise StoreError(
                f"{source!r} merges {merge!r}, but {prefix!r} must begin the second part; fetch it again."
            )
    expansion_limits.check_expansion(document, source)


def _check_ids(document: JsonDict, vocab: object, source: str) -> None:
    """Refuse ids for which the library would set memory aside until the process ends."""
    added = document.get("added_tokens")
    ids = [*vocab.values()] if isinstance(vocab, dict) else []
    ids += [token.get("id") for token in added if isinstance(token, dict)] if isinstance(added, list) else []
    most = 2 * len(ids) + 2**16
    for number in ids:
        if not isinstance(number, int) or not 0 <= number < most:
            raise StoreError(
                f"{source!r} gives a token the id {number!r}, which no vocabulary needs; fetch it again."
            )


def _expressions(document: JsonDict) -> Iterator[str]:
    waiting: list[Any] = [document]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            if isinstance(expression := value.get("Regex"), str):
                yield expression
            value = value.values()
        waiting.extend(inner for inner in value if isinstance(inner, dict | list))


def split_merge(merge: object) -> tuple[str, str]:
    """Return the two parts of a merge, which is written as one string or as two."""
    match merge.split(" ") if isinstance(merge, str) else merge:
        case [str(left), str(right)]:
            return left, right
    return "", ""  # no merge at all, as the library will say


def find_special_tokens(table: Mapping[str, Any], source: str) -> dict[str, str]:
    """Return the text of each token that has a role in a table of settings."""
    roles = {}
    for role in SPECIAL_TOKEN_ROLES:
        value = table.get(f"{role}_token")
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            roles[role] = text
        elif value is not None:
            raise StoreError(f"the {role}_token beside {source!r} is {value!r}, but it must be a string; mend it.")
    return roles


def hide_special_tokens(document: JsonDict, special: set[str]) -> JsonDict | None:
    """Return the document with its special tokens under names that no text can hold, or None where it has none such.

    The library's `encode_special_tokens` only stops the search for added tokens. A model that holds them as pieces
    still makes them: Unigram prefers them, a word can be one as it stands, and merges can lead to one.
    """
    model, added = dict(document["model"]), document.get("added_tokens") or []
    vocab = model["vocab"]
    pieces = vocab if isinstance(vocab, dict) else {piece for piece, _ in vocab}
    # A single character, or a byte to fall back on, has no other spelling: hidden, it would be lost from the text.
    hidden = {
        token for token in special.intersection(pieces) if len(token) > 1 and not BYTE_FALLBACK.fullmatch(token)
    }
    if hidden and "merges" in model and not any(map(model.get, ("ignore_merges", PREFIX, "end_of_word_suffix"))):
        # Such a model makes single characters and what its merges name; building it again takes seconds.
        hidden &= {left + right for left, right in map(split_merge, model["merges"])}
    if not hidden and all(token["special"] for token in added if token["content"] in special):
        return None
    secret = secrets.token_hex(16)
    names = {token: secret + token for token in hidden}
    if isinstance(vocab, dict):
        model["vocab"] = {names.get(piece, piece): number for piece, number in vocab.items()}
    else:
        model["vocab"] = [[names.get(piece, piece), score] for piece, score in vocab]
    if "unk_token" in model:
        model["unk_token"] = names.get(model["unk_token"], model["unk_token"])
    if "merges" in model:
        skip = len(model.get(PREFIX) or "")
        merges = ((merge, *split_merge(merge)) for merge in model["merges"])
        model["merges"] = [m for m, left, right in merges if hidden.isdisjoint((left, right, left + right[skip:]))]
    added = [
        {
            **token,
            "content": names.get(token["content"], token["content"]),
            "special": token["special"] or token["content"] in special,
        }
        for token in added
    ]
    return {**document, "model": model, "added_tokens": added}


def decoder_kinds(decoder: JsonDict | None) -> list[str]:
    """Return the kinds of the steps by which tokens become text."""
    if decoder and decoder.get("type") == "Sequence":
        return [kind for part in decoder["decoders"] for kind in decoder_kinds(part)]
    return [decoder.get("type", "")] if decoder else []


def write_text(path: Path, text: str) -> None:
    """Write a file, replaced as a whole."""
    fresh = path.with_name(f".{path.name}.new")
    with fresh.open("w", encoding="utf-8", newline="\n") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)
