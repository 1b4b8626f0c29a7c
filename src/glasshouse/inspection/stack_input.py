"""What one stack of a model reads in a call, and its attention read a few queries at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from glasshouse.errors import InputError
from glasshouse.inspection.forward_pass import check_full_sequence, eval_mode, final_stack, ids_of
from glasshouse.inspection.hooks import Hook, hook_manager_of
from glasshouse.inspection.recording import record
from glasshouse.inspection.sites import Index, Selection, Site, sites
from glasshouse.layers.embedding import check_ids
from glasshouse.layers.layout import Layout, make_layout
from glasshouse.models import Model, Seq2Seq
from glasshouse.models.stack import Stack

TILE = 2**22  # scores or weights read at once


@dataclass(frozen=True, eq=False)
class StackInput:
    """The tokens that a stack reads in a call, and where they stand."""

    model: Model
    inputs: tuple[Tensor, ...]
    call: Mapping[str, Any]
    stack: Stack
    prefix: str  # what the names of the stack's sites begin with
    ids: Tensor  # [B, S]
    layout: Layout

    @cached_property
    def real(self) -> Tensor:
        """Which tokens are no padding, [B, S]."""
        return torch.ones_like(self.ids, dtype=torch.bool) if self.layout.real is None else self.layout.real

    @cached_property
    def documents(self) -> Tensor:
        """The document of each token, [B, S]: 0 where a row is one."""
        return torch.zeros_like(self.ids) if self.layout.documents is None else self.layout.documents

    @cached_property
    def previous(self) -> Tensor:
        """The place of the real token just before each one of its document, [B, S]; -1 where there is none."""
        places = torch.arange(self.ids.shape[1], device=self.ids.device).expand(self.ids.shape)
        latest = places.where(self.real, -1).cummax(1).values
        before = F.pad(latest[:, :-1], (1, 0), value=-1)
        same = self.documents.gather(1, before.clamp(min=0)) == self.documents
        return before.where(same & self.real, -1)

    def sites(self, name: str) -> list[Site]:
        """Return the site of that name in each layer."""
        known = sites(self.model)
        return [known[f"{self.prefix}{name}.{layer}"] for layer in range(len(self.stack.blocks))]

    def stream(self) -> list[Site]:
        """Return the sites at which the stream leaves the embedding and each layer."""
        return [sites(self.model)[f"{self.prefix}embed"], *self.sites("resid_post")]

    def tiled_hooks(self, site: Site, read: Callable[[slice, Tensor], None], head: Index = slice(None)) -> list[Hook]:
        """Return uses that read a site's scores or weights a few queries at a time, so that all are never held.

        Each is worked out, read and thrown away before the next; `read` gets the queries and [B, H, queries, keys].
        """
        rows, length = self.ids.shape
        step = max(1, TILE // (rows * self.model.spec.n_heads * length))
        every = slice(None)
        spans = [slice(start, min(start + step, length)) for start in range(0, length, step)]

        def take(span: slice, value: Tensor) -> None:
            with torch.autocast(value.device.type, enabled=False):  # sums of weights need more digits than a product
                read(span, value)

        return [Hook(Selection(site, (every, head, span, every)), read=partial(take, span)) for span in spans]

    def run(self, uses: Iterable[Hook], until: str) -> None:
        """Call the model with these uses, and no further than to a site behind them."""
        watched = record(self.model, f"{self.prefix}{until}", stop=True)
        with eval_mode(self.model), watched, hook_manager_of(self.model).registered(uses):
            self.model(*self.inputs, **self.call)


def make_stack_input(
    model: Model, inputs: tuple[Tensor, ...], call: Mapping[str, Any], stack: str | None = None
) -> StackInput:
    """Return what a stack reads in a call: the one that the head reads from, or the one that is named."""
    check_full_sequence(call)
    ids = ids_of(model, inputs)
    prefix, chosen = final_stack(model)
    side = "target_" if isinstance(model, Seq2Seq) else ""
    if stack is not None and not (isinstance(model, Seq2Seq) and stack in ("encoder", "decoder")):
        raise InputError(
            f"stack is {stack!r}, but it can only be 'encoder' or 'decoder', of an encoder-decoder; leave it out."
        )
    if stack == "encoder" and isinstance(model, Seq2Seq):
        ids, prefix, chosen, side = inputs[0], "encoder.", model.encoder, ""
        check_ids(ids, model.spec.vocab_size, "source", "vocab_size")
    told = {name: call.get(side + name) for name in ("lengths", "mask", "documents", "prefix")}
    return StackInput(model, inputs, call, chosen, prefix, ids, make_layout(ids, **told, side=side))
