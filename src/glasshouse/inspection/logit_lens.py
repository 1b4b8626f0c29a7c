"""The lens: what a model would say if it stopped after each of its layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from glasshouse.errors import InputError
from glasshouse.inspection.forward_pass import (
    check_full_sequence,
    eval_mode,
    final_stack,
    ids_of,
    layout_of,
    next_tokens,
    resolve_indices,
)
from glasshouse.inspection.html_display import (
    MOST_CELLS,
    MOST_COLUMNS,
    MOST_TEXTS,
    HtmlDisplay,
    heatmap,
    labels,
    not_drawn,
)
from glasshouse.inspection.recording import record
from glasshouse.inspection.sites import unwrap_compiled, unwrap_model
from glasshouse.layers.layout import Layout
from glasshouse.models import Encoder, Model, check_tokenizer
from glasshouse.models.heads import Classifier, LMHead, NoHead
from glasshouse.text import Tokenizer

LOGITS = 2**24  # made at once, then thrown away


@dataclass(frozen=True, eq=False)
class Lens(HtmlDisplay):
    """What is read off the stream at each layer and position: the likeliest tokens, and how the true one stands.

    Where there is no true token, `rank` is -1 and `loss` is NaN.
    """

    axes: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "tokens": ("layer", "batch", "position", "rank"),
        "probabilities": ("layer", "batch", "position", "rank"),
        "entropy": ("layer", "batch", "position"),
        "rank": ("layer", "batch", "position"),
        "loss": ("layer", "batch", "position"),
        "ids": ("batch", "position"),
    }
    tokens: Tensor  # the likeliest first
    probabilities: Tensor
    entropy: Tensor  # in nats
    rank: Tensor  # of the true token: how many are likelier
    loss: Tensor  # of the true token, in nats
    sites: tuple[str, ...]  # the site of each layer
    positions: tuple[int, ...]
    ids: Tensor  # what the model was given there
    tok: Tokenizer | None = None
    label_names: tuple[str, ...] = ()  # of the labels, where the head gives labels

    def _drawing(self) -> str:
        n_texts, n_positions = self.ids.shape
        count = min(n_positions, MOST_COLUMNS, max(1, MOST_CELLS // len(self.sites)))
        note = not_drawn(positions=n_positions - count, texts=n_texts - MOST_TEXTS)
        return "".join(
            heatmap(
                self.probabilities[:, text, :count, 0],
                rows=self.sites,
                columns=labels(self.ids[text, :count], self.tok),
                caption=f"text {text}: the likeliest after each layer, the darker the surer{note}",
                words=[self._words(layer) for layer in self.tokens[:, text, :count, 0]],
            )
            for text in range(min(n_texts, MOST_TEXTS))
        )

    def _words(self, tokens: Tensor) -> list[str]:
        return (
            [self.label_names[number] for number in tokens.tolist()] if self.label_names else labels(tokens, self.tok)
        )


def lens(
    model: nn.Module,
    *inputs: Tensor,
    top_k: int = 5,
    layers: Sequence[int] | None = None,
    positions: Sequence[int] | None = None,
    targets: Tensor | None = None,
    tok: Tokenizer | None = None,
    **call: Any,  # noqa: ANN401 - whatever the model takes
) -> Lens:
    """Read the stream after every layer through the final norm and the head: the answer of a model that stops there.

    Layer 0 is the embedding and the last is the model's own answer; `layers` and `positions` choose some, and only
    those are computed, a few at a time. The true token at a position is that of `targets` [B, S] (none where below
    0); else the next of the input, which the last has not, or for an encoder the token itself; padding has none. In
    an encoder-decoder it is the decoder that is looked at.

    >>> import torch, glasshouse as gh
    >>> from glasshouse.inspection.logit_lens import lens
    >>> model = gh.build(gh.preset("tiny-decoder"))
    >>> seen = lens(model, torch.tensor([[1, 2, 3]]), positions=[0, -1], top_k=4)
    >>> seen.rows, seen.tokens.shape, seen.rank.shape
    (('embed', 'resid_post.0', 'resid_post.1'), torch.Size([3, 1, 2, 4]), torch.Size([3, 1, 2]))
    """
    whole = unwrap_model(model)
    _check_readable(whole, top_k)
    if tok is not None:
        check_tokenizer(whole, tok)
    check_full_sequence(call)
    ids = ids_of(whole, inputs)
    prefix, stack = final_stack(whole)
    depth = len(stack.blocks)
    shown, places = (
        resolve_indices(layers, depth + 1, "layers"),
        resolve_indices(positions, ids.shape[1], "positions"),
    )
    if not shown or not places:
        raise InputError(f"{'positions' if shown else 'layers'} is empty, but a lens needs one at least; name it.")
    layout = layout_of(whole, ids, call)
    true = target_tokens(whole, ids, layout, targets)[:, places]

    names = [prefix + name for name in ("embed", *(f"resid_post.{layer}" for layer in range(depth)))]
    with eval_mode(whole):
        # The last layer is read behind the final norm, as the head reads it.
        sites = [f"{prefix}final" if layer == depth else names[layer] for layer in shown]
        vectors = _vectors(whole, inputs, call, sites, places)
        read = apply_lens(whole, vectors, true.expand(vectors.shape[:3]), layout, top_k)
    return Lens(
        *read,
        sites=tuple(names[layer] for layer in shown),
        positions=tuple(places),
        ids=ids[:, places],
        tok=tok,
        label_names=_label_names(whole),
    )


class LensOutput(NamedTuple):
    """What is read off vectors [...]: the fields of a `Lens`."""

    tokens: Tensor  # [..., rank]
    probabilities: Tensor  # [..., rank]
    entropy: Tensor
    rank: Tensor
    loss: Tensor


def apply_lens(model: Model, vectors: Tensor, targets: Tensor, layout: Layout, top_k: int = 5) -> LensOutput:
    """Read vectors [..., D], as the head is given them, and how the true tokens [...] stand; below 0 there is none.

    Logits are made for a few vectors at a time. Call it where the model is `quiet`.
    """
    _check_readable(model, top_k)
    head, shape, step = unwrap_compiled(model.head), vectors.shape[:-1], max(1, LOGITS // n_logits(model))
    # By forward, past the hooks of who looks at or changes the model meanwhile: this is no part of a call.
    parts = [
        _read(head.forward(some, layout, model.token_embedding.table.weight), theirs, top_k)
        for some, theirs in zip(vectors.flatten(0, -2).split(step), targets.flatten().split(step), strict=True)
    ]
    return LensOutput(*(torch.cat(one).unflatten(0, shape) for one in zip(*parts, strict=True)))


def has_position_logits(model: Model) -> bool:
    """Say whether the head gives logits at every position."""
    head = unwrap_compiled(model.head)
    return isinstance(head, LMHead) or (isinstance(head, Classifier) and isinstance(head.pool, NoHead))


def _check_readable(model: Model, top_k: int) -> None:
    if not has_position_logits(model):
        raise InputError(
            f"the head is {model.spec.head.kind!r}, but a lens needs logits at every position; "
            "use a model with next_token, masked_token or token_classification."
        )
    if top_k < 1:
        raise InputError(f"top_k is {top_k}, but at least the likeliest token is shown; give 1 or more.")


def n_logits(model: Model) -> int:
    """Return how many logits the head gives at a position."""
    return model.head.classifier.out_features if isinstance(model.head, Classifier) else model.spec.vocab_size


def _vectors(
    model: Model, inputs: tuple[Tensor, ...], call: Mapping[str, Any], sites: Sequence[str], places: Sequence[int]
) -> Tensor:
    """Return the stream at some sites and positions as the head would be given it, [site, B, position, D]."""
    start, stop = min(places), max(places) + 1
    with record(model, *(f"{site}[position={start}:{stop}]" for site in sites), stop=True) as seen:
        model(*inputs, **call)
    prefix, stack = final_stack(model)
    picked = torch.tensor(places, device=inputs[-1].device) - start
    streams = [seen[site][:, picked] for site in sites]
    del seen  # it may hold many more positions
    # By forward, past the hooks of who looks at or changes the model meanwhile: this is no part of a call.
    return torch.stack(
        [x if site == f"{prefix}final" else stack.norm.forward(x) for x, site in zip(streams, sites, strict=True)]
    )


def _read(logits: Tensor, targets: Tensor, top_k: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return what is kept of logits [N, V], given the true tokens [N]."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    logs = logits.log_softmax(-1)
    tokens = logits.topk(min(top_k, logits.shape[-1])).indices
    known, goal = targets >= 0, targets.clamp(min=0)[:, None]
    return (
        tokens,
        logs.gather(-1, tokens).exp(),
        -(logs.exp() * logs).sum(-1),
        (logits > logits.gather(-1, goal)).sum(-1).where(known, -1),
        -logs.gather(-1, goal)[:, 0].where(known, torch.nan),
    )


def target_tokens(model: Model, ids: Tensor, layout: Layout, targets: Tensor | None = None) -> Tensor:
    """Return the token that each position should say, [B, S]; -1 where there is none."""
    if targets is not None:
        _check_targets(targets, ids, n_logits(model))
        true = targets.to(ids.device, torch.long)
    elif isinstance(model.head, Classifier):
        true = torch.full_like(ids, -1, dtype=torch.long)  # ids are no labels
    elif isinstance(model, Encoder):
        true = ids.long()
    else:
        true = next_tokens(ids, layout)
    return true if layout.real is None else true.where(layout.real, -1)


def _check_targets(targets: Tensor, ids: Tensor, count: int) -> None:
    if targets.shape != ids.shape or targets.is_floating_point():
        raise InputError(
            f"targets has shape {list(targets.shape)} and type {targets.dtype}, but it must hold a whole number for "
            f"each id, {list(ids.shape)}."
        )
    if (highest := int(targets.max())) >= count:
        raise InputError(f"targets holds {highest}, but the head gives {count} logits; stay below that.")


def _label_names(model: Model) -> tuple[str, ...]:
    if not isinstance(model.head, Classifier):
        return ()
    given: tuple[str, ...] = getattr(model.spec.head, "labels", ())
    return given or tuple(str(number) for number in range(n_logits(model)))
