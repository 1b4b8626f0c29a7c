"""How the stream lies: where its content came from, how long its vectors are, and which point the same way."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from glasshouse.errors import InputError
from glasshouse.inspection.forward_pass import eval_mode
from glasshouse.inspection.hooks import Hook
from glasshouse.inspection.recording import record
from glasshouse.inspection.sites import Selection, select, unwrap_model
from glasshouse.inspection.stack_input import make_stack_input


def attention_rollout(
    model: nn.Module,
    *inputs: Tensor,
    residual: float = 0.5,
    stack: str | None = None,
    **call: Any,  # noqa: ANN401 - whatever the model takes
) -> Tensor:
    """Return how much of each position came from each token, up to each layer, [layer, batch, query, key].

    This is the attention rollout of Abnar and Zuidema: the mean over heads, mixed with what the residual connection
    keeps, normalised, and multiplied up over the layers. In an encoder-decoder it is that of the decoder's attention
    to itself, or with `stack="encoder"` the encoder's.

    >>> import torch, glasshouse as gh
    >>> from glasshouse.inspection.geometry import rollout
    >>> model = gh.build(gh.preset("tiny-decoder"))
    >>> rollout(model, torch.tensor([[1, 2, 3]])).sum(-1).round(decimals=4)
    tensor([[[1., 1., 1.]],
    <BLANKLINE>
            [[1., 1., 1.]]])
    """
    if not 0 <= residual <= 1:
        raise InputError(
            f"residual is {residual}, but it is a share, the rest being attention's; stay within 0 and 1."
        )
    whole = unwrap_model(model)
    text = make_stack_input(whole, inputs, call, stack)
    patterns = text.sites("pattern")
    rows, length = text.ids.shape
    exact = torch.promote_types(whole.token_embedding.table.weight.dtype, torch.float32)
    mixed = torch.empty(len(patterns), rows, length, length, dtype=exact, device=text.ids.device)

    def take(layer: int, queries: slice, pattern: Tensor) -> None:
        mixed[layer, :, queries] = pattern.mean(1) * (1 - residual)

    uses = [use for layer, site in enumerate(patterns) for use in text.tiled_hooks(site, partial(take, layer))]
    text.run(uses, until=f"attn_out.{len(patterns) - 1}")
    mixed.diagonal(dim1=-2, dim2=-1).add_(residual)
    # A padding token that sees nothing has no weights, and so no sum to divide by.
    mixed /= mixed.sum(-1, keepdim=True).clamp(min=torch.finfo(exact).tiny)
    for layer in range(1, len(mixed)):
        mixed[layer] = mixed[layer] @ mixed[layer - 1]
    return mixed


def position_similarity(
    model: nn.Module,
    *inputs: Tensor,
    site: str | None = None,
    **call: Any,  # noqa: ANN401 - whatever the model takes
) -> Tensor:
    """Return the cosine of the angle between the vectors of every two positions, [batch, position, position].

    They are taken at a site of the stream, such as `resid_post.3`; without one, where the head reads them.

    >>> import torch, glasshouse as gh
    >>> from glasshouse.inspection.geometry import similarity
    >>> model = gh.build(gh.preset("tiny-encoder", position="none"))
    >>> similarity(model, torch.tensor([[7, 5, 7]]), site="embed")[0, 0, 2].round(decimals=4)
    tensor(1.)
    """
    whole = unwrap_model(model)
    text = make_stack_input(whole, inputs, call)
    found = select(whole, f"{text.prefix}final" if site is None else site)
    if len(found) != 1 or found[0].axes[:2] != ("batch", "position") or len(found[0].axes) != 3:
        raise InputError(f"site is {site!r}, but it must have one vector a position; give one such as resid_post.0.")
    name = found[0].name
    with eval_mode(whole), record(whole, name, stop=True) as seen:
        whole(*inputs, **call)
    vectors = seen[name]
    vectors = F.normalize(vectors.to(torch.promote_types(vectors.dtype, torch.float32)), dim=-1)
    return vectors @ vectors.transpose(1, 2)


def residual_norms(
    model: nn.Module,
    *inputs: Tensor,
    stack: str | None = None,
    **call: Any,  # noqa: ANN401 - whatever the model takes
) -> Tensor:
    """Return the length of each vector of the stream, embedded and after each layer, [layer + 1, batch, position].

    In an encoder-decoder it is the decoder's stream, or with `stack="encoder"` the encoder's.

    >>> import torch, glasshouse as gh
    >>> from glasshouse.inspection.geometry import norms
    >>> model = gh.build(gh.preset("tiny-decoder"))
    >>> norms(model, torch.tensor([[1, 2, 3]])).shape
    torch.Size([3, 1, 3])
    """
    text = make_stack_input(unwrap_model(model), inputs, call, stack)
    exact = torch.promote_types(text.model.token_embedding.table.weight.dtype, torch.float32)
    stream = text.stream()
    lengths = torch.empty(len(stream), *text.ids.shape, dtype=exact, device=text.ids.device)

    def take(layer: int, vectors: Tensor) -> None:
        lengths[layer] = torch.linalg.vector_norm(vectors, dim=-1, dtype=exact)

    every = (slice(None),) * 3
    uses = [Hook(Selection(site, every), read=partial(take, layer)) for layer, site in enumerate(stream)]
    text.run(uses, until="final")
    return lengths
