"""Trains a byte-level BPE tokenizer and builds its tokenizer.json."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from glasshouse.config import JsonDict
from glasshouse.errors import InputError
from glasshouse.text import sources
from glasshouse.text.bpe import fast as fast_bpe
from glasshouse.text.bpe import pretokenizer
from glasshouse.text.bpe.byte_level import INITIAL_ALPHABET, bytes_to_unicode
from glasshouse.text.utf8 import checked_text

# The defaults cover every objective. A key that is one of transformers' roles gets that role; `<|endoftext|>` ends a
# document and starts the next.
DEFAULT_SPECIAL_TOKENS: Mapping[str, str] = {
    "bos": "<|endoftext|>",
    "eos": "<|endoftext|>",
    "pad": "<|pad|>",
    "mask": "<|mask|>",
    "system": "<|system|>",
    "user": "<|user|>",
    "assistant": "<|assistant|>",
    "end": "<|end|>",
}


ProgressCallback = Callable[[str, int, int], None]  # stage, done, total


def no_progress(stage: str, done: int, total: int) -> None:
    """Ignore progress."""


def encode_texts(texts: Iterable[str | bytes]) -> Iterator[bytes]:
    """Yield texts as bytes."""
    if isinstance(texts, str | bytes):
        raise InputError("texts is a single text; put it in a list.")
    return (checked_text(text).encode() for text in texts)


def read_texts(
    files: str | Path | Iterable[str | Path],
    column: str,
    errors: Literal["strict", "replace"],
    progress: ProgressCallback,
) -> Iterator[bytes]:
    """Yield the texts of files, folders and globs."""
    found = sources.find_files(files)
    total, done = sum(map(sources.file_size, found)), 0

    def on_bytes(number: int) -> None:
        nonlocal done
        done += number
        progress("reading", done, total)

    return (chunk.text for chunk in sources.read_chunks(found, column=column, errors=errors, on_bytes=on_bytes))


def train(
    texts: Iterable[bytes],
    vocab_size: int,
    pattern: str,
    special_tokens: Mapping[str, str],
    max_words: int,
    progress: ProgressCallback = no_progress,
) -> JsonDict:
    """Train BPE on texts, and return a tokenizer.json: special tokens first, then bytes, then merges."""
    controls = list(dict.fromkeys(special_tokens.values()))
    smallest = len(controls) + len(INITIAL_ALPHABET)
    if vocab_size < smallest:
        raise InputError(
            f"vocab_size is {vocab_size}, but {len(INITIAL_ALPHABET)} bytes and {len(controls)} special tokens need "
            f"{smallest}."
        )
    for token in controls:
        # No merge crosses a word boundary: a token of several words can never be produced from text.
        if len(pretokenizer.split(token, pattern)) < 2:
            raise InputError(
                f"the special token {token!r} is a word that texts can contain; put it in brackets, as in '<|end|>'."
            )
    counted = pretokenizer.count(texts, pattern, max_words)
    if not counted.counts:
        raise InputError("there is no text to train on; give files or texts that are not empty.")
    if counted.dropped:
        share = counted.dropped / counted.total
        warnings.warn(
            f"the rarest words, {share:.2%} of all, were dropped to save memory, so merges are approximate; "
            f"raise max_words ({max_words} distinct words) to count them.",
            stacklevel=3,
        )
    vocab = {token: number for number, token in enumerate(controls)}
    vocab |= {bytes_to_unicode(bytes([byte])): len(vocab) + number for number, byte in enumerate(INITIAL_ALPHABET)}
    spelling = {bytes([byte]): bytes_to_unicode(bytes([byte])) for byte in INITIAL_ALPHABET}
    merges = []
    for (left, right), _ in fast_bpe.learn(counted.counts, vocab_size - len(controls)):
        merges.append([spelling[left], spelling[right]])
        spelling[left + right] = spelling[left] + spelling[right]
        vocab[spelling[left + right]] = len(vocab)
        progress("merging", len(vocab), vocab_size)
    if len(vocab) < vocab_size:
        warnings.warn(
            f"the text has no more pairs to merge, so the vocabulary has {len(vocab)} tokens, not {vocab_size}.",
            stacklevel=3,
        )
    return build_tokenizer_json(vocab, merges, pattern, controls)


def build_tokenizer_json(
    vocab: Mapping[str, int], merges: list[list[str]], pattern: str, controls: list[str]
) -> JsonDict:
    """Return the tokenizer.json of a byte-level BPE, in the tokenizers library's format."""
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": pattern == "gpt2",
    }
    before: JsonDict = byte_level  # its built-in regex is GPT-2's
    if pattern != "gpt2":
        split = {
            "type": "Split",
            "pattern": {"Regex": pretokenizer.expression(pattern)},
            "behavior": "Isolated",
            "invert": False,
        }
        before = {"type": "Sequence", "pretokenizers": [split, byte_level]}
    flags: dict[str, Any] = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": vocab[text], "content": text, **flags, "special": True} for text in controls],
        "normalizer": None,
        "pre_tokenizer": before,
        "post_processor": None,
        "decoder": {**byte_level, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": dict(vocab),
            "merges": merges,
        },
    }
