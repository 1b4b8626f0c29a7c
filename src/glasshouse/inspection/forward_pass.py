"""How the tools call a model: what they are given, and the model as it is used, not as it is trained."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from glasshouse.errors import InputError
from glasshouse.inspection.hooks import hook_manager_of
from glasshouse.layers.embedding import check_ids
from glasshouse.layers.layout import Layout, make_layout
from glasshouse.models import Model, Seq2Seq
from glasshouse.models.stack import Stack


@contextmanager
def eval_mode(*models: nn.Module) -> Iterator[None]:
    """Have models called without dropout and without a graph; afterwards each module is in the mode it was in.

    Others who look into one wait meanwhile; who trains it in another thread would do so without dropout. Several
    are always taken in the same order, so that two threads that want the same ones never wait for each other.

    >>> import glasshouse as gh
    >>> model = gh.build(gh.preset("tiny-decoder"))
    >>> with quiet(model):
    ...     print(model.training)
    False
    >>> model.training
    True
    """
    with ExitStack() as locks:
        for board in sorted(map(hook_manager_of, models), key=lambda board: board.number):
            locks.enter_context(board.lock)
        in_training = [module for model in models for module in model.modules() if module.training]
        for model in models:
            model.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            for module in in_training:
                module.training = True


def check_full_sequence(call: Mapping[str, Any]) -> None:
    """Refuse what leaves a part of the text to another call: a tool looks at all of it, some more than once."""
    for name in ("cache", "keep"):
        if call.get(name) is not None:
            raise InputError(f"{name} was given, but a whole text is looked at here; leave it out.")


def final_stack(model: Model) -> tuple[str, Stack]:
    """Return the stack whose vectors the head reads, and what the names of its sites begin with."""
    return ("decoder.", model.decoder) if isinstance(model, Seq2Seq) else ("", model.stack)


def layout_of(model: Model, ids: Tensor, call: Mapping[str, Any]) -> Layout:
    """Return where the ids that go into the stack the head reads stand."""
    side = "target_" if isinstance(model, Seq2Seq) else ""
    told = {name: call.get(side + name) for name in ("lengths", "mask", "documents")}
    return make_layout(ids, **told, side=side)


def ids_of(model: Model, inputs: tuple[Tensor, ...]) -> Tensor:
    """Return those of a call's inputs that go into the stack the head reads: the ids, or the target."""
    wanted = ("source", "target") if isinstance(model, Seq2Seq) else ("ids",)
    if len(inputs) != len(wanted):
        raise InputError(
            f"the number of inputs without a name is {len(inputs)}, but this model takes {len(wanted)}; "
            f"give {' and '.join(wanted)} right after it."
        )
    check_ids(inputs[-1], model.spec.vocab_size, wanted[-1], "vocab_size")
    return inputs[-1]


def next_tokens(ids: Tensor, layout: Layout) -> Tensor:
    """Return the next real token of the same document for each of ids [B, S]; -1 where there is none.

    >>> ids = torch.tensor([[5, 6, 0, 7]])
    >>> next_tokens(ids, make_layout(ids, mask=torch.tensor([[True, True, False, True]])))
    tensor([[ 6,  7, -1, -1]])
    """
    length = ids.shape[1]
    places = torch.arange(length, device=ids.device).expand(ids.shape)
    if layout.real is not None:
        places = places.where(layout.real, length)
    after = F.pad(places.flip(1).cummin(1).values.flip(1)[:, 1:], (0, 1), value=length)
    there, after = after < length, after.clamp(max=length - 1)
    if layout.documents is not None:
        there = there & (layout.documents.gather(1, after) == layout.documents)
    if layout.real is not None:
        there = there & layout.real
    return ids.long().gather(1, after).where(there, -1)


def resolve_indices(wanted: Sequence[int] | None, size: int, name: str) -> list[int]:
    """Return which of `size` things are wanted, counted from 0: all where nothing was said; -1 is the last.

    >>> chosen(None, 3, "layers"), chosen((0, -1), 3, "layers")
    ([0, 1, 2], [0, 2])
    """
    if wanted is None:
        return list(range(size))
    if not isinstance(wanted, Sequence) or not all(isinstance(one, int) for one in wanted):
        raise InputError(f"{name} is {wanted!r}, but it must be a list of numbers.")
    for one in wanted:
        if not -size <= one < size:
            raise InputError(f"{name} holds {one}, but there are {size}; stay within 0 and {size - 1}.")
    return [range(size)[one] for one in wanted]
