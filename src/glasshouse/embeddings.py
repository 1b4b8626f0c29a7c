"""Text embeddings from an encoder or a decoder."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

from glasshouse import spec
from glasshouse.errors import InputError
from glasshouse.models import Decoder, Encoder, Model, build, check_tokenizer
from glasshouse.text import Tokenizer

M = TypeVar("M", Encoder, Decoder, Encoder | Decoder)


@torch.no_grad()
def embed(
    model: Model,
    tok: Tokenizer | None,
    texts: str | Sequence[str],
    *,
    batch_size: int = 32,
    truncate: bool = False,
    normalize: bool | None = None,
) -> Tensor:
    """Return one embedding per text, [n, d_model]: by the model's own pooling, or else the mean over its tokens.

    Vectors have unit length where the model's folder says so (`2_Normalize` of sentence-transformers); `normalize`
    overrides that. Texts of similar length share a batch; neither that nor padding changes a result. A text longer
    than max_len is an error, or truncated with `truncate`.

    >>> import glasshouse as gh
    >>> words = '{"type": "WordLevel", "vocab": {"a": 0, "red": 1, "pea": 2}, "unk_token": "a"}'
    >>> split = '{"type": "Whitespace"}'
    >>> tok = Tokenizer.from_json(f'{{"version": "1.0", "model": {words}, "pre_tokenizer": {split}}}')
    >>> model = gh.build(gh.preset("tiny-encoder")).eval()
    >>> gh.embed(model, tok, ["a red pea", "a red"]).shape
    torch.Size([2, 64])
    """
    if not isinstance(model, Encoder | Decoder):
        raise InputError(
            f"the model is a {type(model).__name__}, which does not embed texts; use an encoder or a decoder."
        )
    tok, texts = check_texts(model, tok, texts)
    if batch_size < 1:
        raise InputError(f"batch_size is {batch_size}, but it must be at least 1.")
    rows = tok.encode_batch(texts, max_len=model.spec.max_len if truncate else None)
    for number, row in enumerate(rows):
        if not row:
            raise InputError(f"text {number} is {texts[number]!r}, which has no tokens; leave it out.")
    return embed_ids(model, rows, batch_size=batch_size, normalize=normalize)


def check_texts(model: Model, tok: Tokenizer | None, texts: object) -> tuple[Tokenizer, Sequence[str]]:
    """Return the tokenizer and the texts as a list; raise for what is neither, and for a model in training mode."""
    if not isinstance(tok, Tokenizer):
        raise InputError(f"tok is {tok!r}, but texts need the model's tokenizer; load it with Tokenizer.load.")
    if model.training:
        raise InputError("the model is in training mode, where dropout changes the result; call model.eval() first.")
    check_tokenizer(model, tok)
    texts = [texts] if isinstance(texts, str) else texts
    if not isinstance(texts, Sequence) or not all(isinstance(text, str) for text in texts):
        raise InputError(f"texts is of type {type(texts).__name__}, but it must be a text or a list of texts.")
    return tok, texts


@torch.no_grad()
def embed_ids(
    model: Encoder | Decoder,
    rows: Sequence[Sequence[int]],
    *,
    batch_size: int = 32,
    normalize: bool | None = None,
) -> Tensor:
    """Return one embedding for each list of ids, [n, d_model], as `embed` does; the model is in eval mode.

    >>> import glasshouse as gh
    >>> embed_ids(gh.build(gh.preset("tiny-encoder")).eval(), [[1, 2, 3], [4]]).shape
    torch.Size([2, 64])
    """
    check_lengths(model, rows)
    pooled = with_pooling(model)
    device = model.token_embedding.table.weight.device
    result = torch.empty(len(rows), model.spec.d_model, device=device, dtype=model.token_embedding.table.weight.dtype)
    for chosen, ids, lengths in length_batches(rows, batch_size):
        result[chosen] = pooled(ids.to(device), lengths=lengths.to(device))
    if not bool(result.isfinite().all()):
        number = int((~result.isfinite()).any(1).nonzero()[0])
        raise InputError(
            f"the embedding of text {number} has NaN: the model's weights, or its activations on this text, are not "
            "finite; check the weights for NaN, or load float16 weights as float32."
        )
    by_default = pooled.spec.head.normalize if isinstance(pooled.spec.head, spec.Pooled) else False
    return F.normalize(result, dim=-1) if (by_default if normalize is None else normalize) else result


def length_batches(rows: Sequence[Sequence[int]], batch_size: int) -> Iterator[tuple[list[int], Tensor, Tensor]]:
    """Yield batches of rows of similar length: their numbers, their ids padded on the right, and their lengths.

    >>> for numbers, ids, lengths in length_batches([[1, 2, 3], [4], [5, 6]], batch_size=2):
    ...     numbers, ids.tolist(), lengths.tolist()
    ([1, 2], [[4, 0], [5, 6]], [1, 2])
    ([0], [[1, 2, 3]], [3])
    """
    order = sorted(range(len(rows)), key=lambda i: len(rows[i]))
    for start in range(0, len(order), batch_size):
        chosen = order[start : start + batch_size]
        lengths = torch.tensor([len(rows[i]) for i in chosen])
        ids = torch.zeros(len(chosen), int(lengths.max()), dtype=torch.long)
        for line, i in zip(ids, chosen, strict=True):
            line[: len(rows[i])] = torch.tensor(rows[i])
        yield chosen, ids, lengths


def check_lengths(model: Encoder | Decoder, rows: Sequence[Sequence[int]]) -> None:
    """Raise for a text that is longer than the model's max_len."""
    for number, row in enumerate(rows):
        if len(row) > model.spec.max_len:
            raise InputError(
                f"text {number} is {len(row)} tokens long, but max_len is {model.spec.max_len}; shorten it."
            )


def with_pooling(model: M) -> M:
    """Return the model, or the same modules with a mean-pooling head.

    >>> import glasshouse as gh
    >>> model = gh.build(gh.preset("tiny-encoder"))
    >>> pooled = with_pooling(model)
    >>> pooled.spec.head, pooled.stack is model.stack, with_pooling(pooled) is pooled
    (Pooled(pooling='mean', dense=False, normalize=False), True, True)
    """
    if isinstance(model.spec.head, spec.Pooled):
        return model
    pooled: M = build(replace(model.spec, head=spec.Pooled("mean")), device="meta")
    for name, module in model.named_children():
        if name != "head":
            setattr(pooled, name, module)
    pooled.tokenizer_fingerprint = model.tokenizer_fingerprint
    return pooled
