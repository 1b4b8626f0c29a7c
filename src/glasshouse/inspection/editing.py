"""Editing: what stands at chosen sites replaced or changed on its way, while a block lasts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from glasshouse.errors import InputError
from glasshouse.inspection.hooks import Hook, hook_manager_of
from glasshouse.inspection.sites import Selection, Site, select

Change = Callable[[Tensor], Tensor]
AblationValue = Literal["zero", "mean"] | Tensor | float


@dataclass(frozen=True, eq=False)
class AblationEdit:
    """An edit that takes out what some heads say, or all that a site says: it knows a site's axes."""

    heads: tuple[int, ...] | None  # None: all there is
    to: AblationValue

    def of(self, value: Tensor, site: Site) -> Tensor:
        """Return a whole value of a site as it becomes."""
        if self.heads is None:
            return self._filled(value, site)
        if "head" not in site.axes:
            raise InputError(f"{site.name} has no heads to silence; take z.")
        count = value.shape[1]
        if wrong := [head for head in self.heads if not -count <= head < count]:
            raise InputError(
                f"head {wrong[0]} is to be silenced, but there are {count}; stay within 0 and {count - 1}."
            )
        chosen = torch.stack([value[:, head] for head in self.heads], 1)  # by no index, which would wait for a GPU
        filled = self._filled(chosen, site)
        silent = value.clone()
        for place, head in enumerate(self.heads):
            silent[:, head] = filled[:, place]
        return silent

    def _filled(self, value: Tensor, site: Site) -> Tensor:
        """Return what a value, or that of the heads in question, becomes."""
        if isinstance(self.to, Tensor):
            try:
                return self.to.to(value).expand_as(value)
            except RuntimeError:
                raise InputError(
                    f"{site.name} is to become a tensor of shape {list(self.to.shape)}, which does not fit "
                    f"{list(value.shape)}; give one that does."
                ) from None
        if self.to == "mean":
            if "query" in site.axes:
                raise InputError(f"{site.name} has no mean that keeps to what each query may see; take that of z.")
            over = [number for number, axis in enumerate(site.axes) if axis in ("batch", "position")]
            return value.mean(over, keepdim=True).expand_as(value)
        return torch.full_like(value, 0.0 if self.to == "zero" else self.to)


Edit = Change | AblationEdit | Tensor | float  # what makes a new value of the old, or that value


@contextmanager
def edit(model: nn.Module, edits: Mapping[str, Edit | Sequence[Edit]]) -> Iterator[None]:
    """Change what stands at the named sites while the model is called.

    An edit is a function of the value, or what to put in its place; several for one name act in turn, and so do the
    edits of nested blocks, the outer ones first. Names are those of `record`: with an index in brackets only that
    part is changed. Scores and patterns are changed in a kernel that is written out, that of their layer alone. What
    other threads compute meanwhile is not changed. Derivatives are to be taken inside the block.

    >>> import torch, glasshouse as gh
    >>> model = gh.build(gh.preset("tiny-decoder", init="normal")).eval()
    >>> ids = torch.tensor([[1, 2, 3]])
    >>> with gh.edit(model, {"z.1": gh.ablate_head(2), "ffn_out.0[position=-1]": 0.0}):
    ...     changed = model(ids)
    >>> torch.equal(changed, model(ids))
    False
    """
    if not isinstance(edits, Mapping):
        raise InputError(f"edits is a {type(edits).__name__}, but it must say by site what to do: {{'z.3': 0.0}}.")
    uses = [
        Hook(one, edit=partial(_applied, one, name, each), position_dependent=_goes_by_place(one, each))
        for name, given in edits.items()
        for one in select(model, name)
        for each in (given if isinstance(given, Sequence) else [given])
    ]
    with hook_manager_of(model).registered(uses):
        yield


def _applied(asked: Selection, name: str, change: Edit, value: Tensor) -> Tensor:
    """Return a value with the part asked for changed."""
    part = asked.of(value)
    new: object
    if isinstance(change, AblationEdit):
        new = asked.of(change.of(value, asked.site))
    else:
        # A copy: who changes it where it stands must reach neither a record nor a cache.
        new = change(part.clone()) if callable(change) else change
    if not isinstance(new, Tensor | float | int):
        raise InputError(f"the edit of {name} gave a {type(new).__name__}; give a tensor like the one it gets.")
    # Not by way of the host, where a graph of the step may be in the making.
    new = new.to(value) if isinstance(new, Tensor) else value.new_full((), new)
    try:
        new = new.expand(part.shape)
    except RuntimeError:
        raise InputError(
            f"the edit of {name} gave shape {list(new.shape)}, but the value there has {list(part.shape)}; "
            "give one of the same shape."
        ) from None
    if asked.whole:
        return new
    changed = value.clone()
    changed[asked.index] = new
    return changed


def _goes_by_place(asked: Selection, change: Edit) -> bool:
    axes = zip(asked.site.axes, asked.index, strict=True)
    cut = any(axis in ("batch", "position", "query", "key") and one != slice(None) for axis, one in axes)
    return cut or (isinstance(change, AblationEdit) and isinstance(change.to, str) and change.to == "mean")


def ablate_head(*heads: int, to: AblationValue = "zero") -> AblationEdit:
    """Return an edit for a site with heads that silences some: to zero, to their mean, or to a given value.

    The mean is taken over the rows and positions of the call, padding included; a tensor must fit [B, heads, S, d].

    >>> import glasshouse as gh
    >>> model = gh.build(gh.preset("tiny-decoder"))
    >>> with gh.edit(model, {"z.0": ablate_head(1)}), gh.record(model, "z.0") as seen:
    ...     _ = model(torch.tensor([[1, 2, 3]]))
    >>> seen["z.0"].flatten(2).abs().sum(-1) > 0
    tensor([[ True, False,  True,  True]])
    """
    if not heads:
        raise InputError("ablate_head was given no head; name at least one.")
    if isinstance(to, str) and to not in ("zero", "mean"):
        raise InputError(f"to is {to!r}, but it must be 'zero', 'mean' or a value.")
    return AblationEdit(heads, to)


def mean_ablate() -> AblationEdit:
    """Return an edit to the mean over the rows and positions of the call: only what a site always says stays.

    >>> import glasshouse as gh
    >>> model = gh.build(gh.preset("tiny-decoder"))
    >>> with gh.edit(model, {"hidden.0[neuron=5]": mean()}), gh.record(model, "hidden.0[neuron=5]") as seen:
    ...     _ = model(torch.tensor([[1, 2, 3]]))
    >>> len(seen["hidden.0"].unique())
    1
    """
    return AblationEdit(None, "mean")


def scale(factor: float) -> Change:
    """Return an edit that multiplies.

    >>> scale(2.0)(torch.ones(2))
    tensor([2., 2.])
    """
    return lambda value: value * factor


def add(vector: Tensor) -> Change:
    """Return an edit that adds a vector, the same at every position.

    >>> add(torch.tensor([0.0, 1.0]))(torch.ones(2, 2))
    tensor([[1., 2.],
            [1., 2.]])
    """
    moved: dict[tuple[torch.device, torch.dtype], Tensor] = {}  # an engine's later steps are graphs: nothing moves

    def change(value: Tensor) -> Tensor:
        if vector.requires_grad:
            return value + vector.to(value)
        key = (value.device, value.dtype)
        if key not in moved:
            moved[key] = vector.to(value)
        return value + moved[key]

    return change
