"""Logit lens: the predictions of a model from its residual stream after each layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from glasshouse.errors import InputError
from glasshouse.inspection.display.html import (
    MAX_CELLS,
    MAX_COLUMNS,
    MAX_TEXTS,
    Drawing,
    Heatmap,
    HtmlDisplay,
    labels,
    not_drawn,
)
from glasshouse.inspection.inputs.forward_pass import (
    check_full_sequence,
    columns_of,
    eval_mode,
    final_stack,
    ids_of,
    layout_of,
    next_tokens,
    resolve_indices,
)
from glasshouse.inspection.inputs.text_input import Input, encode_inputs
from glasshouse.inspection.recording import record
from glasshouse.inspection.sites import unwrap_compiled, unwrap_model
from glasshouse.layers.attend.layout import Layout
from glasshouse.models import Encoder, Model
from glasshouse.models.heads import Classifier, LMHead, NoHead
from glasshouse.text import Tokenizer

MAX_LOGITS = 2**24  # in memory at once


@dataclass(frozen=True, eq=False, repr=False)
class Lens(HtmlDisplay):
    """Predictions at each layer and position: the top tokens, and the rank and loss of the target token.

    Where there is no target token, `rank` is -1 and `loss` is NaN.
    """

    axes: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "tokens": ("layer", "batch", "position", "rank"),
        "probabilities": ("layer", "batch", "position", "rank"),
        "entropy": ("layer", "batch", "position"),
        "rank": ("layer", "batch", "position"),
        "loss": ("layer", "batch", "position"),
        "ids": ("batch", "position"),
    }
    tokens: Tensor  # the most probable first
    probabilities: Tensor
    entropy: Tensor  # in nats
    rank: Tensor  # of the target token: how many tokens are more probable
    loss: Tensor  # of the target token, in nats
    sites: tuple[str, ...]  # the site of each layer
    positions: tuple[int, ...]
    ids: Tensor  # the input ids at these positions
    tok: Tokenizer | None = None
    label_names: tuple[str, ...] = ()  # of a token classifier

    def _drawings(self) -> list[Drawing]:
        n_texts, n_positions = self.ids.shape
        count = min(n_positions, MAX_COLUMNS, max(1, MAX_CELLS // len(self.sites)))
        note = not_drawn(positions=n_positions - count, texts=n_texts - MAX_TEXTS)
        return [
            Heatmap(
                self.probabilities[:, text, :count, 0],
                rows=self.sites,
                columns=labels(self.ids[text, :count], self.tok),
                caption=f"text {text}: top prediction after each layer, shaded by probability{note}",
                words=[self._words(layer) for layer in self.tokens[:, text, :count, 0]],
            )
            for text in range(min(n_texts, MAX_TEXTS))
        ]

    def _words(self, tokens: Tensor) -> list[str]:
        return (
            [self.label_names[number] for number in tokens.tolist()] if self.label_names else labels(tokens, self.tok)
        )


def lens(
    model: nn.Module,
    *inputs: Input,
    top_k: int = 5,
    layers: Sequence[int] | None = None,
    positions: Sequence[int] | None = None,
    targets: Tensor | None = None,
    tok: Tokenizer | None = None,
    **model_kwargs: Any,  # noqa: ANN401 - whatever the model takes
) -> Lens:
    """Apply the logit lens: the final norm and the head on the residual stream after every layer.

    Layer 0 is the embedding and the last is the model's own output; only the chosen `layers` and `positions`, which
    are counted without padding, are computed, a few at a time. The target token at a position is that of `targets`
    [B, S] (none if negative); by default the next token of the input, or for an encoder the token itself; padding has
    none. In an encoder-decoder the lens is applied to the decoder. With `tok` the input may be a text, or several,
    and tokens are drawn as text.

    >>> import torch, glasshouse as gh
    >>> from glasshouse.inspection.logit_lens import lens
    >>> model = gh.build(gh.preset("tiny-decoder"))
    >>> found = lens(model, torch.tensor([[1, 2, 3]]), positions=[0, -1], top_k=4)
    >>> found.sites, found.tokens.shape, found.rank.shape
    (('embed', 'resid_post.0', 'resid_post.1'), torch.Size([3, 1, 2, 4]), torch.Size([3, 1, 2]))
    """
    whole = unwrap_model(model)
    _check_lens(whole, top_k)
    check_full_sequence(model_kwargs)
    given, kwargs = encode_inputs(whole, inputs, model_kwargs, tok)
    ids = ids_of(whole, given)
    prefix, stack = final_stack(whole)
    depth = len(stack.blocks)
    chosen = resolve_indices(layers, depth + 1, "layers")
    indices = resolve_indices(positions, ids.shape[1], "positions")
    if not chosen or not indices:
        raise InputError(f"{'positions' if chosen else 'layers'} is empty, but the lens needs at least one; give it.")
    layout = layout_of(whole, ids, kwargs)
    columns = torch.tensor(indices if positions is None else positions, device=ids.device).expand(len(ids), -1)
    if positions is not None:
        columns = columns_of(columns, layout, "positions")
    target = target_tokens(whole, ids, layout, targets).gather(1, columns)

    names = [prefix + name for name in ("embed", *(f"resid_post.{layer}" for layer in range(depth)))]
    with eval_mode(whole):
        # The last layer is recorded after the final norm, as the head receives it.
        sites = [f"{prefix}final" if layer == depth else names[layer] for layer in chosen]
        vectors = _vectors(whole, given, kwargs, sites, columns)
        output = apply_lens(whole, vectors, target.expand(vectors.shape[:3]), layout, top_k)
    return Lens(
        *output,
        sites=tuple(names[layer] for layer in chosen),
        positions=tuple(indices),
        ids=ids.gather(1, columns),
        tok=tok,
        label_names=label_names(whole),
    )


class LensOutput(NamedTuple):
    """The predictions from vectors [..., D]: the first fields of a `Lens`."""

    tokens: Tensor  # [..., rank]
    probabilities: Tensor  # [..., rank]
    entropy: Tensor
    rank: Tensor
    loss: Tensor


def apply_lens(model: Model, vectors: Tensor, targets: Tensor, layout: Layout, top_k: int = 5) -> LensOutput:
    """Apply the head to normed vectors [..., D], given the target tokens [...], negative where there is none.

    Logits are computed for a few vectors at a time. Call it inside `eval_mode`.
    """
    _check_lens(model, top_k)
    head, shape, step = unwrap_compiled(model.head), vectors.shape[:-1], max(1, MAX_LOGITS // n_logits(model))
    # By `forward`, which bypasses hooks: this is not part of a forward pass of the model.
    chunks = [
        summarize_logits(head.forward(chunk, layout, model.token_embedding.table.weight), chunk_targets, top_k)
        for chunk, chunk_targets in zip(
            vectors.flatten(0, -2).split(step), targets.flatten().split(step), strict=True
        )
    ]
    return LensOutput(*(torch.cat(one).unflatten(0, shape) for one in zip(*chunks, strict=True)))


def summarize_logits(logits: Tensor, targets: Tensor, top_k: int) -> LensOutput:
    """Return the predictions of logits [N, V], given the target tokens [N], negative where there is none."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    logprobs = logits.log_softmax(-1)
    tokens = logits.topk(min(top_k, logits.shape[-1])).indices
    known, target = targets >= 0, targets.clamp(min=0)[:, None]
    return LensOutput(
        tokens,
        logits.softmax(-1).gather(-1, tokens),  # not exp(log_softmax), whose last bit may differ from the model's
        -(logprobs.exp() * logprobs).sum(-1),
        (logits > logits.gather(-1, target)).sum(-1).where(known, -1),
        -logprobs.gather(-1, target)[:, 0].where(known, torch.nan),
    )


def has_position_logits(model: Model) -> bool:
    """Return whether the head has logits at every position."""
    head = unwrap_compiled(model.head)
    return isinstance(head, LMHead) or (isinstance(head, Classifier) and isinstance(head.pool, NoHead))


def _check_lens(model: Model, top_k: int) -> None:
    if not has_position_logits(model):
        raise InputError(
            f"the head is {model.spec.head.kind!r}, but the lens needs logits at every position; "
            "use a model with a next_token, masked_token or token_classification head."
        )
    if top_k < 1:
        raise InputError(f"top_k is {top_k}, but it must be at least 1.")


def n_logits(model: Model) -> int:
    """Return the number of logits per position."""
    return model.head.classifier.out_features if isinstance(model.head, Classifier) else model.spec.vocab_size


def _vectors(
    model: Model,
    inputs: tuple[Tensor, ...],
    model_kwargs: Mapping[str, Any],
    sites: Sequence[str],
    columns: Tensor,
) -> Tensor:
    """Return the normed residual stream at some sites and the columns [B, position], [site, B, position, D]."""
    start, last = (int(edge) for edge in columns.aminmax())
    stop = last + 1
    with record(model, *(f"{site}[position={start}:{stop}]" for site in sites), stop=True) as seen:
        model(*inputs, **model_kwargs)
    prefix, stack = final_stack(model)
    rows = torch.arange(len(columns), device=columns.device)[:, None]
    streams = [seen[site][rows, columns - start] for site in sites]
    del seen  # it may have many more positions
    # By `forward`, which bypasses hooks: this is not part of a forward pass of the model.
    return torch.stack(
        [x if site == f"{prefix}final" else stack.norm.forward(x) for x, site in zip(streams, sites, strict=True)]
    )


def target_tokens(model: Model, ids: Tensor, layout: Layout, targets: Tensor | None = None) -> Tensor:
    """Return the target token of each position, [B, S]; -1 where there is none."""
    if targets is not None:
        _check_targets(targets, ids, n_logits(model))
        target = targets.to(ids.device, torch.long)
    elif isinstance(model.head, Classifier):
        target = torch.full_like(ids, -1, dtype=torch.long)  # ids are not labels
    elif isinstance(model, Encoder):
        target = ids.long()
    else:
        target = next_tokens(ids, layout)
    return target if layout.real is None else target.where(layout.real, -1)


def _check_targets(targets: Tensor, ids: Tensor, count: int) -> None:
    if targets.shape != ids.shape or targets.is_floating_point():
        raise InputError(
            f"targets has shape {list(targets.shape)} and type {targets.dtype}, but it must have an integer for "
            f"each id, {list(ids.shape)}."
        )
    if (highest := int(targets.max())) >= count:
        raise InputError(f"targets contains {highest}, but the head has {count} logits; give ids below that.")


def label_names(model: Model) -> tuple[str, ...]:
    """Return the names of a classifier's labels, numbers where the spec has none; empty for another head."""
    if not isinstance(model.head, Classifier):
        return ()
    given: tuple[str, ...] = getattr(model.spec.head, "labels", ())
    return given or tuple(str(number) for number in range(n_logits(model)))
