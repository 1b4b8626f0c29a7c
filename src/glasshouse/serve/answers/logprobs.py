"""Tokens and their log-probabilities in the two shapes that OpenAI's API has for them."""

from __future__ import annotations

from collections.abc import Sequence

from glasshouse.config import JsonDict
from glasshouse.generation.detokenizer import Detokenizer
from glasshouse.generation.request import TopLogprobs
from glasshouse.text import Tokenizer

LOWEST = -9999.0  # for -inf, which JSON lacks; as OpenAI has it


def token_text(tok: Tokenizer | None, token: int) -> str:
    r"""Return the text of a token; a part of a character as its bytes.

    >>> tok = Tokenizer.train(texts=["to be"], vocab_size=263)
    >>> token_text(tok, tok.encode("t")[0]), token_text(tok, tok.encode("é")[0]), token_text(None, 5)
    ('t', 'bytes:\\xc3', 'token_id:5')
    """
    if tok is None or token not in tok.ids:
        return f"token_id:{token}"
    raw = tok.decode_bytes([token])
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


class TokenOffsets:
    """Where each token of a choice begins in its text, in characters."""

    def __init__(self, tok: Tokenizer | None) -> None:
        self._detokenizer = None if tok is None else Detokenizer(tok)
        self._at = 0

    def add(self, token: int) -> int:
        """Return the offset of the next token."""
        at = self._at
        if self._detokenizer is not None:
            self._at += len(self._detokenizer.add(token))
        return at


def completion_logprobs(
    tok: Tokenizer | None,
    offsets: TokenOffsets,
    ids: Sequence[int],
    logprobs: Sequence[float | None],
    top: Sequence[TopLogprobs | None],
) -> JsonDict:
    """Return the log-probabilities of /v1/completions; a first prompt token has none."""
    return {
        "tokens": [token_text(tok, token) for token in ids],
        "token_logprobs": [None if one is None else max(one, LOWEST) for one in logprobs],
        "top_logprobs": [
            None if one is None else {token_text(tok, token): max(value, LOWEST) for token, value in one}
            for one in top
        ],
        "text_offset": [offsets.add(token) for token in ids],
    }


def chat_logprobs(
    tok: Tokenizer | None, ids: Sequence[int], logprobs: Sequence[float], top: Sequence[TopLogprobs]
) -> JsonDict:
    """Return the log-probabilities of /v1/chat/completions."""
    tops = top or [[]] * len(ids)
    content = [
        _chat_token(tok, token, logprob) | {"top_logprobs": [_chat_token(tok, *one) for one in best]}
        for token, logprob, best in zip(ids, logprobs, tops, strict=True)
    ]
    return {"content": content, "refusal": None}


def _chat_token(tok: Tokenizer | None, token: int, logprob: float) -> JsonDict:
    raw = tok.decode_bytes([token]) if tok is not None and token in tok.ids else None
    return {
        "token": token_text(tok, token),
        "logprob": max(logprob, LOWEST),
        "bytes": None if raw is None else list(raw),
    }
