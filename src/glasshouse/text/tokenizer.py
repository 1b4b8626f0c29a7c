"""Tokenizer for any tokenizer.json or older vocabulary files: byte-level BPE, WordPiece, Unigram, SentencePiece BPE.

Text is untrusted, so a special token that is spelled out in it is encoded as text.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeGuard

import tokenizers

from glasshouse.config import JsonDict
from glasshouse.errors import InputError, StoreError
from glasshouse.text import corpus_encoder
from glasshouse.text.bpe import training as tokenizer_training
from glasshouse.text.bpe.algorithm import Pair
from glasshouse.text.bpe.byte_level import unicode_to_bytes
from glasshouse.text.bpe.pretokenizer import MAX_WORDS
from glasshouse.text.chat.template import EncodedChat, Message, segments
from glasshouse.text.conversion.folder import read_folder
from glasshouse.text.corpus_encoder import CorpusEncoder
from glasshouse.text.padding import pad
from glasshouse.text.tokenizer_folder import TOKENIZER, TokenizerFiles, parse, refuse_code
from glasshouse.text.tokenizer_json import (
    SPECIAL_TOKEN_ROLES,
    decoder_kinds,
    find_special_tokens,
    hide_special_tokens,
    merges_of,
    validated,
)
from glasshouse.text.tokenizers_library import decode_byte_fallback, encode_invalid_utf8, library_errors, truncate
from glasshouse.text.utf8 import checked_text, is_invalid_utf8
from glasshouse.text.vocabulary import Vocabulary

if TYPE_CHECKING:
    from torch import Tensor

LONG = 2**19  # characters from which on the corpus encoder is faster, its check included


class Tokenizer:
    """Encodes text to ids and decodes ids to text; `load` reads one from a folder, `train` trains one.

    >>> words = {"type": "WordLevel", "vocab": {"[UNK]": 0, "hello": 1, "world": 2}, "unk_token": "[UNK]"}
    >>> file = {"version": "1.0", "pre_tokenizer": {"type": "Whitespace"}, "model": words}
    >>> tokenizer = Tokenizer.from_json(json.dumps(file))
    >>> tokenizer
    Tokenizer(WordLevel, 3 tokens)
    >>> tokenizer.encode("hello new world")
    [1, 0, 2]
    >>> tokenizer.decode([1, 2])
    'hello world'
    >>> tokenizer.token_to_id("world"), tokenizer.id_to_token(2), len(tokenizer)
    (2, 'world', 3)
    """

    config: JsonDict  # tokenizer_config.json, unchanged
    special_tokens: dict[str, str]  # role -> text of the special token
    special_ids: frozenset[int]
    chat_template: str | None = None  # Jinja source

    def __init__(
        self, tokenizer_json: JsonDict, config: JsonDict, special_tokens_map: JsonDict, special_tokens: dict[str, str]
    ) -> None:
        self.config, self.special_tokens, self._special_map = config, special_tokens, special_tokens_map
        self._kind = tokenizer_json["model"].get("type", "of no kind")
        self._decoders = decoder_kinds(tokenizer_json.get("decoder"))
        # Serialized again: of duplicate keys, the library might read another value than the one that was checked.
        self._text = json.dumps(tokenizer_json, ensure_ascii=False)
        self._rust = self._encoder = tokenizers.Tokenizer.from_str(self._text)
        self._vocabulary = Vocabulary(self._rust, special_tokens)
        self.special_ids = self._vocabulary.special_ids
        if hidden := hide_special_tokens(tokenizer_json, self._vocabulary.special_texts):
            self._encoder = tokenizers.Tokenizer.from_str(json.dumps(hidden))
        self._encoder.encode_special_tokens = True
        self._byte_ids = self._vocabulary.byte_ids() if self._decoders == ["ByteLevel"] else None
        # A normalizer or a prefix space would be applied again after each invalid byte.
        before = json.dumps(tokenizer_json.get("pre_tokenizer"))
        self._takes_any_bytes = not tokenizer_json.get("normalizer") and '"add_prefix_space": true' not in before
        if isinstance(template := config.get("chat_template"), str):
            self.chat_template = template

    @classmethod
    def load(cls, folder: str | Path) -> Tokenizer:
        """Load the tokenizer.json of a folder (or that file), with its config and special tokens map.

        A folder without one may have the vocabulary files of an older tokenizer instead: vocab.txt, vocab.json and
        merges.txt, or a SentencePiece model.
        """
        files = read_folder(Path(folder))
        tokenizer = cls.from_json(files.tokenizer_json, files.config, files.special_tokens_map, files.source)
        if files.chat_template is not None:
            tokenizer.chat_template = files.chat_template
        return tokenizer

    @classmethod
    def from_json(
        cls,
        text: str,
        config: JsonDict | None = None,
        special_tokens_map: JsonDict | None = None,
        source: str = TOKENIZER,
    ) -> Tokenizer:
        """Build a tokenizer from the text of a tokenizer.json, and its config and special tokens map.

        >>> Tokenizer.from_json('{"version": "2.0"}')
        Traceback (most recent call last):
        ...
        glasshouse.errors.StoreError: 'tokenizer.json' is of version '2.0', but only '1.0' is supported; find another.
        """
        config, special_tokens_map = dict(config or {}), dict(special_tokens_map or {})
        refuse_code(config, source)
        tokenizer_json = validated(parse(text, source), source)
        special_tokens = find_special_tokens(special_tokens_map, source) | find_special_tokens(config, source)
        with library_errors(StoreError, f"{source!r} cannot be used"):
            tokenizer = cls(tokenizer_json, config, special_tokens_map, special_tokens)
            around = tokenizer._encoder.encode("").ids
        for number in around:
            if number not in tokenizer._vocabulary.tokens:
                raise StoreError(
                    f"{source!r} adds id {number} to every text, but has no such token; download it again."
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
        column: str = "text",
        errors: Literal["strict", "replace"] = "strict",
        max_words: int = MAX_WORDS,
        progress: tokenizer_training.ProgressCallback = tokenizer_training.no_progress,
    ) -> Tokenizer:
        """Train byte-level BPE on files, folders and globs, or on an iterable of texts, which is streamed once.

        `vocab_size` includes `special_tokens` (role -> text); `pattern` is the pre-tokenization ("gpt2" or "gpt4");
        `column` has the text in jsonl, csv, tsv and parquet files. Beyond `max_words` distinct words the rarest are
        dropped, with a warning.

        >>> tokenizer = Tokenizer.train(texts=["a rose is a rose is a rose"], vocab_size=266)
        >>> tokenizer
        Tokenizer(BPE, 266 tokens)
        >>> tokenizer.decode(tokenizer.encode("a rose, a prose"))
        'a rose, a prose'
        """
        if files is not None and texts is None:
            stream = tokenizer_training.read_texts(files, column, errors, progress)
        elif texts is not None and files is None:
            stream = tokenizer_training.encode_texts(texts)
        else:
            raise InputError("training needs either files or texts; give one of them.")
        table = tokenizer_training.train(stream, vocab_size, pattern, special_tokens, max_words, progress)
        roles = {role: token for role, token in special_tokens.items() if role in SPECIAL_TOKEN_ROLES}
        return cls(table, {}, {}, roles)

    def save(self, folder: str | Path) -> None:
        """Write the files that transformers loads too; each is written atomically."""
        roles = {f"{role}_token": token for role, token in self.special_tokens.items()}
        config = self.config or {"tokenizer_class": "PreTrainedTokenizerFast", **roles}
        TokenizerFiles(self._text, config, self._special_map or roles, self.chat_template).write(folder)

    def to_json(self) -> str:
        """Return the text of its tokenizer.json, which `from_json` reads.

        >>> tokenizer = Tokenizer.train(texts=["a rose is a rose"], vocab_size=266)
        >>> Tokenizer.from_json(tokenizer.to_json()).encode("a rose") == tokenizer.encode("a rose")
        True
        """
        return self._text

    def encode(
        self, text: str | bytes, add_special_tokens: bool = True, *, parse_special_tokens: bool = False
    ) -> list[int]:
        """Encode a text; `add_special_tokens` adds the tokens that the tokenizer puts around every text.

        A special token that is spelled out in the text is encoded as text, unless `parse_special_tokens` is set
        (only for trusted text). A byte-level tokenizer encodes each invalid UTF-8 byte as its own token.
        """
        if self._is_invalid_utf8(text):
            return self._encode_invalid_utf8(text, add_special_tokens, parse_special_tokens)
        checked = checked_text(text)
        if (
            len(checked) >= LONG
            and self._fast[0] is not None
            and not parse_special_tokens
            and not (add_special_tokens and any(self.prefix_suffix_ids))
        ):
            return self.corpus_encoder().encode([checked.encode()])[0].tolist()
        encoder = self._parsing_encoder if parse_special_tokens else self._encoder
        with library_errors(InputError, "the text cannot be encoded"):
            return encoder.encode(checked, add_special_tokens=add_special_tokens).ids

    def encode_batch(
        self, texts: Iterable[str | bytes], add_special_tokens: bool = True, *, max_len: int | None = None
    ) -> list[list[int]]:
        """Encode each text on all cores, truncated to `max_len` ids; special tokens survive truncation."""
        if isinstance(texts, str | bytes):
            raise InputError("texts is a single text; put it in a list, or call encode.")
        texts = list(texts)
        if any(map(self._is_invalid_utf8, texts)):
            return [self.encode(text, add_special_tokens)[:max_len] for text in texts]
        checked = [checked_text(text) for text in texts]
        with library_errors(InputError, "the texts cannot be encoded"):
            # The fast variant computes no offsets.
            encodings = self._encoder.encode_batch_fast(checked, add_special_tokens=add_special_tokens)
        return [one.ids if max_len is None or len(one) <= max_len else truncate(one, max_len) for one in encodings]

    def __call__(
        self, texts: Iterable[str | bytes], add_special_tokens: bool = True, *, max_len: int | None = None
    ) -> dict[str, Tensor]:
        """Encode texts for a model, as `model(**tok(texts))`: `ids` [B, S], padded on the right, and `lengths` [B].

        >>> tokenizer = Tokenizer.train(texts=["a rose is a rose"], vocab_size=266)
        >>> batch = tokenizer(["a rose is a rose", "a rose"])
        >>> batch["ids"].shape, batch["lengths"].tolist()
        (torch.Size([2, 10]), [10, 3])
        """
        rows = self.encode_batch(texts, add_special_tokens, max_len=max_len)
        ids, lengths = pad(rows, self.special_id("pad") or 0)
        return {"ids": ids, "lengths": lengths}

    def encode_chat(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = False, tools: Sequence[JsonDict] = ()
    ) -> EncodedChat:
        """Encode a conversation with the chat template; `add_generation_prompt` ends it where the reply begins.

        `tools` are functions in OpenAI's form that it may call. Nothing in messages or tools becomes a special token.
        """
        if self.chat_template is None:
            raise InputError(
                "the tokenizer has no chat template: its model was not trained on conversations; set "
                "tok.chat_template, or give a tokenizer that has one."
            )
        special = {self._vocabulary.tokens[number]: number for number in self.special_ids}
        result = EncodedChat([], [])
        for segment in segments(
            self.chat_template,
            messages,
            special=special,
            variables={f"{role}_token": token for role, token in self.special_tokens.items()},
            add_generation_prompt=add_generation_prompt,
            tools=tools,
        ):
            text = segment.text
            ids = [special[text]] if segment.special else self.encode(text, add_special_tokens=False)
            result.ids.extend(ids)
            result.assistant_mask.extend([segment.is_assistant] * len(ids))
        return result

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = False) -> str:
        """Decode ids to text."""
        known, skipped = self._vocabulary.checked(ids), self.special_ids if skip_special_tokens else ()
        with library_errors(InputError, "the ids cannot be decoded"):
            return self._rust.decode([number for number in known if number not in skipped], skip_special_tokens=False)

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """Decode ids to bytes, also where they are not valid UTF-8, which `decode` replaces by U+FFFD.

        Exact for byte-level BPE and byte fallback; for other tokenizers the bytes of `decode`.
        """
        known = self._vocabulary.checked(ids)
        if self._decoders == ["ByteLevel"]:
            return self._vocabulary.byte_level_bytes(known)
        if "ByteFallback" not in self._decoders:
            return self.decode(known).encode()
        with library_errors(InputError, "the ids cannot be decoded"):
            return decode_byte_fallback(self._rust.decoder, (self._vocabulary.tokens[number] for number in known))

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (self._text, self.config, self._special_map, self.special_tokens, self.chat_template)

    def __len__(self) -> int:
        return len(self._vocabulary)

    def __repr__(self) -> str:
        return f"Tokenizer({self._kind}, {len(self)} tokens)"

    @property
    def byte_level(self) -> bool:
        """Whether tokens are bytes and every byte has a token, so that encoding is lossless."""
        return self._byte_ids is not None

    @property
    def ids(self) -> Collection[int]:
        """All ids that have a token; some vocabularies have gaps."""
        return self._vocabulary.tokens.keys()

    def id_to_token(self, id: int) -> str:  # noqa: A002 - the name that tokenizers uses
        """Return the token of an id, as spelled in the vocabulary."""
        return self._vocabulary.tokens[self._vocabulary.checked([id])[0]]

    def token_to_id(self, token: str) -> int | None:
        """Return the id of a token, or None if it is not in the vocabulary."""
        return self._rust.token_to_id(token)

    def special_id(self, role: str) -> int | None:
        """Return the id of the special token with a role ("bos", "eos", "pad" and so on), or None."""
        return self._vocabulary.special_id(role, self.special_tokens)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256, in hexadecimal, of what determines the ids: tokenizer.json without truncation and padding."""
        tokenizer_json = json.loads(self._text)
        del tokenizer_json["truncation"], tokenizer_json["padding"]
        return hashlib.sha256(json.dumps(tokenizer_json, sort_keys=True).encode()).hexdigest()

    def corpus_encoder(self) -> CorpusEncoder:
        """Return an encoder for whole corpora, which adds no special tokens and uses gigatoken if possible.

        >>> encoder = Tokenizer.train(texts=["to be"], vocab_size=263).corpus_encoder()
        >>> ids, ends = encoder.encode([b"to", b"be"])
        >>> ends.tolist()
        [2, 4]
        """
        fast, reason = self._fast
        return CorpusEncoder(fast, lambda texts: self.encode_batch(texts, add_special_tokens=False), reason)

    @cached_property
    def _fast(self) -> tuple[Any, str]:
        if self._encoder is not self._rust:
            return None, "gigatoken could produce special tokens from text here"
        return corpus_encoder.load_gigatoken(self._text)

    @cached_property
    def merge_ranks(self) -> dict[Pair, int]:
        """The merges of a byte-level BPE, pair of bytes -> rank; empty for other kinds."""
        pairs = [] if self._byte_ids is None else merges_of(json.loads(self._text))
        return {(unicode_to_bytes(left), unicode_to_bytes(right)): rank for rank, (left, right) in enumerate(pairs)}

    def pretokenize(self, text: str) -> list[bytes]:
        """Pre-tokenize: split a text into the words that no merge crosses; for byte-level tokenizers only.

        >>> Tokenizer.train(texts=["to be"], vocab_size=263).pretokenize("not to be")
        [b'not', b' to', b' be']
        """
        if self._byte_ids is None:
            raise InputError(f"{self!r} is not byte-level, so it has no merges to show; give a byte-level BPE.")
        return [unicode_to_bytes(word) for word, _ in self._rust.pre_tokenizer.pre_tokenize_str(checked_text(text))]

    @cached_property
    def _parsing_encoder(self) -> tokenizers.Tokenizer:
        return tokenizers.Tokenizer.from_str(self._text)

    def _is_invalid_utf8(self, text: str | bytes) -> TypeGuard[bytes]:
        """Return whether these are invalid UTF-8 bytes that the tokenizer can still encode."""
        return self._byte_ids is not None and self._takes_any_bytes and is_invalid_utf8(text)

    def _encode_invalid_utf8(self, text: bytes, add_special_tokens: bool, parse_special_tokens: bool) -> list[int]:
        assert self._byte_ids
        encoder = self._parsing_encoder if parse_special_tokens else self._encoder
        ids = encode_invalid_utf8(encoder, text, self._byte_ids)
        before, after = self.prefix_suffix_ids if add_special_tokens else ([], [])
        return before + ids + after

    @cached_property
    def prefix_suffix_ids(self) -> tuple[list[int], list[int]]:
        """The ids that `encode` adds before and after every text with `add_special_tokens`."""
        one = self._encoder.encode("a")
        inside = [position for position, special in enumerate(one.special_tokens_mask) if not special]
        return (one.ids[: inside[0]], one.ids[inside[-1] + 1 :]) if inside else ([], [])


def _rebuild(
    text: str, config: JsonDict, special_tokens_map: JsonDict, special_tokens: dict[str, str], template: str | None
) -> Tokenizer:
    """Rebuild a copied or pickled tokenizer: the library's own pickle loses `encode_special_tokens`."""
    tokenizer = Tokenizer(json.loads(text), config, special_tokens_map, special_tokens)
    tokenizer.chat_template = template
    return tokenizer
