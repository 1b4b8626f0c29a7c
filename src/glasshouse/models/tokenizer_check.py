"""Check that a tokenizer is the one a model was trained with."""

from __future__ import annotations

from glasshouse.errors import InputError, distinct
from glasshouse.models.decoder import Decoder
from glasshouse.models.encoder import Encoder
from glasshouse.models.seq2seq import Seq2Seq
from glasshouse.text import Tokenizer


def check_tokenizer(model: Decoder | Encoder | Seq2Seq, tok: Tokenizer, name: str = "the tokenizer") -> None:
    """Raise InputError for the tokenizer of another model, by its fingerprint or its size.

    A newly built model has no fingerprint and accepts any tokenizer that fits its vocab_size.

    >>> import glasshouse as gh
    >>> model = gh.build(gh.preset("tiny-decoder", vocab_size=263))
    >>> check_tokenizer(model, gh.Tokenizer.train(texts=["to be"], vocab_size=263))
    >>> check_tokenizer(model, gh.Tokenizer.train(texts=["to be"], vocab_size=264))
    Traceback (most recent call last):
    ...
    glasshouse.errors.InputError: the tokenizer has 264 tokens, but vocab_size is 263, so it is another model's.
    """
    if not isinstance(tok, Tokenizer):
        raise InputError(f"{name} is a {type(tok).__name__}, but it must be a gh.Tokenizer, as gh.load returns it.")
    if len(tok) > model.spec.vocab_size:
        raise InputError(
            f"{name} has {len(tok)} tokens, but vocab_size is {model.spec.vocab_size}, so it is another model's."
        )
    if model.tokenizer_fingerprint not in (None, tok.fingerprint):
        given, known = distinct(tok.fingerprint, str(model.tokenizer_fingerprint))
        raise InputError(
            f"{name} ({given}) is not the one that the model was trained with ({known}); use the one saved with the "
            "model."
        )
