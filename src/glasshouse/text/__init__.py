"""Tokenizers: byte-level BPE trained here, and any published tokenizer.json."""

from glasshouse.text.token_text import visible_token
from glasshouse.text.tokenizer import Tokenizer as Tokenizer

__all__ = ["Tokenizer", "visible_token"]
