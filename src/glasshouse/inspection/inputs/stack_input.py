"""The input of one stack of a model, and its attention computed a few queries at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from glasshouse.errors import InputError
from glasshouse.inspection.hooks import Hook, hook_manager_of
from glasshouse.inspection.inputs.forward_pass import check_full_sequence, eval_mode, final_stack, ids_of
from glasshouse.inspection.recording import record
from glasshouse.inspection.sites import Index, Selection, Site, sites
from glasshouse.layers.attend.layout import Layout, make_layout
from glasshouse.layers.embedding import check_ids
from glasshouse.models import Model, Seq2Seq
from glasshouse.models.stack import Stack

TILE = 2**22  # attention scores or weights in memory at once


@dataclass(frozen=True, eq=False)
class StackInput:
    """The tokens that a stack is given in a forward pass, and their layout."""

    model: Model
    inputs: tuple[Tensor, ...]
    model_kwargs: Mapping[str, Any]
    stack: Stack
    prefix: str  # of the names of the stack's sites
    ids: Tensor  # [B, S]
    layout: Layout

    @cached_property
    def real(self) -> Tensor:
        """Which tokens are not padding, [B, S]."""
        return torch.ones_like(self.ids, dtype=torch.bool) if self.layout.real is None else self.layout.real

    @cached_property
    def documents(self) -> Tensor:
        """The document of each token, [B, S]; all 0 without sequence packing."""
        return torch.zeros_like(self.ids) if self.layout.documents is None else self.layout.documents

    @cached_property
    def previous(self) -> Tensor:
        """The index of the previous real token of the same document, [B, S]; -1 where there is none."""
        indices = torch.arange(self.ids.shape[1], device=self.ids.device).expand(self.ids.shape)
        latest = indices.where(self.real, -1).cummax(1).values
        before = F.pad(latest[:, :-1], (1, 0), value=-1)
        same = self.documents.gather(1, before.clamp(min=0)) == self.documents
        return before.where(same & self.real, -1)

    def sites(self, name: str) -> list[Site]:
        """Return the site of this name in each layer."""
        known = sites(self.model)
        names = [f"{self.prefix}{name}.{layer}" for layer in range(len(self.stack.blocks))]
        if missing := [one for one in names if one not in known]:
            raise InputError(f"the model's layers have no site {missing[0]}, which is needed here.")
        return [known[one] for one in names]

    def stream(self) -> list[Site]:
        """Return the sites of the residual stream after the embedding and each layer."""
        return [sites(self.model)[f"{self.prefix}embed"], *self.sites("resid_post")]

    def tiled_hooks(self, site: Site, read: Callable[[slice, Tensor], None], head: Index = slice(None)) -> list[Hook]:
        """Return hooks that read scores or a pattern a few queries at a time, without materializing it.

        Each tile is computed, read and freed before the next; `read` gets the queries and [B, H, queries, keys].
        """
        rows, length = self.ids.shape
        step = max(1, TILE // (rows * self.model.spec.n_heads * length))
        every = slice(None)
        spans = [slice(start, min(start + step, length)) for start in range(0, length, step)]

        def take(span: slice, value: Tensor) -> None:
            with torch.autocast(value.device.type, enabled=False):  # sums of weights need full precision
                read(span, value)

        return [Hook(Selection(site, (every, head, span, every)), read=partial(take, span)) for span in spans]

    def run(self, hooks: Iterable[Hook], until: str) -> None:
        """Run the model with these hooks, stopping at a site after them."""
        stopping = record(self.model, f"{self.prefix}{until}", stop=True)
        with eval_mode(self.model), stopping, hook_manager_of(self.model).registered(hooks):
            self.model(*self.inputs, **self.model_kwargs)


def make_stack_input(
    model: Model, inputs: tuple[Tensor, ...], model_kwargs: Mapping[str, Any], stack: str | None = None
) -> StackInput:
    """Return the input of a stack: the one that feeds the head, or the named one."""
    check_full_sequence(model_kwargs)
    ids = ids_of(model, inputs)
    prefix, chosen = final_stack(model)
    side = "target_" if isinstance(model, Seq2Seq) else ""
    if stack is not None and not (isinstance(model, Seq2Seq) and stack in ("encoder", "decoder")):
        raise InputError(
            f"stack is {stack!r}, but it must be 'encoder' or 'decoder', for an encoder-decoder only; leave it out."
        )
    if stack == "encoder" and isinstance(model, Seq2Seq):
        ids, prefix, chosen, side = inputs[0], "encoder.", model.encoder, ""
        check_ids(ids, model.spec.vocab_size, "source", "vocab_size")
    given = {name: model_kwargs.get(side + name) for name in ("lengths", "mask", "documents", "prefix_lengths")}
    return StackInput(model, inputs, model_kwargs, chosen, prefix, ids, make_layout(ids, **given, side=side))
