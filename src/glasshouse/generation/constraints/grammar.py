"""Grammars for constrained decoding: JSON, a JSON schema, a regular expression or a context-free grammar.

llguidance, an optional dependency, computes which tokens may come next; it is imported when a grammar is made.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Collection, Mapping
from typing import Any
from weakref import WeakKeyDictionary, ref

import numpy as np
import torch
from torch import Tensor

from glasshouse.errors import InputError
from glasshouse.generation.constraints.compiler import TRUSTED_LIMITS, Kind, make_matcher, make_tokenizer, one_line
from glasshouse.generation.constraints.constraint import TOO_COMPLEX
from glasshouse.text import Tokenizer

ANY_OBJECT = '{"type": "object"}'


class Grammar:
    """What a text may be: the constraint of any number of requests.

    >>> import glasshouse as gh
    >>> tok = gh.Tokenizer.train(texts=["to be or not to be"], vocab_size=270)
    >>> model = gh.build(gh.preset("tiny-decoder", vocab_size=270))
    >>> question = gh.generation.Grammar.regex(tok, "to be( or not to be)?")
    >>> gh.generate(model, tok, "?", constraint=question)[0].text in ("to be", "to be or not to be")
    True
    """

    def __init__(self, tok: Tokenizer, kind: Kind, text: str, limits: Mapping[str, int] | None = None) -> None:
        check_installed()
        self._tokenizer = _library_tokenizer(tok)
        try:
            self._matcher = make_matcher(self._tokenizer, kind, text, limits or TRUSTED_LIMITS)
        except ValueError as error:
            raise InputError(f"the {kind.replace('_', ' ')} cannot be used: {one_line(str(error))}.") from None

    @classmethod
    def json_schema(cls, tok: Tokenizer, schema: Mapping[str, Any] | str = ANY_OBJECT) -> Grammar:
        """Return the grammar of JSON that a schema (a dict, or its text) describes; without one, of any object."""
        return cls(tok, "json_schema", schema if isinstance(schema, str) else json.dumps(schema))

    @classmethod
    def regex(cls, tok: Tokenizer, pattern: str) -> Grammar:
        """Return the grammar of texts that a regular expression matches as a whole."""
        return cls(tok, "regex", pattern)

    @classmethod
    def context_free(cls, tok: Tokenizer, text: str) -> Grammar:
        """Return a context-free grammar, written as for Lark or as for llama.cpp (GBNF)."""
        return cls(tok, "grammar", text)

    def start(self, vocab_size: int, end_ids: Collection[int]) -> GrammarState:
        """Return the state before the first token."""
        return GrammarState(self._matcher.deep_copy(), self._tokenizer.vocab_size - 1, vocab_size, end_ids)


class GrammarState:
    """Where one sequence is in a grammar."""

    def __init__(self, matcher: Any, n_tokens: int, vocab_size: int, end_ids: Collection[int]) -> None:  # noqa: ANN401
        self._matcher, self._n_tokens, self._vocab_size = matcher, n_tokens, vocab_size
        self._end_ids = sorted(end_ids)

    @property
    def complete(self) -> bool:
        """Whether nothing but an end token may follow."""
        return self._matcher.is_stopped() and not self._matcher.is_error()

    def allowed(self) -> Tensor:
        """Return which tokens may come next, as bool [V]."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        self._check_work()
        allowed = torch.zeros(self._vocab_size, dtype=torch.bool)
        found = np.unpackbits(bits, count=self._n_tokens, bitorder="little")
        allowed[: self._n_tokens] = torch.from_numpy(found).bool()
        allowed[self._end_ids] = self._matcher.is_accepting()
        return allowed

    def accept(self, token: int) -> bool:
        """Advance by a token; return False if it was not allowed."""
        if token in self._end_ids:
            return self._matcher.is_accepting()
        if self._matcher.consume_token(token):
            return True
        self._check_work()
        return False

    def _check_work(self) -> None:
        """Raise if the library has given up at one of its limits."""
        if self._matcher.is_error():
            reason = one_line(self._matcher.get_error())
            raise InputError(f"{TOO_COMPLEX} ({reason}); simplify it.")


def check_installed() -> None:
    """Raise the error that says how to install the library."""
    if importlib.util.find_spec("llguidance") is None:
        raise InputError(
            "grammars and JSON schemas need llguidance; install it with pip install 'glasshouse[structured]'."
        )


_tokenizers: WeakKeyDictionary[Tokenizer, Any] = WeakKeyDictionary()


def _library_tokenizer(tok: Tokenizer) -> Any:  # noqa: ANN401 - the library's tokenizer
    if tok not in _tokenizers:
        own = ref(tok)  # the value of a weak dictionary must not keep its key alive

        def encode(text: bytes) -> list[int]:
            there = own()
            return [] if there is None else there.encode(text, add_special_tokens=False)

        _tokenizers[tok] = make_tokenizer(token_bytes(tok), encode if tok.byte_level else None)
    return _tokenizers[tok]


def token_bytes(tok: Tokenizer) -> list[bytes]:
    """Return the bytes that each token adds to a text; none for special tokens, and for ids without a token.

    >>> tok = Tokenizer.train(texts=["to be"], vocab_size=263)
    >>> token_bytes(tok)[tok.encode("be")[0]]
    b'b'
    """
    ids = set(tok.ids) - tok.special_ids
    if tok.byte_level:
        return [tok.decode_bytes([number]) if number in ids else b"" for number in range(len(tok))]
    before = tok.encode("a", add_special_tokens=False)  # at the beginning of a text some decoders drop a space
    start = len(tok.decode_bytes(before))
    return [tok.decode_bytes([*before, number])[start:] if number in ids else b"" for number in range(len(tok))]
