"""Tokens as text: how they are displayed, and how much text one can stand for."""

from __future__ import annotations

import json

from glasshouse.config import JsonDict
from glasshouse.escaping import show_whitespace
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


def visible_token(tok: Tokenizer, number: int) -> str:
    """Return the token of an id with whitespace visible: its bytes if byte-level, else its spelling.

    >>> tok = Tokenizer.train(texts=["to be or not to be"], vocab_size=263)
    >>> [visible_token(tok, number) for number in tok.encode("to be")]
    ['t', 'o', '␣', 'b', 'e']
    """
    return show_whitespace(tok.decode_bytes([number]) if tok.byte_level else tok.id_to_token(number))
