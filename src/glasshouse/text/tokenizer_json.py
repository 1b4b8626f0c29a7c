"""Checks and takes apart a tokenizer.json.

It is untrusted, so it is checked before the tokenizers library loads it.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator, Mapping
from typing import Any

from glasshouse.config import JsonDict
from glasshouse.errors import StoreError
from glasshouse.text.untrusted import expansion as expansion_limits
from glasshouse.text.untrusted import regex as regex_safety

SPECIAL_TOKEN_ROLES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
PREFIX = "continuing_subword_prefix"
BYTE_FALLBACK = re.compile("<0x([0-9A-Fa-f]{2})>")  # a byte-fallback token of SentencePiece


def validated(tokenizer_json: JsonDict, source: str) -> JsonDict:
    """Return a tokenizer.json that encodes a text as it is, once it has been checked."""
    check(tokenizer_json, source)
    model = tokenizer_json["model"]
    # Truncation and padding are up to the caller. BPE dropout is for training; it would make ids random.
    without_dropout = {**model, **({"dropout": None} if "dropout" in model else {})}
    return tokenizer_json | {"truncation": None, "padding": None, "model": without_dropout}


def check(tokenizer_json: JsonDict, source: str) -> None:
    """Refuse what would hang or crash the process inside the library, where nothing can be caught."""
    version, model = tokenizer_json.get("version"), tokenizer_json.get("model")
    if version != "1.0":
        raise StoreError(f"{source!r} is of version {version!r}, but only '1.0' is supported; find another.")
    if not isinstance(model, dict):
        raise StoreError(f"{source!r} contains no model; download it again.")
    for expression in _expressions(tokenizer_json):
        try:
            regex_safety.check_regex(expression)
        except StoreError as error:
            raise StoreError(f"{source!r} is refused: {error}") from None
    _check_ids(tokenizer_json, model.get("vocab"), source)
    prefix, merges = model.get(PREFIX), model.get("merges")
    if isinstance(prefix, str) and isinstance(merges, list):
        # The library removes the prefix without checking it, and the rest need not be a valid string.
        for merge in (merge for merge in merges if not split_merge(merge)[1].startswith(prefix)):
            raise StoreError(
                f"{source!r} merges {merge!r}, but the second part must start with {prefix!r}; download it again."
            )
    expansion_limits.check_expansion(tokenizer_json, source)


def _check_ids(tokenizer_json: JsonDict, vocab: object, source: str) -> None:
    """Refuse ids so large that the library would run out of memory allocating for them."""
    added = tokenizer_json.get("added_tokens")
    ids = [*vocab.values()] if isinstance(vocab, dict) else []
    ids += [token.get("id") for token in added if isinstance(token, dict)] if isinstance(added, list) else []
    most = 2 * len(ids) + 2**16
    for number in ids:
        if not isinstance(number, int) or not 0 <= number < most:
            raise StoreError(f"{source!r} gives a token the id {number!r}, which is out of range; download it again.")


def _expressions(tokenizer_json: JsonDict) -> Iterator[str]:
    stack: list[Any] = [tokenizer_json]
    while stack:
        value = stack.pop()
        if isinstance(value, dict):
            if isinstance(expression := value.get("Regex"), str):
                yield expression
            value = value.values()
        stack.extend(inner for inner in value if isinstance(inner, dict | list))


def split_merge(merge: object) -> tuple[str, str]:
    """Return the two parts of a merge, which is stored as one string or as two."""
    match merge.split(" ") if isinstance(merge, str) else merge:
        case [str(left), str(right)]:
            return left, right
    return "", ""  # not a merge; the library reports it


def merges_of(tokenizer_json: JsonDict) -> list[tuple[str, str]]:
    """Return the merges of a BPE in order; none for other kinds."""
    model = tokenizer_json["model"]
    return [split_merge(merge) for merge in model["merges"]] if model.get("type") == "BPE" else []


def find_special_tokens(table: Mapping[str, Any], source: str) -> dict[str, str]:
    """Return the special tokens of a config by role."""
    roles = {}
    for role in SPECIAL_TOKEN_ROLES:
        value = table.get(f"{role}_token")
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            roles[role] = text
        elif value is not None:
            raise StoreError(f"the {role}_token of {source!r} is {value!r}, but it must be a string; fix it.")
    return roles


def hide_special_tokens(tokenizer_json: JsonDict, special: set[str]) -> JsonDict | None:
    """Rename special tokens so that no text can produce them; return None if that is not needed.

    The library's `encode_special_tokens` only disables the search for added tokens. A model that has them in its
    vocabulary still produces them: Unigram prefers them, a whole word can be one, and merges can lead to one.
    """
    model, added = dict(tokenizer_json["model"]), tokenizer_json.get("added_tokens") or []
    vocab = model["vocab"]
    pieces = vocab if isinstance(vocab, dict) else {piece for piece, _ in vocab}
    # A single character, or a byte-fallback token, cannot be encoded otherwise: hidden, it would be lost.
    hidden = {
        token for token in special.intersection(pieces) if len(token) > 1 and not BYTE_FALLBACK.fullmatch(token)
    }
    if hidden and "merges" in model and not any(map(model.get, ("ignore_merges", PREFIX, "end_of_word_suffix"))):
        # Such a model produces only single characters and merges; rebuilding it takes seconds.
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
    return {**tokenizer_json, "model": model, "added_tokens": added}


def decoder_kinds(decoder: JsonDict | None) -> list[str]:
    """Return the types of the decoder's steps."""
    if decoder and decoder.get("type") == "Sequence":
        return [kind for part in decoder["decoders"] for kind in decoder_kinds(part)]
    return [decoder.get("type", "")] if decoder else []
