"""A byte-level BPE tokenizer as the page encodes and decodes with it in the browser."""

from __future__ import annotations

import json

from glasshouse.config import JsonDict
from glasshouse.errors import InputError
from glasshouse.page import serialization
from glasshouse.text import Tokenizer
from glasshouse.text.bpe.pretokenizer import PATTERNS
from glasshouse.text.tokenizer_json import hide_special_tokens, merges_of

BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False}


def describe_tokenizer(tok: Tokenizer) -> JsonDict:
    """Return what the page needs of a tokenizer: ids of bytes, merges by ids, and each token's bytes and look.

    >>> made = describe_tokenizer(Tokenizer.train(texts=["to be or not to be"], vocab_size=263))
    >>> made["pattern"], len(made["bytes"]), made["normalizer"]
    ('gpt2', 256, None)
    """
    table = json.loads(tok.to_json())
    _check(tok, table)
    pattern = _pattern(table.get("pre_tokenizer"))
    specials = {tok.id_to_token(number) for number in tok.special_ids}
    merges = merges_of(hide_special_tokens(table, specials) or table)
    vocab = table["model"]["vocab"]
    before, after = tok.prefix_suffix_ids
    return {
        "pattern": pattern,
        "normalizer": (table.get("normalizer") or {}).get("type"),
        "ignore_merges": bool(table["model"].get("ignore_merges")),
        "bytes": tok._byte_ids,
        "merges": [[vocab[left], vocab[right], vocab[left + right]] for left, right in merges],
        "before": before,
        "after": after,
        "tokens": [_token(tok, number) for number in range(len(tok))],
    }


def _token(tok: Tokenizer, number: int) -> JsonDict:
    """Return a token as the page shows it, with its bytes as the characters of those numbers."""
    (shown,) = serialization.describe_tokens([number], tok)
    return shown | {"bytes": tok.decode_bytes([number]).decode("latin-1") if number in tok.ids else ""}


def _pattern(step: JsonDict | None) -> str:
    """Return the name of the pattern by which texts are split into words; raise InputError for another way."""
    known = {json.dumps(_splits(name)): name for name in PATTERNS}
    steps = (step or {}).get("pretokenizers", [step])
    found = known.get(json.dumps([_without_offsets(one) for one in steps]))
    if found is None:
        kinds = ", ".join((one or {}).get("type", "none") for one in steps)
        raise InputError(
            f"the tokenizer splits texts by {kinds} in a way that a live page does not know; save a snapshot instead."
        )
    return found


def _splits(name: str) -> list[JsonDict]:
    """Return how a tokenizer.json says that texts are split by a pattern."""
    if name == "gpt2":
        return [{**BYTE_LEVEL, "use_regex": True}]
    split = {"type": "Split", "pattern": {"Regex": PATTERNS[name]}, "behavior": "Isolated", "invert": False}
    return [split, {**BYTE_LEVEL, "use_regex": False}]


def _without_offsets(step: JsonDict | None) -> JsonDict:
    return {name: value for name, value in (step or {}).items() if name != "trim_offsets"}


def _check(tok: Tokenizer, table: JsonDict) -> None:
    """Raise InputError for what the page's tokenizer does not do."""
    model = table["model"]
    normalizer = (table.get("normalizer") or {}).get("type")
    suffixes = [name for name in ("continuing_subword_prefix", "end_of_word_suffix") if model.get(name)]
    added = [one["content"] for one in table.get("added_tokens") or () if not one["special"]]
    if model.get("type") != "BPE" or not tok.byte_level or suffixes:
        why = f"is {model.get('type')}" if model.get("type") != "BPE" else "is no byte-level BPE"
    elif normalizer not in (None, "NFC"):
        why = f"normalizes by {normalizer}"
    elif added:
        why = f"finds the added token {added[0]!r} in texts"
    else:
        return
    raise InputError(f"the tokenizer {why}, but a live page needs byte-level BPE; save a snapshot instead.")
