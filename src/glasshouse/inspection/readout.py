"""The lens: what a model would say if it stopped after each of its layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from glasshouse.errors import InputError
from glasshouse.inspection.calls import check_whole, chosen, ids_of, layout_of, next_tokens, quiet, read_by_head
from glasshouse.inspection.drawing import MOST_CELLS, MOST_COLUMNS, MOST_TEXTS, Drawn, heatmap, labels, not_drawn
from glasshouse.inspection.recording import record
from glasshouse.inspection.sites import bare, plain
from glasshouse.layers.layout import Layout
from glasshouse.models import Encoder, Model, check_pair
from glasshouse.models.heads import Labels, NoHead, Vocabulary
from glasshouse.text import Tokenizer

LOGITS = 2**24  # made at once, then thrown away


@dataclass(frozen=True, eq=False)
class Lens(Drawn):
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
    rows: tuple[str, ...]  # the site of each layer
    positions: tuple[int, ...]
    ids: Tensor  # what the model was given there
    tok: Tokenizer | None = None
    names: tuple[str, ...] = ()  # of the labels, where the head gives labels

    def _drawing(self) -> str:
        n_texts, n_positions = self.ids.shape
        count = min(n_positions, MOST_COLUMNS, max(1, MOST_CELLS // len(self.rows)))
        note = not_drawn(positions=n_positions - count, texts=n_texts - MOST_TEXTS)
        return "".join(
            heatmap(
                self.probabilities[:, text, :count, 0],
                rows=self.rows,
                columns=labels(self.ids[text, :count], self.tok),
                caption=f"text {text}: the likeliest after each layer, the darker the surer{note}",
                words=[self._words(layer) for layer in self.tokens[:, text, :count, 0]],
            )
            for text in range(min(n_texts, MOST_TEXTS))
        )

    def _words(self, tokens: Tensor) -> list[str]:
        return [self.names[number] for number in tokens.tolist()] if self.names else labels(tokens, self.tok)


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
    >>> from glasshouse.inspection.readout import lens
    >>> model = gh.build(gh.preset("tiny-decoder"))
    >>> seen = lens(model, torch.tensor([[1, 2, 3]]), positions=[0, -1], top_k=4)
    >>> seen.rows, seen.tokens.shape, seen.rank.shape
    (('embed', 'resid_post.0', 'resid_post.1'), torch.Size([3, 1, 2, 4]), torch.Size([3, 1, 2]))
    """
    whole = plain(model)
    _check_readable(whole, top_k)
    if tok is not None:
        check_pair(whole, tok)
    check_whole(call)
    ids = ids_of(whole, inputs)
    prefix, stack = read_by_head(whole)
    depth = len(stack.blocks)
    shown, places = chosen(layers, depth + 1, "layers"), chosen(positions, ids.shape[1], "positions")
    if not shown or not places:
        raise InputError(f"{'positions' if shown else 'layers'} is empty, but a lens needs one at least; name it.")
    layout = layout_of(whole, ids, call)
    true = true_tokens(whole, ids, layout, targets)[:, places]

    names = [prefix + name for name in ("embed", *(f"resid_post.{layer}" for layer in range(depth)))]
    with quiet(whole):
        # The last layer is read behind the final norm, as the head reads it.
        sites = [f"{prefix}final" if layer == depth else names[layer] for layer in shown]
        vectors = _vectors(whole, inputs, call, sites, places)
        read = read_off(whole, vectors, true.expand(vectors.shape[:3]), layout, top_k)
    return Lens(
        *read,
        rows=tuple(names[layer] for layer in shown),
        positions=tuple(places),
        ids=ids[:, places],
        tok=tok,
        names=_label_names(whole),
    )


class ReadOff(NamedTuple):
    """What is read off vectors [...]: the fields of a `Lens`."""

    tokens: Tensor  # [..., rank]
    probabilities: Tensor  # [..., rank]
    entropy: Tensor
    rank: Tensor
    loss: Tensor


def read_off(model: Model, vectors: Tensor, goals: Tensor, layout: Layout, top_k: int = 5) -> ReadOff:
    """Read vectors [..., D], as the head is given them, and how the true tokens [...] stand; below 0 there is none.

    Logits are made for a few vectors at a time. Call it where the model is `quiet`.
    """
    _check_readable(model, top_k)
    head, shape, step = bare(model.head), vectors.shape[:-1], max(1, LOGITS // outputs(model))
    # By forward, past the hooks of who looks at or changes the model meanwhile: this is no part of a call.
    parts = [
        _read(head.forward(some, layout, model.token.table.weight), theirs, top_k)
        for some, theirs in zip(vectors.flatten(0, -2).split(step), goals.flatten().split(step), strict=True)
    ]
    return ReadOff(*(torch.cat(one).unflatten(0, shape) for one in zip(*parts, strict=True)))


def is_readable(model: Model) -> bool:
    """Say whether the head gives logits at every position."""
    head = bare(model.head)
    return isinstance(head, Vocabulary) or (isinstance(head, Labels) and isinstance(head.pool, NoHead))


def _check_readable(model: Model, top_k: int) -> None:
    if not is_readable(model):
        raise InputError(
            f"the head is {model.spec.head.kind!r}, but a lens needs logits at every position; "
            "use a model with next_token, masked_token or token_label."
        )
    if top_k < 1:
        raise InputError(f"top_k is {top_k}, but at least the likeliest token is shown; give 1 or more.")


def outputs(model: Model) -> int:
    """Return how many logits the head gives at a position."""
    return model.head.classify.out_features if isinstance(model.head, Labels) else model.spec.vocab_size


def _vectors(
    model: Model, inputs: tuple[Tensor, ...], call: Mapping[str, Any], sites: Sequence[str], places: Sequence[int]
) -> Tensor:
    """Return the stream at some sites and positions as the head would be given it, [site, B, position, D]."""
    start, stop = min(places), max(places) + 1
    with record(model, *(f"{site}[position={start}:{stop}]" for site in sites), stop=True) as seen:
        model(*inputs, **call)
    prefix, stack = read_by_head(model)
    picked = torch.tensor(places, device=inputs[-1].device) - start
    streams = [seen[site][:, picked] for site in sites]
    del seen  # it may hold many more positions
    # By forward, past the hooks of who looks at or changes the model meanwhile: this is no part of a call.
    return torch.stack(
        [x if site == f"{prefix}final" else stack.norm.forward(x) for x, site in zip(streams, sites, strict=True)]
    )


def _read(logits: Tensor, goals: Tensor, top_k: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return what is kept of logits [N, V], given the true tokens [N]."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    logs = logits.log_softmax(-1)
    tokens = logits.topk(min(top_k, logits.shape[-1])).indices
    known, goal = goals >= 0, goals.clamp(min=0)[:, None]
    return (
        tokens,
        logs.gather(-1, tokens).exp(),
        -(logs.exp() * logs).sum(-1),
        (logits > logits.gather(-1, goal)).sum(-1).where(known, -1),
        -logs.gather(-1, goal)[:, 0].where(known, torch.nan),
    )


def true_tokens(model: Model, ids: Tensor, layout: Layout, targets: Tensor | None = None) -> Tensor:
    """Return the token that each position should say, [B, S]; -1 where there is none."""
    if targets is not None:
        _check_targets(targets, ids, outputs(model))
        true = targets.to(ids.device, torch.long)
    elif isinstance(model.head, Labels):
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
    if not isinstance(model.head, Labels):
        return ()
    given: tuple[str, ...] = getattr(model.spec.head, "labels", ())
    return given or tuple(str(number) for number in range(outputs(model)))
