"""A tokenizer as llama.cpp has it: its tokens, their kinds, the merges, and the name of its pre-tokenizer."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from glasshouse.errors import ConfigError
from glasshouse.text import Tokenizer
from glasshouse.text.bpe.pretokenizer import PATTERNS

ALONE = "write the model without it, by gh.hub.export_gguf(model, None, ...)"
NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5  # kinds of tokens
QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# By the expression that splits a text, and whether whole words are taken without merges.
PRE_TOKENIZERS = {
    (PATTERNS["gpt2"], False): "gpt-2",
    (PATTERNS["gpt4"], False): "dbrx",
    (PATTERNS["gpt4"], True): "llama-bpe",
    (QWEN2, False): "qwen2",
}


@dataclass(frozen=True)
class Vocabulary:
    """The tokens by id, with those of rows that the tokenizer has no token for."""

    tokens: list[str]
    kinds: list[int]
    merges: list[str]
    pre_tokenizer: str
    first: int | None  # the token that is put before every text


def read_vocabulary(tok: Tokenizer, size: int) -> Vocabulary:
    """Return the vocabulary of a byte-level BPE tokenizer, for a model with `size` rows; refuse any other by name.

    >>> vocabulary = read_vocabulary(Tokenizer.train(texts=["a rose is a rose"], vocab_size=266), 270)
    >>> vocabulary.pre_tokenizer, vocabulary.first, vocabulary.tokens[-2:]
    ('gpt-2', None, ['[PAD268]', '[PAD269]'])
    """
    table = json.loads(tok.to_json())
    model = table["model"]
    if model.get("type") != "BPE" or model.get("byte_fallback"):
        raise ConfigError(
            f"the tokenizer is {model.get('type')}{' with byte fallback' if model.get('byte_fallback') else ''}, but "
            f"only byte-level BPE is written to GGUF; {ALONE}."
        )
    if (normalizer := table.get("normalizer")) not in (None, {"type": "NFC"}):
        raise ConfigError(f"llama.cpp has no normalizer {normalizer['type']} for byte-level BPE; remove it.")
    tokens = [f"[PAD{number}]" for number in range(size)]
    kinds = [UNUSED] * size
    for text, number in model["vocab"].items():
        tokens[number], kinds[number] = text, NORMAL
    for added in table.get("added_tokens", []):
        if extra := [name for name in ("lstrip", "rstrip", "single_word") if added.get(name)]:
            raise ConfigError(f"the token {added['content']!r} has {extra[0]}, which llama.cpp does not have.")
        tokens[added["id"]] = added["content"]
        kinds[added["id"]] = CONTROL if added["special"] else USER_DEFINED
    merges = [one if isinstance(one, str) else " ".join(one) for one in model["merges"]]
    return Vocabulary(tokens, kinds, merges, _pre_tokenizer(table), _first(tok))


def _pre_tokenizer(table: dict[str, Any]) -> str:
    """Return llama.cpp's name of a pre-tokenizer."""
    found = table.get("pre_tokenizer") or {"type": "none"}
    parts = found["pretokenizers"] if found["type"] == "Sequence" else [found]
    match parts:
        case [{"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}]:
            expression = PATTERNS["gpt2"]
        case [
            {"type": "Split", "pattern": {"Regex": str(expression)}, "behavior": "Isolated", "invert": False},
            {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
        ]:
            pass
        case _:
            names = ", ".join(part["type"] for part in parts)
            raise ConfigError(f"llama.cpp has no pre-tokenizer {names}; {ALONE}.")
    name = PRE_TOKENIZERS.get((expression, bool(table["model"].get("ignore_merges"))))
    if name is None:
        raise ConfigError(f"llama.cpp has no pre-tokenizer that splits at {expression!r}; {ALONE}.")
    return name


def _first(tok: Tokenizer) -> int | None:
    """Return the token before every text."""
    before, after = tok.prefix_suffix_ids
    if len(before) > 1 or after:
        raise ConfigError(
            f"the tokenizer puts {len(before)} tokens before a text and {len(after)} after it, but llama.cpp at most "
            "one before it; remove its post-processor."
        )
    return before[0] if before else None
