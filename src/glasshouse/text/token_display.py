"""Tokens as they are displayed, on the page, in a notebook and on a terminal."""

from __future__ import annotations

from glasshouse.escaping import show_whitespace
from glasshouse.text.tokenizer import Tokenizer


def visible_token(tok: Tokenizer, number: int) -> str:
    """Return the token of an id with whitespace visible: its bytes if byte-level, else its spelling.

    >>> tok = Tokenizer.train(texts=["to be or not to be"], vocab_size=263)
    >>> [visible_token(tok, number) for number in tok.encode("to be")]
    ['t', 'o', '␣', 'b', 'e']
    """
    return show_whitespace(tok.decode_bytes([number]) if tok.byte_level else tok.id_to_token(number))
