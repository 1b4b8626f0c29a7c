"""Text to ids and back: tokenizers that are trained here, and those of published models as they are."""

from glasshouse.text.tokenizer import Tokenizer as Tokenizer

__all__ = ["Tokenizer"]
