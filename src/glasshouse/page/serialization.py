"""JSON values for the page: tensors, numbers and tokens with control characters escaped."""

from __future__ import annotations

import base64
import math
from collections.abc import Iterable

import torch
from torch import Tensor

from glasshouse.config import JsonDict
from glasshouse.text import Tokenizer, visible_token

LONGEST = 200  # characters shown of a token


def encode_tensor(tensor: Tensor) -> JsonDict:
    """Return a tensor as JSON: its shape and base64 data, float32 or uint8.

    >>> encode_tensor(torch.tensor([[1.0, 2.0]]))
    {'shape': [1, 2], 'f32': 'AACAPwAAAEA='}
    """
    kind, held = ("u8", tensor) if tensor.dtype == torch.uint8 else ("f32", tensor.float())
    data = held.detach().cpu().contiguous().numpy().tobytes()
    return {"shape": list(tensor.shape), kind: base64.b64encode(data).decode()}


def finite_or_none(value: Tensor | float) -> float | None:
    """Return a float, None if it is NaN or infinite."""
    plain = float(value)
    return plain if math.isfinite(plain) else None


def describe_tokens(ids: Iterable[int], tok: Tokenizer | None) -> list[JsonDict]:
    """Describe tokens for the page: id, visible text, and whether they are special or partial bytes.

    >>> describe_tokens([7], None)
    [{'id': 7, 'text': '7'}]
    """
    return [_token(one, tok) for one in ids]


def _token(one: int, tok: Tokenizer | None) -> JsonDict:
    if tok is None or one not in tok.ids:  # the vocabulary may be padded beyond the tokenizer
        return {"id": one, "text": str(one)}
    text = visible_token(tok, one)
    shown: JsonDict = {"id": one, "text": text if len(text) <= LONGEST else f"{text[:LONGEST]}… ({len(text):,})"}
    if one in tok.special_ids:
        return shown | {"kind": "special"}
    try:
        tok.decode_bytes([one]).decode()
    except UnicodeDecodeError:
        return shown | {"kind": "bytes"}
    return shown
