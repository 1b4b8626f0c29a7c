"""How the tools run a model: eval mode, and the inputs, layout and targets of a forward pass."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from glasshouse.errors import InputError
from glasshouse.inspection.hooks import hook_manager_of
from glasshouse.layers.attend.layout import Layout, make_layout
from glasshouse.layers.embedding import check_ids
from glasshouse.models import Model, Seq2Seq
from glasshouse.models.stack import Stack
from glasshouse.text import Tokenizer


@contextmanager
def eval_mode(*models: nn.Module) -> Iterator[None]:
    """Put models in eval mode under no_grad; afterwards each module is back in the mode it was in.

    The hook managers of the models are locked meanwhile, always in the same order, which rules out a deadlock. A
    thread that trains one of them does not wait, and would train it without dropout.

    >>> import glasshouse as gh
    >>> model = gh.build(gh.preset("tiny-decoder"))
    >>> with eval_mode(model):
    ...     print(model.training)
    False
    >>> model.training
    True
    """
    with ExitStack() as locks:
        for manager in sorted(map(hook_manager_of, models), key=lambda manager: manager.number):
            locks.enter_context(manager.lock)
        in_training = [module for model in models for module in model.modules() if module.training]
        for model in models:
            model.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            for module in in_training:
                module.training = True


def check_full_sequence(model_kwargs: Mapping[str, Any]) -> None:
    """Raise InputError for keywords that leave out part of the sequence: the tools run whole sequences."""
    for name in ("cache", "logits_to_keep"):
        if model_kwargs.get(name) is not None:
            raise InputError(f"{name} was given, but whole sequences are inspected here; leave it out.")


def final_stack(model: Model) -> tuple[str, Stack]:
    """Return the stack that feeds the head, and the prefix of its site names."""
    return ("decoder.", model.decoder) if isinstance(model, Seq2Seq) else ("", model.stack)


def layout_of(model: Model, ids: Tensor, model_kwargs: Mapping[str, Any]) -> Layout:
    """Return the layout of the ids that go into the stack that feeds the head."""
    side = "target_" if isinstance(model, Seq2Seq) else ""
    given = {name: model_kwargs.get(side + name) for name in ("lengths", "mask", "documents")}
    return make_layout(ids, **given, side=side)


def ids_of(model: Model, inputs: tuple[Tensor, ...]) -> Tensor:
    """Return the input that goes into the stack that feeds the head: the ids, or the target."""
    names = ("source", "target") if isinstance(model, Seq2Seq) else ("ids",)
    if len(inputs) != len(names):
        raise InputError(
            f"the number of positional inputs is {len(inputs)}, but this model takes {len(names)}; "
            f"give {' and '.join(names)} right after it."
        )
    check_ids(inputs[-1], model.spec.vocab_size, names[-1], "vocab_size")
    return inputs[-1]


def next_tokens(ids: Tensor, layout: Layout) -> Tensor:
    """Return the next real token of the same document for each of ids [B, S]; -1 where there is none.

    >>> ids = torch.tensor([[5, 6, 0, 7]])
    >>> next_tokens(ids, make_layout(ids, mask=torch.tensor([[True, True, False, True]])))
    tensor([[ 6,  7, -1, -1]])
    """
    length = ids.shape[1]
    indices = torch.arange(length, device=ids.device).expand(ids.shape)
    if layout.real is not None:
        indices = indices.where(layout.real, length)
    after = F.pad(indices.flip(1).cummin(1).values.flip(1)[:, 1:], (0, 1), value=length)
    exists, after = after < length, after.clamp(max=length - 1)
    if layout.documents is not None:
        exists = exists & (layout.documents.gather(1, after) == layout.documents)
    if layout.real is not None:
        exists = exists & layout.real
    return ids.long().gather(1, after).where(exists, -1)


def resolve_indices(indices: Sequence[int] | None, size: int, name: str) -> list[int]:
    """Return indices below `size` without negative ones, -1 being the last; None means all.

    >>> resolve_indices(None, 3, "layers"), resolve_indices((0, -1), 3, "layers")
    ([0, 1, 2], [0, 2])
    """
    if indices is None:
        return list(range(size))
    if not isinstance(indices, Sequence) or not all(isinstance(one, int) for one in indices):
        raise InputError(f"{name} is {indices!r}, but it must be a list of integers.")
    for one in indices:
        if not -size <= one < size:
            raise InputError(f"{name} contains {one}, but there are {size}; use 0 to {size - 1}.")
    return [range(size)[one] for one in indices]


def columns_of(positions: Tensor, layout: Layout, name: str) -> Tensor:
    """Return the column of positions [B, ...] that are counted over the real tokens of each sequence, -1 the last.

    >>> ids = torch.tensor([[5, 6, 0], [5, 6, 7]])
    >>> columns_of(torch.tensor([-1, -1]), make_layout(ids, lengths=torch.tensor([2, 3])), "position")
    tensor([1, 2])
    """
    length = layout.positions.shape[1]
    if layout.real is None:
        return positions % length
    counts = layout.real.sum(1)
    for number, count in enumerate(counts.tolist()):
        low, high = (int(edge) for edge in positions[number].aminmax())
        if low < -count or high >= count:
            wrong = low if low < -count else high
            raise InputError(f"{name} is {wrong}, but sequence {number} has {count} tokens without its padding.")
    among = positions.view(len(counts), -1) % counts[:, None]
    every = torch.arange(length, device=positions.device)
    columns = every.where(layout.real, length).sort(1).values  # those of real tokens first
    return columns.gather(1, among).view(positions.shape)


def token_id(token: int | str | Tensor, name: str, tok: Tokenizer | None) -> int | Tensor:
    """Return the id of a token given as text; ids are returned unchanged."""
    if not isinstance(token, str):
        return token
    if tok is None:
        raise InputError(f"{name} is the text {token!r}; give its id, tok.encode({token!r})[0], or give tok as well.")
    number = tok.token_to_id(token)
    ids = (
        [number] if number is not None and number in tok.special_ids else tok.encode(token, add_special_tokens=False)
    )
    if len(ids) != 1:
        tokens = ", ".join(repr(tok.id_to_token(one)) for one in ids) or "none"
        raise InputError(f"{name} is {token!r}, but that is {len(ids)} tokens ({tokens}); give one of them.")
    return ids[0]


def per_sequence(value: int | Tensor, name: str, ids: Tensor, low: int, high: int) -> Tensor:
    """Return one integer for each sequence of ids [B, S], at least low and below high."""
    try:
        given = torch.as_tensor(value, device=ids.device)
    except (RuntimeError, TypeError, ValueError):  # a string, None, or ragged lists
        raise InputError(
            f"{name} is {value!r}, but it must be one integer, or one for each of {len(ids)} sequences."
        ) from None
    if given.dtype not in (torch.int64, torch.int32) or given.shape not in ((), ids.shape[:1]):
        raise InputError(
            f"{name} has shape {list(given.shape)} and type {given.dtype}, but it must be one integer, or one "
            f"for each of {len(ids)} sequences."
        )
    lowest, highest = (int(edge) for edge in given.aminmax())
    if lowest < low or highest >= high:
        wrong = lowest if lowest < low else highest
        raise InputError(f"{name} contains {wrong}, but it must be from {low} to {high - 1}.")
    return given.long().expand(len(ids))
