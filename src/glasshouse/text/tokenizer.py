"""Text to ids and back by any tokenizer.json, used as it is: byte-level BPE, WordPiece, SentencePiece's kinds.

A text may come from anyone, so a special token that is spelled out in it stays text.
"""

from __future__ import annotations

import hashlib
import json
import operator
import reprlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeGuard

import tokenizers

from glasshouse.config import JsonDict, did_you_mean
from glasshouse.errors import GlasshouseError, InputError, StoreError
from glasshouse.text import corpus_encoder, tokenizer_training
from glasshouse.text.bpe import Pair
from glasshouse.text.byte_level import BYTE_TO_UNICODE, unicode_to_bytes
from glasshouse.text.byte_level import UNICODE_TO_BYTE as BYTE_OF
from glasshouse.text.chat_template import DEFAULT_TEMPLATE, Message, segments
from glasshouse.text.corpus_encoder import CorpusEncoder
from glasshouse.text.pretokenizer import MAX_WORDS
from glasshouse.text.text_input import checked_text, is_invalid_utf8, split_invalid_utf8
from glasshouse.text.tokenizer_json import (
    BYTE_FALLBACK,
    SPECIAL_TOKEN_ROLES,
    check,
    decoder_kinds,
    find_special_tokens,
    hide_special_tokens,
    parse,
    read_json_object,
    read_text,
    split_merge,
    write_text,
)

TOKENIZER, CONFIG, SPECIAL_FILE = "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"
TEMPLATE = "chat_template.jinja"
CODE = ("auto_map", "trust_remote_code")  # settings by which a folder has its own Python run

LONG = 2**19  # characters from which on the engine for corpora is faster, the proof of it included

_MARK = 0x10FF00  # the last private characters of Unicode stand for bytes while a text is put together


class EncodedChat(NamedTuple):
    """The ids of a conversation, and which of them the assistant wrote."""

    ids: list[int]
    assistant_mask: list[bool]


class Tokenizer:
    """Turns text into ids and ids into text; `load` reads one from a folder, `train` makes one.

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

    config: JsonDict  # tokenizer_config.json as it was
    special_tokens: dict[str, str]  # the text of each role that the files give to a token
    special_ids: frozenset[int]
    chat_template: str | None = None  # how a conversation is written as one text, in Jinja

    def __init__(self, document: JsonDict, config: JsonDict, special_tokens: JsonDict, roles: dict[str, str]) -> None:
        self.config, self.special_tokens, self._special_map = config, roles, special_tokens
        self._kind = document["model"].get("type", "of no kind")
        self._decoders = decoder_kinds(document.get("decoder"))
        # Written again, so that the library reads just what was checked, whatever it makes of a key given twice.
        self._text = json.dumps(document, ensure_ascii=False)
        self._rust = self._encoder = tokenizers.Tokenizer.from_str(self._text)
        ids = self._rust.get_vocab()
        self._tokens = {number: token for token, number in ids.items()}
        added = self._rust.get_added_tokens_decoder()
        self._added = frozenset(added)
        texts = {token.content for token in added.values() if token.special}.union(roles.values())
        self.special_ids = frozenset(number for number, token in self._tokens.items() if token in texts)
        if twin := hide_special_tokens(document, texts):
            self._encoder = tokenizers.Tokenizer.from_str(json.dumps(twin))
        self._encoder.encode_special_tokens = True
        spells_bytes = self._decoders == ["ByteLevel"] and ids.keys() >= BYTE_OF.keys()
        self._byte_ids = [ids[BYTE_TO_UNICODE[byte]] for byte in range(256)] if spells_bytes else None
        # What is changed or added before a text is split would be changed or added at each stray byte.
        before = json.dumps(document.get("pre_tokenizer"))
        self._takes_any_bytes = not document.get("normalizer") and '"add_prefix_space": true' not in before
        if isinstance(template := config.get("chat_template"), str):
            self.chat_template = template

    @classmethod
    def load(cls, folder: str | Path) -> Tokenizer:
        """Read the tokenizer.json of a folder (or that file), and the settings and special tokens beside it."""
        path = Path(folder) if Path(folder).is_file() else Path(folder) / TOKENIZER
        if not path.is_file():
            raise StoreError(f"there is no {str(path)!r}; give a folder that holds a {TOKENIZER}.")
        config, special = (read_json_object(path.with_name(name)) for name in (CONFIG, SPECIAL_FILE))
        tokenizer = cls.from_json(read_text(path), config, special, source=str(path))
        if (template := path.with_name(TEMPLATE)).is_file():
            tokenizer.chat_template = read_text(template)
        return tokenizer

    @classmethod
    def from_json(
        cls,
        text: str,
        config: JsonDict | None = None,
        special_tokens: JsonDict | None = None,
        source: str = TOKENIZER,
    ) -> Tokenizer:
        """Make a tokenizer from the text of a tokenizer.json and the tables that stood beside it.

        >>> Tokenizer.from_json('{"version": "2.0"}')
        Traceback (most recent call last):
        ...
        glasshouse.errors.StoreError: 'tokenizer.json' is of version '2.0', but only '1.0' is read; find another.
        """
        config, special_tokens = dict(config or {}), dict(special_tokens or {})
        for key in CODE:
            if config.get(key):
                raise StoreError(
                    f"the {CONFIG} of {source!r} asks to run code by {key!r}; choose one that needs none."
                )
        document = parse(text, source)
        check(document, source)
        # Some files cut and pad every text to one length; both belong to the caller. Merges that are left out by
        # chance belong to training, and would give a text other ids each time.
        document |= {"truncation": None, "padding": None}
        document["model"] = {**document["model"], **({"dropout": None} if "dropout" in document["model"] else {})}
        roles = find_special_tokens(special_tokens, source) | find_special_tokens(config, source)
        with _sentence(StoreError, f"{source!r} cannot be used"):
            tokenizer = cls(document, config, special_tokens, roles)
            around = tokenizer._encoder.encode("").ids
        for number in around:
            if number not in tokenizer._tokens:
                raise StoreError(
                    f"{source!r} puts id {number} around every text, but has no such token; fetch it again."
                )
        return tokenizer

    @classmethod
    def train(
        cls,
        files: str | Path | Iterable[str | Path] | None = None,
        *,
        texts: Iterable[str | bytes] | None = None,
        vocab_size: int = 8192,
        pattern: str = "gpt2",
        special_tokens: Mapping[str, str] = tokenizer_training.DEFAULT_SPECIAL_TOKENS,
        field: str = "text",
        errors: Literal["strict", "replace"] = "strict",
        max_words: int = MAX_WORDS,
        progress: tokenizer_training.ProgressCallback = tokenizer_training.no_progress,
    ) -> Tokenizer:
        """Learn byte-level BPE from files, folders and globs, or from an iterable of texts, read once as a stream.

        `vocab_size` counts the special tokens, which `special` gives by role; `pattern` names how text is split into
        words ("gpt2", "gpt4"); `field` is where the text stands in jsonl, csv, tsv and parquet files. Beyond
        `max_words` distinct words the rarest are left out, with a warning.

        >>> tokenizer = Tokenizer.train(texts=["a rose is a rose is a rose"], vocab_size=266)
        >>> tokenizer
        Tokenizer(BPE, 266 tokens)
        >>> tokenizer.decode(tokenizer.encode("a rose, a prose"))
        'a rose, a prose'
        """
        if (files is None) == (texts is None):
            raise InputError("training needs either files or texts; give one of them.")
        if isinstance(texts, str | bytes):
            raise InputError("texts is a single text; put it in a list.")
        if files is not None:
            stream = tokenizer_training.read_texts(files, field, errors, progress)
        else:
            stream = (checked_text(text).encode() for text in texts or ())
        table = tokenizer_training.train(stream, vocab_size, pattern, special_tokens, max_words, progress)
        roles = {role: token for role, token in special_tokens.items() if role in SPECIAL_TOKEN_ROLES}
        tokenizer = cls(table, {}, {}, roles)
        if {special_tokens.get(key) for key in tokenizer_training.CHAT_TOKENS} == {
            tokenizer_training.DEFAULT_SPECIAL_TOKENS[key] for key in tokenizer_training.CHAT_TOKENS
        }:
            tokenizer.chat_template = DEFAULT_TEMPLATE
        return tokenizer

    def save(self, folder: str | Path) -> None:
        """Write the three files, which transformers reads too; each is replaced as a whole."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        roles = {f"{role}_token": token for role, token in self.special_tokens.items()}
        config = self.config or {"tokenizer_class": "PreTrainedTokenizerFast", **roles}
        write_text(folder / CONFIG, json.dumps(config, indent=2, ensure_ascii=False) + "\n")
        write_text(folder / SPECIAL_FILE, json.dumps(self._special_map or roles, indent=2, ensure_ascii=False) + "\n")
        write_text(folder / TOKENIZER, self._text)
        if self.chat_template is not None:
            write_text(folder / TEMPLATE, self.chat_template)

    def encode(
        self, text: str | bytes, add_special_tokens: bool = True, *, parse_special_tokens: bool = False
    ) -> list[int]:
        """Return the ids of a text; `special` adds the tokens that the tokenizer puts around one.

        A special token that is spelled out in the text is text like any other, and never becomes the token's id
        unless the text is `trusted`. Where tokens are bytes, those that are no UTF-8 are tokens of their own.
        """
        if self._is_stray(text):
            return self._encode_stray(text, add_special_tokens, parse_special_tokens)
        checked = checked_text(text)
        if (
            len(checked) >= LONG
            and self._fast[0] is not None
            and not parse_special_tokens
            and not (add_special_tokens and any(self.prefix_suffix_ids))
        ):
            return self.corpus_encoder().encode([checked.encode()])[0].tolist()
        encoder = self._trusting if parse_special_tokens else self._encoder
        with _sentence(InputError, "the text cannot be encoded"):
            return encoder.encode(checked, add_special_tokens=add_special_tokens).ids

    def encode_batch(
        self, texts: Iterable[str | bytes], add_special_tokens: bool = True, *, max_len: int | None = None
    ) -> list[list[int]]:
        """Return the ids of each text, as `encode` does, on all cores; of a text beyond `max_len`, the first ones.

        The tokens around a text are kept when it is cut.
        """
        if isinstance(texts, str | bytes):
            raise InputError("texts is a single text; put it in a list, or call encode.")
        texts = list(texts)
        if any(map(self._is_stray, texts)):
            return [self.encode(text, add_special_tokens)[:max_len] for text in texts]
        checked = [checked_text(text) for text in texts]
        with _sentence(InputError, "the texts cannot be encoded"):
            encodings = self._encoder.encode_batch_fast(
                checked, add_special_tokens=add_special_tokens
            )  # without offsets
        return [one.ids if max_len is None or len(one) <= max_len else _cut(one, max_len) for one in encodings]

    def encode_chat(self, messages: Sequence[Message], *, add_generation_prompt: bool = False) -> EncodedChat:
        """Return the ids of a conversation by the tokenizer's chat template, and which are the assistant's.

        Nothing that stands in a message becomes a control token. A `prompt` ends where the assistant is to write.
        """
        if self.chat_template is None:
            raise InputError(
                "the tokenizer has no chat template; set chat_template, for example to gh.text.chat_template.DEFAULT_TEMPLATE."
            )
        special = {self._tokens[number]: number for number in self.special_ids}
        variables = {f"{role}_token": token for role, token in self.special_tokens.items()}
        result = EncodedChat([], [])
        for part in segments(
            self.chat_template, messages, special=special, variables=variables, prompt=add_generation_prompt
        ):
            ids = [special[part.text]] if part.special else self.encode(part.text, add_special_tokens=False)
            result.ids.extend(ids)
            result.assistant_mask.extend([part.is_assistant] * len(ids))
        return result

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
                self._tokens[number].encode() if number in self._added else unicode_to_bytes(self._tokens[number])
                for number in known
            )
        if "ByteFallback" not in self._decoders:
            return self.decode(known).encode()
        with _sentence(InputError, "the ids cannot be decoded"):
            text = self._rust.decoder.decode([_marked(self._tokens[number]) for number in known])
        return b"".join(bytes([ord(c) - _MARK]) if ord(c) >= _MARK else c.encode() for c in text)

    def __reduce__(self) -> tuple[Any, ...]:
        return _again, (self._text, self.config, self._special_map, self.special_tokens, self.chat_template)

    def __len__(self) -> int:
        return max(self._tokens, default=-1) + 1

    def __repr__(self) -> str:
        return f"Tokenizer({self._kind}, {len(self)} tokens)"

    @property
    def byte_level(self) -> bool:
        """Whether tokens are bytes, and every byte has one: then ids stand for exactly the bytes that were given."""
        return self._byte_ids is not None

    @property
    def ids(self) -> Collection[int]:
        """All ids that stand for a token; some vocabularies have gaps."""
        return self._tokens.keys()

    def id_to_token(self, id: int) -> str:  # noqa: A002 - the word everyone uses
        """Return the token that an id stands for, as the vocabulary writes it."""
        return self._tokens[self._known([id])[0]]

    def token_to_id(self, token: str) -> int | None:
        """Return the id of a token, or None where the vocabulary does not hold it."""
        return self._rust.token_to_id(token)

    def special_id(self, role: str) -> int | None:
        """Return the id of the token with a role ("bos", "eos", "pad" and so on), or None where there is none."""
        if role not in SPECIAL_TOKEN_ROLES:
            raise InputError(
                f"{role!r} is not the role of a special token; {did_you_mean(role, SPECIAL_TOKEN_ROLES)}"
            )
        return self.token_to_id(self.special_tokens[role]) if role in self.special_tokens else None

    @cached_property
    def fingerprint(self) -> str:
        """The SHA-256, in hexadecimal, of what decides ids: all of tokenizer.json but truncation and padding."""
        document = json.loads(self._text)
        del document["truncation"], document["padding"]
        return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()

    def corpus_encoder(self) -> CorpusEncoder:
        """Return what encodes a whole corpus, with no tokens around texts: gigatoken where it can be used.

        >>> bulk = Tokenizer.train(texts=["to be"], vocab_size=263).bulk()
        >>> ids, ends = corpus_encoder.encode([b"to", b"be"])
        >>> ends.tolist()
        [2, 4]
        """
        fast, reason = self._fast
        return CorpusEncoder(fast, lambda texts: self.encode_batch(texts, add_special_tokens=False), reason)

    @cached_property
    def _fast(self) -> tuple[Any, str]:
        if self._encoder is not self._rust:
            return None, "gigatoken could make special tokens of text here"
        return corpus_encoder.load_gigatoken(self._text)

    @cached_property
    def merge_ranks(self) -> dict[Pair, int]:
        """The pairs that a byte-level BPE merges, in bytes, each with its rank; empty for other kinds."""
        model = json.loads(self._text)["model"]
        if self._byte_ids is None or model.get("type") != "BPE":
            return {}
        pairs = (split_merge(merge) for merge in model["merges"])
        return {(unicode_to_bytes(left), unicode_to_bytes(right)): rank for rank, (left, right) in enumerate(pairs)}

    def pretokenize(self, text: str) -> list[bytes]:
        """Split a text into the words that no merge crosses; for byte-level tokenizers only.

        >>> Tokenizer.train(texts=["to be"], vocab_size=263).words("not to be")
        [b'not', b' to', b' be']
        """
        if self._byte_ids is None:
            raise InputError(f"{self!r} has no words of bytes; give a byte-level BPE.")
        return [unicode_to_bytes(word) for word, _ in self._rust.pre_tokenizer.pre_tokenize_str(checked_text(text))]

    @cached_property
    def _trusting(self) -> tokenizers.Tokenizer:
        return tokenizers.Tokenizer.from_str(self._text)

    def _is_stray(self, text: str | bytes) -> TypeGuard[bytes]:
        """Say whether these are bytes that are no UTF-8, and the tokenizer can take them all the same."""
        return self._byte_ids is not None and self._takes_any_bytes and is_invalid_utf8(text)

    def _encode_stray(self, text: bytes, add_special_tokens: bool, parse_special_tokens: bool) -> list[int]:
        """Encode a text that holds stray bytes: the stretches between them as texts, each of them as its token."""
        assert self._byte_ids
        stretches = split_invalid_utf8(text)
        between = list(dict.fromkeys(stretches[::2]))
        encoder = self._trusting if parse_special_tokens else self._encoder
        ids = {
            text: one.ids
            for text, one in zip(between, encoder.encode_batch(between, add_special_tokens=False), strict=True)
        }
        ids |= {chr(0xDC00 + byte): [self._byte_ids[byte]] for byte in range(0x80, 0x100)}
        inside = [number for stretch in stretches for number in ids[stretch]]
        if not add_special_tokens:
            return inside
        before, after = self.prefix_suffix_ids
        return before + inside + after

    @cached_property
    def prefix_suffix_ids(self) -> tuple[list[int], list[int]]:
        """The ids that `encode` puts before and after every text, as published models were trained to read it."""
        one = self._encoder.encode("a")
        inside = [place for place, special in enumerate(one.special_tokens_mask) if not special]
        return (one.ids[: inside[0]], one.ids[inside[-1] + 1 :]) if inside else ([], [])

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


def _again(
    text: str, config: JsonDict, special_tokens: JsonDict, roles: dict[str, str], template: str | None
) -> Tokenizer:
    """Make a copied or pickled tokenizer from its tables: the library's own pickle forgets that specials are text."""
    tokenizer = Tokenizer(json.loads(text), config, special_tokens, roles)
    tokenizer.chat_template = template
    return tokenizer


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


def _cut(encoding: tokenizers.Encoding, max_len: int) -> list[int]:
    """Return the first ids of a text, with all that stand around it."""
    room = max_len - sum(encoding.special_tokens_mask)
    content = iter(range(len(encoding)))
    return [
        number
        for number, special in zip(encoding.ids, encoding.special_tokens_mask, strict=True)
        if special or next(content) < room
    ]


def _marked(token: str) -> str:
    byte = BYTE_FALLBACK.fullmatch(token)
    return chr(_MARK + int(byte[1], 16)) if byte else token
