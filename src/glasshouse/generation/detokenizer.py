"""Incremental detokenization with stop strings.

Text is returned once no later token can change it: whole characters, and nothing that may become a stop string.
"""

from __future__ import annotations

import codecs
from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

from glasshouse.text import Tokenizer
from glasshouse.text.tokenizer_json import BYTE_FALLBACK

REPLACEMENT = "\ufffd"  # the replacement character: an incomplete or invalid one
CONTEXT = 8  # tokens decoded together with a new one: more bytes than a character has


class Detokenizer:
    r"""Turns the ids of one generation into text, one at a time, and stops at the first stop string.

    Special tokens, and ids outside the vocabulary, add no text. Of several stop strings the one that begins first
    counts, however the text is split into tokens.

    >>> tokenizer = Tokenizer.train(texts=["to be"], vocab_size=263)  # every token is one byte
    >>> detokenizer = Detokenizer(tokenizer, stop=["\n\n"])
    >>> [detokenizer.add(token) for token in tokenizer.encode("né\no\n\nto")]
    ['n', '', 'é', '', '\no', '', '', '', '']
    >>> detokenizer.text, detokenizer.stopped, detokenizer.n_kept
    ('né\no', True, 5)

    Text held back for a stop string that did not come is returned at the end.

    >>> detokenizer = Detokenizer(tokenizer, stop=["\n\n"])
    >>> [detokenizer.add(token) for token in tokenizer.encode("to\n")], detokenizer.finish()
    (['t', 'o', ''], '\n')
    """

    stopped: bool  # a stop string was found; the text ends right before it
    n_kept: int  # tokens entirely before the stop string; without one, all

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        self.stopped, self.n_kept = False, 0
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._longest = max(map(len, self._stop), default=0)
        self._decoder: _ByteDecoder | _WindowDecoder = (
            _ByteDecoder(tokenizer) if tokenizer.byte_level else _WindowDecoder(tokenizer)
        )
        self._pieces: list[str] = []  # returned text
        self._pending = ""  # final, but possibly part of a stop string
        self._n_chars = 0  # characters returned or pending
        self._ends: list[
            int
        ] = []  # where each token's text ends, if it has any; a shared character is the last token's
        self._token_indices: list[int] = []  # how many tokens came before each of those

    @property
    def text(self) -> str:
        """All text returned so far."""
        return "".join(self._pieces)

    def add(self, token: int) -> str:
        """Add a token and return the text that became final; "" once a stop string was found."""
        if self.stopped:
            return ""
        self.n_kept += 1
        if token not in self._tokenizer.ids or token in self._tokenizer.special_ids:
            return ""
        self._token_indices.append(self.n_kept - 1)
        self._add_pending(self._decoder.add(token))
        return self._release(self._maybe_stop())

    @property
    def n_final(self) -> int:
        """How many of the tokens so far have all of their text returned, so that no stop string can drop them."""
        if self.stopped:
            return self.n_kept
        complete = bisect_right(self._ends, self._n_chars - len(self._pending))
        return self._token_indices[complete] if complete < len(self._token_indices) else self.n_kept

    def finish(self) -> str:
        """Return the pending text; no token follows."""
        if self.stopped:
            return ""
        self._add_pending(self._decoder.finish())
        return self._release(len(self._pending))

    def _add_pending(self, pieces: list[_Piece]) -> None:
        for tokens, text in pieces:
            self._n_chars += len(text)
            self._ends.extend([self._n_chars] * tokens)
        self._pending += "".join(piece.text for piece in pieces)

    def _maybe_stop(self) -> int:
        """Return the first index in the pending text where a stop string may begin."""
        end = len(self._pending)
        for index in range(max(0, end - self._longest + 1), end):
            if any(stop.startswith(self._pending[index:]) for stop in self._stop):
                return index
        return end

    def _release(self, end: int) -> str:
        """Return the pending text up to an index, or up to a stop string that begins no later."""
        found = (self._pending.find(stop) for stop in self._stop)
        first = min((index for index in found if 0 <= index <= end), default=None)
        if first is not None:
            end, self.stopped = first, True
            self.n_kept = self._token_indices[bisect_right(self._ends, self._n_chars - len(self._pending) + first)]
        text, self._pending = self._pending[:end], self._pending[end:]
        self._pieces.append(text)
        return text


class _Piece(NamedTuple):
    """Text that became final, and how many more tokens are entirely part of the final text now."""

    tokens: int
    text: str


class _ByteDecoder:
    """Decodes byte-level tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._waiting = 0  # tokens since the last complete character

    def add(self, token: int) -> list[_Piece]:
        text = self._utf8.decode(self._tokenizer.decode_bytes([token]))
        self._waiting += 1
        return [_Piece(0 if self._utf8.getstate()[0] else self._settle(), text)]

    def finish(self) -> list[_Piece]:
        return [_Piece(self._settle(), self._utf8.decode(b"", final=True))]

    def _settle(self) -> int:
        settled, self._waiting = self._waiting, 0
        return settled


class _WindowDecoder:
    """Decodes tokens of any tokenizer, each with some of the tokens before it.

    The text of a token can depend on whether it is the first, the last, or one of several that make up a character.
    Byte-fallback tokens form a run, which is text if all of it is UTF-8 and replacement characters if not, so nothing
    in it is final before it ends. Returned text stands, even if a decoder looks further (a Replace after a Fuse).
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []  # the recent tokens
        self._n_returned = 0  # characters of their text returned so far
        self._waiting = 0  # those of them whose text is not final
        self._run = bytearray()  # the run of byte-fallback tokens at the end

    def add(self, token: int) -> list[_Piece]:
        if byte := BYTE_FALLBACK.fullmatch(self._tokenizer.id_to_token(token)):
            self._ids.append(token)
            self._run.append(int(byte[1], 16))
            return []
        pieces = self.finish() if self._run else []
        self._ids.append(token)
        self._waiting += 1
        text = self._tokenizer.decode(self._ids)
        final = text.removesuffix(REPLACEMENT)
        settled = self._waiting if final == text else 0
        pieces.append(_Piece(settled, final[self._n_returned :]))
        self._waiting -= settled
        self._n_returned = max(self._n_returned, len(final))
        if len(self._ids) >= 2 * CONTEXT:
            self._slide(len(text) - self._n_returned)
        return pieces

    def finish(self) -> list[_Piece]:
        text = self._tokenizer.decode(self._ids)[self._n_returned :]
        if self._run.endswith(spelled := text.encode()):
            stripped = _Piece(len(self._run) - len(spelled), "")  # such as the first space of a text
            pieces = [stripped, *(_Piece(len(character.encode()), character) for character in text)]
        else:
            pieces = [_Piece(self._waiting + len(self._run), text)]
        self._n_returned += len(text)
        self._waiting = 0
        self._run.clear()
        return pieces

    def _slide(self, behind: int) -> None:
        """Drop the older tokens; the last `behind` characters of the text were not returned yet."""
        recent = self._ids[-CONTEXT:]
        # Without text before it, the next token would be decoded as the first, which some decoders strip.
        self._ids = recent if self._tokenizer.decode(recent) else self._ids[:-CONTEXT]
        self._n_returned = len(self._tokenizer.decode(self._ids)) - behind
