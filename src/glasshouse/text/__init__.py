"""Text to ids and back: the tokenizers of published models, used as they are."""

from glasshouse.text.tokenizer import Tokenizer as Tokenizer

__all__ = ["Tokenizer"]
