"""Training a tokenizer: a corpus and a size in, the tables of a tokenizer.json out."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from glasshouse.config import JsonDict
from glasshouse.errors import InputError
from glasshouse.text import fast_bpe, pretokenizer, sources
from glasshouse.text.byte_level import INITIAL_ALPHABET, bytes_to_unicode

# Every objective finds its tokens in a vocabulary that was trained without a word about them. A key that is one of
# transformers' roles becomes that; `<|endoftext|>` ends a document and starts the next.
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

CHAT_TOKENS = ("system", "user", "assistant", "end")  # what our chat template is written with

ProgressCallback = Callable[[str, int, int], None]  # what is being done, how far it is, how far it goes


def no_progress(stage: str, done: int, total: int) -> None:
    """Show no progress."""


def read_texts(
    paths: str | Path | Iterable[str | Path],
    field: str,
    errors: Literal["strict", "replace"],
    progress: ProgressCallback,
) -> Iterator[bytes]:
    """Read the texts of files, folders and globs."""
    found = sources.find_files(paths)
    total, done = sum(map(sources.file_size, found)), 0

    def on_bytes(number: int) -> None:
        nonlocal done
        done += number
        progress("reading", done, total)

    return (piece.text for piece in sources.read_chunks(found, field=field, errors=errors, on_bytes=on_bytes))


def train(
    texts: Iterable[bytes],
    vocab_size: int,
    pattern: str,
    special: Mapping[str, str],
    limit: int,
    progress: ProgressCallback = no_progress,
) -> JsonDict:
    """Learn merges from texts, and return the tokenizer.json with special tokens first, then bytes, then merges."""
    controls = list(dict.fromkeys(special.values()))
    least = len(controls) + len(INITIAL_ALPHABET)
    if vocab_size < least:
        raise InputError(
            f"vocab_size is {vocab_size}, but {len(INITIAL_ALPHABET)} bytes and {len(controls)} special tokens need {least}."
        )
    for token in controls:
        # No merge crosses the border of a word: a token of several words can never be made from text.
        if len(pretokenizer.split(token, pattern)) < 2:
            raise InputError(
                f"the special token {token!r} is a word that texts can hold; put it in brackets, as in '<|end|>'."
            )
    counted = pretokenizer.count(texts, pattern, limit)
    if not counted.counts:
        raise InputError("there is no text to learn from; give files or texts that are not empty.")
    if counted.dropped:
        share = counted.dropped / counted.total
        warnings.warn(
            f"words too rare to be held, {share:.2%} of all, were left out, so that merges are not exact; "
            f"raise the limit of {limit} distinct words to count them.",
            stacklevel=3,
        )
    vocab = {token: number for number, token in enumerate(controls)}
    vocab |= {bytes_to_unicode(bytes([byte])): len(vocab) + number for number, byte in enumerate(INITIAL_ALPHABET)}
    spelling = {bytes([byte]): bytes_to_unicode(bytes([byte])) for byte in INITIAL_ALPHABET}
    learned = []
    for (left, right), _ in fast_bpe.learn(counted.counts, vocab_size - len(controls)):
        learned.append([spelling[left], spelling[right]])
        spelling[left + right] = spelling[left] + spelling[right]
        vocab[spelling[left + right]] = len(vocab)
        progress("merging", len(vocab), vocab_size)
    if len(vocab) < vocab_size:
        warnings.warn(
            f"the text has no more pairs to merge, so the vocabulary has {len(vocab)} tokens, not {vocab_size}.",
            stacklevel=3,
        )
    return build_tokenizer_json(vocab, learned, pattern, controls)


def build_tokenizer_json(
    vocab: Mapping[str, int], learned: list[list[str]], pattern: str, controls: list[str]
) -> JsonDict:
    """Return a tokenizer.json of byte-level BPE, as the tokenizers library writes it."""
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": pattern == "gpt2",
    }
    before: JsonDict = byte_level  # whose own expression is GPT-2's
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
            "merges": learned,
        },
    }
