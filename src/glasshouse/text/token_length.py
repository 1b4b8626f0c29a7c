"""How much text a token can stand for, from which the length of a text in bytes tells that it cannot fit a model."""

from __future__ import annotations

import json

from glasshouse.config import JsonDict
from glasshouse.text.tokenizer import Tokenizer

NFC_SHRINKS = 4  # times at most, in bytes: three for the sign of Kelvin, which becomes a K, and more for ΐ


def max_token_bytes(tok: Tokenizer) -> int | None:
    """Return the most bytes of a text that one token of it stands for; None where any number may vanish in one.

    That is known of byte-level BPE whose other steps leave nothing out: not of tokenizers with a token for unknown
    words, or that drop white space.

    >>> max_token_bytes(Tokenizer.train(texts=["to be"] * 9, vocab_size=265))
    13
    """
    tokenizer_json = json.loads(tok._text)
    normalizer = tokenizer_json.get("normalizer") or {"type": None}
    if (
        not tok.byte_level
        or tokenizer_json["model"].get("type") != "BPE"
        or normalizer["type"] not in (None, "NFC")
        or not _keeps_all(tokenizer_json.get("pre_tokenizer"))
        or any(one.get("lstrip") or one.get("rstrip") for one in tokenizer_json.get("added_tokens", ()))
    ):
        return None
    longest = max(len(tok.decode_bytes([number])) for number in tok.ids)
    return longest * NFC_SHRINKS if normalizer["type"] else longest


def _keeps_all(step: JsonDict | None) -> bool:
    """Whether a pre-tokenizer drops nothing of a text."""
    match step:
        case None | {"type": "ByteLevel" | "Digits"}:
            return True
        case {"type": "Split" | "Punctuation", "behavior": behavior}:
            return behavior != "Removed"
        case {"type": "Sequence", "pretokenizers": steps}:
            return all(map(_keeps_all, steps))
        case _:
            return False
