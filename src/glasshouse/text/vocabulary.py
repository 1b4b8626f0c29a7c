"""The vocabulary of a tokenizer: ids and tokens, and which of them are special."""

from __future__ import annotations

import operator
import reprlib
from collections.abc import Iterable, Mapping
from typing import cast

import tokenizers

from glasshouse.config import did_you_mean
from glasshouse.errors import InputError
from glasshouse.text.bpe.byte_level import BYTE_TO_UNICODE, unicode_to_bytes
from glasshouse.text.tokenizer_json import SPECIAL_TOKEN_ROLES


class Vocabulary:
    """The tokens of a tokenizer of the tokenizers library; `special_tokens` maps roles to their texts."""

    def __init__(self, rust: tokenizers.Tokenizer, special_tokens: Mapping[str, str]) -> None:
        self.ids: dict[str, int] = rust.get_vocab()
        self.tokens = {number: token for token, number in self.ids.items()}
        added = rust.get_added_tokens_decoder()
        self.added = frozenset(added)
        special = {token.content for token in added.values() if token.special}
        self.special_texts = special.union(special_tokens.values())
        self.special_ids = frozenset(n for n, token in self.tokens.items() if token in self.special_texts)

    def __len__(self) -> int:
        return max(self.tokens, default=-1) + 1

    def byte_ids(self) -> list[int] | None:
        """Return the id of each byte; None if a byte has no token."""
        ids = [self.ids.get(BYTE_TO_UNICODE[byte]) for byte in range(256)]
        return None if None in ids else cast(list[int], ids)

    def special_id(self, role: str, special_tokens: Mapping[str, str]) -> int | None:
        """Return the id of the special token with a role, or None if there is none."""
        if role not in SPECIAL_TOKEN_ROLES:
            raise InputError(
                f"{role!r} is not the role of a special token; {did_you_mean(role, SPECIAL_TOKEN_ROLES)}"
            )
        return self.ids.get(special_tokens[role]) if role in special_tokens else None

    def checked(self, ids: Iterable[int]) -> list[int]:
        """Return ids as a list; raise InputError for what is not an id of the vocabulary."""
        try:
            numbers = [operator.index(number) for number in ids]
        except TypeError:
            raise InputError(f"ids is {reprlib.repr(ids)}, but it must be a list of whole numbers.") from None
        for number in numbers:
            if number not in self.tokens:
                raise InputError(
                    f"id {number} is not in the vocabulary; give ids below {len(self)}, the vocabulary size."
                )
        return numbers

    def byte_level_bytes(self, ids: Iterable[int]) -> bytes:
        """Return the bytes of ids of a byte-level tokenizer."""
        return b"".join(
            self.tokens[number].encode() if number in self.added else unicode_to_bytes(self.tokens[number])
            for number in ids
        )
