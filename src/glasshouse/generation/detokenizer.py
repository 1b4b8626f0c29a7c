"""The text of one generation, given out as its tokens come, up to a stop string.

Text is given out once nothing that may follow can change it: whole characters, and no part of what may still become a
stop string.
"""

from __future__ import annotations

import codecs
from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

from glasshouse.text import Tokenizer
from glasshouse.text.tokenizer_json import BYTE_FALLBACK

HALF = "\ufffd"  # what stands for a character that is not complete, or never will be
CONTEXT = 8  # tokens before a new one that are decoded with it: more bytes than a character has


class Detokenizer:
    r"""Turns the ids of one generation into text, one at a time, and ends it where a stop string begins.

    Special tokens, and ids that stand for no token, add nothing to the text. Of several stop strings the one that
    begins first counts; where that is does not depend on how the text is cut into tokens.

    >>> tokenizer = Tokenizer.train(texts=["to be"], vocab_size=263)  # every token is one byte
    >>> detokenizer = Detokenizer(tokenizer, stop=["\n\n"])
    >>> [detokenizer.add(token) for token in tokenizer.encode("né\no\n\nto")]
    ['n', '', 'é', '', '\no', '', '', '', '']
    >>> detokenizer.text, detokenizer.stopped, detokenizer.n_kept
    ('né\no', True, 5)

    What was held back in vain comes at the end.

    >>> detokenizer = Detokenizer(tokenizer, stop=["\n\n"])
    >>> [detokenizer.add(token) for token in tokenizer.encode("to\n")], detokenizer.finish()
    (['t', 'o', ''], '\n')
    """

    stopped: bool  # a stop string was found; the text ends right before it
    n_kept: int  # tokens that lie wholly before the stop string; without one, all

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        self.stopped, self.n_kept = False, 0
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._longest = max(map(len, self._stop), default=0)
        self._reader: _ByteDecoder | _WindowDecoder = (
            _ByteDecoder(tokenizer) if tokenizer.byte_level else _WindowDecoder(tokenizer)
        )
        self._pieces: list[str] = []  # what was returned
        self._pending = ""  # certain, but it may be part of a stop string
        self._read = 0  # characters returned or held
        self._ends: list[int] = []  # where the text of each token ends that has any; a shared character is the last's
        self._places: list[int] = []  # how many tokens came before each of those

    @property
    def text(self) -> str:
        """All that was returned so far."""
        return "".join(self._pieces)

    def add(self, token: int) -> str:
        """Return the text that became certain with a token; nothing once a stop string was found."""
        if self.stopped:
            return ""
        self.n_kept += 1
        if token not in self._tokenizer.ids or token in self._tokenizer.special_ids:
            return ""
        self._places.append(self.n_kept - 1)
        self._hold(self._reader.add(token))
        return self._release(self._maybe_stop())

    def finish(self) -> str:
        """Return what was held back; no token comes any more."""
        if self.stopped:
            return ""
        self._hold(self._reader.finish())
        return self._release(len(self._pending))

    def _hold(self, pieces: list[_Piece]) -> None:
        for tokens, text in pieces:
            self._read += len(text)
            self._ends.extend([self._read] * tokens)
        self._pending += "".join(piece.text for piece in pieces)

    def _maybe_stop(self) -> int:
        """Return the first place in the held text from which on it may be the beginning of a stop string."""
        end = len(self._pending)
        for place in range(max(0, end - self._longest + 1), end):
            if any(stop.startswith(self._pending[place:]) for stop in self._stop):
                return place
        return end

    def _release(self, end: int) -> str:
        """Return the held text up to a place, or to a stop string that does not begin after it."""
        found = (self._pending.find(stop) for stop in self._stop)
        first = min((place for place in found if 0 <= place <= end), default=None)
        if first is not None:
            end, self.stopped = first, True
            self.n_kept = self._places[bisect_right(self._ends, self._read - len(self._pending) + first)]
        text, self._pending = self._pending[:end], self._pending[end:]
        self._pieces.append(text)
        return text


class _Piece(NamedTuple):
    """Text that became certain, and how many of the tokens not yet counted lie wholly in what is certain now."""

    tokens: int
    text: str


class _ByteDecoder:
    """Reads tokens that are bytes."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._waiting = 0  # tokens since the last that ended with a character

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
    """Reads tokens of any kind by their decoder, each with some of those before it.

    What a decoder makes of a token hangs on whether it is the first, the last, or one of several that spell a
    character. Bytes to fall back on make a run, which is text if all of it is UTF-8 and marks if not, so nothing in
    it is certain before it ends. What was returned stands, even if a decoder looks further (a Replace after a Fuse).
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []  # the last tokens
        self._given = 0  # characters of their text that were returned
        self._waiting = 0  # of them, those whose text is not whole
        self._run = bytearray()  # the bytes to fall back on at the end

    def add(self, token: int) -> list[_Piece]:
        if byte := BYTE_FALLBACK.fullmatch(self._tokenizer.id_to_token(token)):
            self._ids.append(token)
            self._run.append(int(byte[1], 16))
            return []
        pieces = self.finish() if self._run else []
        self._ids.append(token)
        self._waiting += 1
        text = self._tokenizer.decode(self._ids)
        certain = text.removesuffix(HALF)
        settled = self._waiting if certain == text else 0
        pieces.append(_Piece(settled, certain[self._given :]))
        self._waiting -= settled
        self._given = max(self._given, len(certain))
        if len(self._ids) >= 2 * CONTEXT:
            self._slide(len(text) - self._given)
        return pieces

    def finish(self) -> list[_Piece]:
        text = self._tokenizer.decode(self._ids)[self._given :]
        if self._run.endswith(spelled := text.encode()):
            stripped = _Piece(len(self._run) - len(spelled), "")  # as the first space of a text
            pieces = [stripped, *(_Piece(len(character.encode()), character) for character in text)]
        else:
            pieces = [_Piece(self._waiting + len(self._run), text)]
        self._given += len(text)
        self._waiting = 0
        self._run.clear()
        return pieces

    def _slide(self, behind: int) -> None:
        """Forget the older tokens; the last characters of the text, as many as `behind`, were not returned yet."""
        recent = self._ids[-CONTEXT:]
        # Without text before it, what follows could be taken for the beginning, which some decoders strip.
        self._ids = recent if self._tokenizer.decode(recent) else self._ids[:-CONTEXT]
        self._given = len(self._tokenizer.decode(self._ids)) - behind
