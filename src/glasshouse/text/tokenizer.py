"""Text to ids and back by any tokenizer.json, used as it is: byte-level BPE, WordPiece, SentencePiece's kinds.

The file may come from anyone, so it is checked before the tokenizers library sees it; and a text may come from
anyone, so a special token that is spelled out in it stays text.
"""

from __future__ import annotations

import hashlib
import json
import operator
import os
import re
import reprlib
import secrets
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from glasshouse.config import Table, nearest
from glasshouse.errors import GlasshouseError, InputError, StoreError
from glasshouse.text import pattern

TOKENIZER, CONFIG, SPECIAL = "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"
TEMPLATE = "chat_template.jinja"
ROLES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
LARGEST = 200_000_000  # bytes
PREFIX = "continuing_subword_prefix"
CODE = ("auto_map", "trust_remote_code")  # settings by which a folder has its own Python run

_BYTE = re.compile("<0x([0-9A-Fa-f]{2})>")
_MARK = 0x10FF00  # the last private characters of Unicode stand for bytes while a text is put together
_LATIN = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
# GPT-2's alphabet: a byte that prints is its own character, the others are the characters from 256 on.
_ALPHABET = {chr(b): b for b in _LATIN} | {chr(256 + n): b for n, b in enumerate(sorted({*range(256)} - {*_LATIN}))}


class Tokenizer:
    """Turns text into ids and ids into text; `load` reads one from a folder.

    >>> words = {"type": "WordLevel", "vocab": {"[UNK]": 0, "hello": 1, "world": 2}, "unk_token": "[UNK]"}
    >>> file = {"version": "1.0", "pre_tokenizer": {"type": "Whitespace"}, "model": words}
    >>> tokenizer = Tokenizer.from_json(json.dumps(file))
    >>> tokenizer
    Tokenizer(WordLevel, 3 tokens)
    >>> tokenizer.encode("hello new world")
    [1, 0, 2]
    >>> tokenizer.decode([1, 2])
    'hello world'
    >>> tokenizer.id("world"), tokenizer.token(2), len(tokenizer)
    (2, 'world', 3)
    """

    config: Table  # tokenizer_config.json as it was
    special_tokens: dict[str, str]  # the text of each role that the files give to a token
    special_ids: frozenset[int]
    chat_template: str | None = None  # how a conversation is written as one text, in Jinja

    def __init__(self, document: Table, config: Table, special: Table, roles: dict[str, str]) -> None:
        self.config, self.special_tokens, self._special_map = config, roles, special
        self._kind = document["model"].get("type", "of no kind")
        self._decoders = _kinds(document.get("decoder"))
        # Written again, so that the library reads just what was checked, whatever it makes of a key given twice.
        self._text = json.dumps(document, ensure_ascii=False)
        self._rust = self._encoder = tokenizers.Tokenizer.from_str(self._text)
        self._tokens = {number: token for token, number in self._rust.get_vocab().items()}
        added = self._rust.get_added_tokens_decoder()
        self._added = frozenset(added)
        texts = {token.content for token in added.values() if token.special}.union(roles.values())
        self.special_ids = frozenset(number for number, token in self._tokens.items() if token in texts)
        if unspellable := _unspellable(document, texts):
            self._encoder = tokenizers.Tokenizer.from_str(json.dumps(unspellable))
        self._encoder.encode_special_tokens = True

    @classmethod
    def load(cls, folder: str | Path) -> Tokenizer:
        """Read the tokenizer.json of a folder (or that file), and the settings and special tokens beside it."""
        path = Path(folder) if Path(folder).is_file() else Path(folder) / TOKENIZER
        if not path.is_file():
            raise StoreError(f"there is no {str(path)!r}; give a folder that holds a {TOKENIZER}.")
        config, special = (_table(path.with_name(name)) for name in (CONFIG, SPECIAL))
        tokenizer = cls.from_json(_read(path), config, special, source=str(path))
        if (template := path.with_name(TEMPLATE)).is_file():
            tokenizer.chat_template = _read(template)
        return tokenizer

    @classmethod
    def from_json(
        cls, text: str, config: Table | None = None, special: Table | None = None, source: str = TOKENIZER
    ) -> Tokenizer:
        """Make a tokenizer from the text of a tokenizer.json and the tables that stood beside it.

        >>> Tokenizer.from_json('{"version": "2.0"}')
        Traceback (most recent call last):
        ...
        glasshouse.errors.StoreError: 'tokenizer.json' is of version '2.0', but only '1.0' is read; find another.
        """
        config, special = dict(config or {}), dict(special or {})
        for key in CODE:
            if config.get(key):
                raise StoreError(
                    f"the {CONFIG} of {source!r} asks to run code by {key!r}; choose one that needs none."
                )
        document = _parse(text, source)
        _check(document, source)
        # Some files cut and pad every text to one length; both belong to the caller.
        document |= {"truncation": None, "padding": None}
        roles = _roles(special, source) | _roles(config, source)
        with _sentence(StoreError, f"{source!r} cannot be used"):
            tokenizer = cls(document, config, special, roles)
            around = tokenizer._encoder.encode("").ids
        for number in around:
            if number not in tokenizer._tokens:
                raise StoreError(
                    f"{source!r} puts id {number} around every text, but has no such token; fetch it again."
                )
        return tokenizer

    def save(self, folder: str | Path) -> None:
        """Write the three files, which transformers reads too; each is replaced as a whole."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        roles = {f"{role}_token": token for role, token in self.special_tokens.items()}
        config = self.config or {"tokenizer_class": "PreTrainedTokenizerFast", **roles}
        _replace(folder / CONFIG, json.dumps(config, indent=2, ensure_ascii=False) + "\n")
        _replace(folder / SPECIAL, json.dumps(self._special_map or roles, indent=2, ensure_ascii=False) + "\n")
        _replace(folder / TOKENIZER, self._text)
        if self.chat_template is not None:
            _replace(folder / TEMPLATE, self.chat_template)

    def encode(self, text: str | bytes, special: bool = True) -> list[int]:
        """Return the ids of a text; `special` adds the tokens that the tokenizer puts around one.

        A special token that is spelled out in the text is text like any other, and never becomes the token's id.
        """
        checked = _checked(text)
        with _sentence(InputError, "the text cannot be encoded"):
            return self._encoder.encode(checked, add_special_tokens=special).ids

    def encode_batch(self, texts: Iterable[str | bytes], special: bool = True) -> list[list[int]]:
        """Return the ids of each text, as `encode` does, on all cores."""
        if isinstance(texts, str | bytes):
            raise InputError("texts is a single text; put it in a list, or call encode.")
        checked = [_checked(text) for text in texts]
        with _sentence(InputError, "the texts cannot be encoded"):
            return [one.ids for one in self._encoder.encode_batch(checked, add_special_tokens=special)]

    def decode(self, ids: Iterable[int], special: bool = True) -> str:
        """Return the text of ids; without `special` the special tokens are left out."""
        kept = [number for number in self._known(ids) if special or number not in self.special_ids]
        with _sentence(InputError, "the ids cannot be decoded"):
            return self._rust.decode(kept, skip_special_tokens=False)

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """Return the bytes of ids, also where they make no character, for which `decode` can only put a mark.

        They are exact where tokens are bytes (byte-level BPE) or can be (byte fallback), else those of `decode`.
        """
        known = self._known(ids)
        if self._decoders == ["ByteLevel"]:
            return b"".join(
                self._tokens[number].encode() if number in self._added else _spelled(self._tokens[number])
                for number in known
            )
        if "ByteFallback" not in self._decoders:
            return self.decode(known).encode()
        with _sentence(InputError, "the ids cannot be decoded"):
            text = self._rust.decoder.decode([_marked(self._tokens[number]) for number in known])
        return b"".join(bytes([ord(c) - _MARK]) if ord(c) >= _MARK else c.encode() for c in text)

    def __len__(self) -> int:
        return max(self._tokens, default=-1) + 1

    def __repr__(self) -> str:
        return f"Tokenizer({self._kind}, {len(self)} tokens)"

    def token(self, id: int) -> str:  # noqa: A002 - the word everyone uses
        """Return the token that an id stands for, as the vocabulary writes it."""
        return self._tokens[self._known([id])[0]]

    def id(self, token: str) -> int | None:
        """Return the id of a token, or None where the vocabulary does not hold it."""
        return self._rust.token_to_id(token)

    def special_id(self, role: str) -> int | None:
        """Return the id of the token with a role ("bos", "eos", "pad" and so on), or None where there is none."""
        if role not in ROLES:
            raise InputError(f"{role!r} is not the role of a special token; {nearest(role, ROLES)}")
        return self.id(self.special_tokens[role]) if role in self.special_tokens else None

    @cached_property
    def fingerprint(self) -> str:
        """The SHA-256, in hexadecimal, of what decides ids: all of tokenizer.json but truncation and padding."""
        document = json.loads(self._text)
        del document["truncation"], document["padding"]
        return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()

    def _known(self, ids: Iterable[int]) -> list[int]:
        try:
            numbers = [operator.index(number) for number in ids]
        except TypeError:
            raise InputError(f"ids is {reprlib.repr(ids)}, but it must be a list of whole numbers.") from None
        for number in numbers:
            if number not in self._tokens:
                raise InputError(
                    f"id {number} stands for no token; give ids below {len(self)}, the vocabulary's size."
                )
        return numbers


@contextmanager
def _sentence(kind: type[GlasshouseError], problem: str) -> Iterator[None]:
    """Turn what the tokenizers library throws into one sentence."""
    try:
        yield
    except BaseException as error:
        # A panic in Rust is no Exception; neither is an interrupt, which has to pass.
        if not isinstance(error, Exception) and type(error).__module__ != "pyo3_runtime":
            raise
        raise kind(f"{problem}: {' '.join(str(error).split())}.") from None


def _read(path: Path) -> str:
    if (size := path.stat().st_size) > LARGEST:
        raise StoreError(f"{str(path)!r} has {size} bytes, but at most {LARGEST} are read; choose a smaller one.")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise StoreError(f"{str(path)!r} is not UTF-8 at byte {error.start}; fetch it again.") from None


def _table(path: Path) -> Table:
    return _parse(_read(path), str(path)) if path.is_file() else {}


def _parse(text: str, source: str) -> Table:
    try:
        table = json.loads(text)
    except RecursionError:
        raise StoreError(f"{source!r} is nested too deep to be read; fetch it again.") from None
    except ValueError as error:
        raise StoreError(f"{source!r} is not JSON ({error}); fetch it again.") from None
    if not isinstance(table, dict):
        raise StoreError(f"{source!r} holds {type(table).__name__} instead of a JSON object; fetch it again.")
    return table


def _check(document: Table, source: str) -> None:
    """Refuse what would hang or end the process inside the library, where nothing can be caught."""
    version, model = document.get("version"), document.get("model")
    if version != "1.0":
        raise StoreError(f"{source!r} is of version {version!r}, but only '1.0' is read; find another.")
    if not isinstance(model, dict):
        raise StoreError(f"{source!r} holds no model; fetch it again.")
    for expression in _expressions(document):
        try:
            pattern.check(expression)
        except StoreError as error:
            raise StoreError(f"{source!r} is refused: {error}") from None
    prefix, merges = model.get(PREFIX), model.get("merges")
    if isinstance(prefix, str) and isinstance(merges, list):
        # The library takes the prefix off without a look, and what it leaves need not be a string.
        for merge in (merge for merge in merges if not _halves(merge)[1].startswith(prefix)):
            raise StoreError(
                f"{source!r} merges {merge!r}, but {prefix!r} must begin the second part; fetch it again."
            )


def _expressions(document: Table) -> Iterator[str]:
    waiting: list[Any] = [document]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            if isinstance(expression := value.get("Regex"), str):
                yield expression
            value = value.values()
        waiting.extend(inner for inner in value if isinstance(inner, dict | list))


def _halves(merge: object) -> tuple[str, str]:
    match merge.split(" ") if isinstance(merge, str) else merge:
        case [str(left), str(right)]:
            return left, right
    return "", ""  # no merge at all, as the library will say


def _roles(table: Mapping[str, Any], source: str) -> dict[str, str]:
    roles = {}
    for role in ROLES:
        value = table.get(f"{role}_token")
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            roles[role] = text
        elif value is not None:
            raise StoreError(f"the {role}_token beside {source!r} is {value!r}, but it must be a string; mend it.")
    return roles


def _unspellable(document: Table, special: set[str]) -> Table | None:
    """Return the document with its special tokens under names that no text can hold, or None where it has none such.

    The library's `encode_special_tokens` only stops the search for added tokens. A model that holds them as pieces
    still makes them: Unigram prefers them, a word can be one as it stands, and merges can lead to one.
    """
    model, added = dict(document["model"]), document.get("added_tokens") or []
    vocab = model["vocab"]
    pieces = vocab if isinstance(vocab, dict) else {piece for piece, _ in vocab}
    # A single character, or a byte to fall back on, has no other spelling: hidden, it would be lost from the text.
    hidden = {token for token in special.intersection(pieces) if len(token) > 1 and not _BYTE.fullmatch(token)}
    if hidden and "merges" in model and not any(map(model.get, ("ignore_merges", PREFIX, "end_of_word_suffix"))):
        # Such a model makes single characters and what its merges name; building it again takes seconds.
        hidden &= {left + right for left, right in map(_halves, model["merges"])}
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
        halves = ((merge, *_halves(merge)) for merge in model["merges"])
        model["merges"] = [m for m, left, right in halves if hidden.isdisjoint((left, right, left + right[skip:]))]
    added = [
        {
            **token,
            "content": names.get(token["content"], token["content"]),
            "special": token["special"] or token["content"] in special,
        }
        for token in added
    ]
    return {**document, "model": model, "added_tokens": added}


def _checked(text: str | bytes) -> str:
    if not isinstance(text, str | bytes):
        raise InputError(f"the text is of type {type(text).__name__}, but it must be a string or bytes.")
    try:
        if isinstance(text, bytes):
            return text.decode()
        text.encode()
    except UnicodeDecodeError as error:
        raise InputError(f"the text is not UTF-8 at byte {error.start}; give the text that the bytes mean.") from None
    except UnicodeEncodeError as error:
        raise InputError(f"the text holds half a character at {error.start} (a surrogate); replace it.") from None
    return text


def _spelled(token: str) -> bytes:
    """Return the bytes of a byte-level token; what is not in the alphabet stands for itself, as in the library."""
    return bytes(map(_ALPHABET.__getitem__, token)) if _ALPHABET.keys() >= set(token) else token.encode()


def _marked(token: str) -> str:
    byte = _BYTE.fullmatch(token)
    return chr(_MARK + int(byte[1], 16)) if byte else token


def _kinds(decoder: Table | None) -> list[str]:
    if decoder and decoder.get("type") == "Sequence":
        return [kind for part in decoder["decoders"] for kind in _kinds(part)]
    return [decoder.get("type", "")] if decoder else []


def _replace(path: Path, text: str) -> None:
    fresh = path.with_name(f".{path.name}.new")
    with fresh.open("w", encoding="utf-8", newline="\n") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)
