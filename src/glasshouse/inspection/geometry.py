"""Attention rollout, and the norms and cosine similarities of the residual stream."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from glasshouse.errors import InputError
from glasshouse.inspection.hooks import Hook
from glasshouse.inspection.inputs.forward_pass import eval_mode
from glasshouse.inspection.inputs.stack_input import make_stack_input
from glasshouse.inspection.inputs.text_input import Input, encode_inputs
from glasshouse.inspection.recording import record
from glasshouse.inspection.sites import Selection, select, unwrap_model
from glasshouse.text import Tokenizer


def attention_rollout(
    model: nn.Module,
    *inputs: Input,
    residual: float = 0.5,
    stack: str | None = None,
    tok: Tokenizer | None = None,
    **model_kwargs: Any,  # noqa: ANN401 - whatever the model takes
) -> Tensor:
    """Return the attention rollout up to each layer, [layer, batch, query, key].

    As Abnar and Zuidema define it: the mean attention pattern over heads, mixed with the identity at the weight
    `residual`, normalized, and multiplied over the layers. In an encoder-decoder it is the rollout of the decoder's
    self-attention, or with `stack="encoder"` the encoder's. With `tok` the input may be a text, or several.

    >>> import torch, glasshouse as gh
    >>> from glasshouse.inspection.geometry import attention_rollout
    >>> model = gh.build(gh.preset("tiny-decoder"))
    >>> attention_rollout(model, torch.tensor([[1, 2, 3]])).sum(-1).round(decimals=4)
    tensor([[[1., 1., 1.]],
    <BLANKLINE>
            [[1., 1., 1.]]])
    """
    if not 0 <= residual <= 1:
        raise InputError(
            f"residual is {residual}, but it is the weight of the residual connection; give one from 0 to 1."
        )
    whole = unwrap_model(model)
    text = make_stack_input(whole, *encode_inputs(whole, inputs, model_kwargs, tok), stack)
    patterns = text.sites("pattern")
    rows, length = text.ids.shape
    exact = torch.promote_types(whole.token_embedding.table.weight.dtype, torch.float32)
    mixed = torch.empty(len(patterns), rows, length, length, dtype=exact, device=text.ids.device)

    def take(layer: int, queries: slice, pattern: Tensor) -> None:
        mixed[layer, :, queries] = pattern.mean(1) * (1 - residual)

    hooks = [hook for layer, site in enumerate(patterns) for hook in text.tiled_hooks(site, partial(take, layer))]
    text.run(hooks, until=f"attn_out.{len(patterns) - 1}")
    mixed.diagonal(dim1=-2, dim2=-1).add_(residual)
    # The weights of a fully masked query, at padding, sum to 0.
    mixed /= mixed.sum(-1, keepdim=True).clamp(min=torch.finfo(exact).tiny)
    for layer in range(1, len(mixed)):
        mixed[layer] = mixed[layer] @ mixed[layer - 1]
    return mixed


def position_similarity(
    model: nn.Module,
    *inputs: Input,
    site: str | None = None,
    tok: Tokenizer | None = None,
    **model_kwargs: Any,  # noqa: ANN401 - whatever the model takes
) -> Tensor:
    """Return the cosine similarity between every two positions, [batch, position, position].

    The vectors are those of a site of the residual stream, such as `resid_post.3`; by default of `final`. With `tok`
    the input may be a text, or several.

    >>> import torch, glasshouse as gh
    >>> from glasshouse.inspection.geometry import position_similarity
    >>> model = gh.build(gh.preset("tiny-encoder", position="none"))
    >>> position_similarity(model, torch.tensor([[7, 5, 7]]), site="embed")[0, 0, 2].round(decimals=4)
    tensor(1.)
    """
    whole = unwrap_model(model)
    given, kwargs = encode_inputs(whole, inputs, model_kwargs, tok)
    text = make_stack_input(whole, given, kwargs)
    found = select(whole, f"{text.prefix}final" if site is None else site)
    if len(found) != 1 or found[0].axes[:2] != ("batch", "position") or len(found[0].axes) != 3:
        raise InputError(
            f"site is {site!r}, but it must have one vector per position; give one such as resid_post.0."
        )
    name = found[0].name
    with eval_mode(whole), record(whole, name, stop=True) as seen:
        whole(*given, **kwargs)
    vectors = seen[name]
    vectors = F.normalize(vectors.to(torch.promote_types(vectors.dtype, torch.float32)), dim=-1)
    return vectors @ vectors.transpose(1, 2)


def residual_norms(
    model: nn.Module,
    *inputs: Input,
    stack: str | None = None,
    tok: Tokenizer | None = None,
    **model_kwargs: Any,  # noqa: ANN401 - whatever the model takes
) -> Tensor:
    """Return the norm of the residual stream after the embedding and each layer, [layer + 1, batch, position].

    In an encoder-decoder it is the decoder's residual stream, or with `stack="encoder"` the encoder's. With `tok` the
    input may be a text, or several.

    >>> import torch, glasshouse as gh
    >>> from glasshouse.inspection.geometry import residual_norms
    >>> model = gh.build(gh.preset("tiny-decoder"))
    >>> residual_norms(model, torch.tensor([[1, 2, 3]])).shape
    torch.Size([3, 1, 3])
    """
    whole = unwrap_model(model)
    text = make_stack_input(whole, *encode_inputs(whole, inputs, model_kwargs, tok), stack)
    exact = torch.promote_types(text.model.token_embedding.table.weight.dtype, torch.float32)
    stream = text.stream()
    norms = torch.empty(len(stream), *text.ids.shape, dtype=exact, device=text.ids.device)

    def take(layer: int, vectors: Tensor) -> None:
        norms[layer] = torch.linalg.vector_norm(vectors, dim=-1, dtype=exact)

    every = (slice(None),) * 3
    hooks = [Hook(Selection(site, every), read=partial(take, layer)) for layer, site in enumerate(stream)]
    text.run(hooks, until="final")
    return norms
