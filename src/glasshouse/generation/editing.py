"""Edits by request: in one batch each sequence has activations of its own scaled, shifted or replaced."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from glasshouse.errors import InputError
from glasshouse.generation.recording import FindSites, site_shape
from glasshouse.inspection.editing import Add, Change, Scale, apply_to_slice
from glasshouse.inspection.hooks import Hook, HookManager, hook_manager_of
from glasshouse.inspection.sites import Selection, Site, select
from glasshouse.models import Decoder, Seq2Seq

SlotEdit = Scale | Add | Tensor | float | Change  # multiply, add, replace, or what a function returns
NAMED = "a number or tensor to replace it, gh.inspection.scale(...), gh.inspection.add(...) or a function"


@dataclass(frozen=True, eq=False)
class RequestEdit:
    """One edit of a request: what happens to a site or a part of it, at which of its positions."""

    selection: Selection  # of the engine's copy of the model
    index: tuple[int | slice, ...]  # of the axes besides batch and position
    edit: SlotEdit

    @property
    def site(self) -> Site:
        """The site that it edits."""
        return self.selection.site

    @property
    def is_function(self) -> bool:
        """Whether Python is called in each step, which is then no graph."""
        return callable(self.edit) and not isinstance(self.edit, Scale | Add)

    def apply(self, scale: Tensor, shift: Tensor) -> None:
        """Change what one slot has of the site: value * scale + shift, without axes of batch and position."""
        match self.edit:
            case Scale(factor):
                scale[self.index] *= factor
                shift[self.index] *= factor
            case Add(vector):
                shift[self.index] += vector.to(shift)
            case Tensor() | float() | int() as value:
                scale[self.index] = 0.0
                shift[self.index] = value.to(shift) if isinstance(value, Tensor) else value


@dataclass(frozen=True)
class EditedRequest:
    """The edits of a sequence at a site where one is a function: all of them run in order, as those of `gh.edit`."""

    slot: int
    edits: Sequence[RequestEdit]
    fail: Callable[[str], None]  # ends the request with an error: its neighbours go on
    manager: HookManager

    @property
    def hook(self) -> Hook:
        """The hook of passes in which the sequence may be."""
        return Hook(_whole(self.edits[0].site), edit=self._edit, by_position=True)

    def _edit(self, value: Tensor) -> Tensor:
        """Return an activation with the row of this sequence edited."""
        tokens = self.manager.generated
        rows = [] if tokens is None else tokens.rows[:, 0].tolist()
        if tokens is None or self.slot not in rows:
            return value
        row = rows.index(self.slot)
        # A pass has tokens of the prompt, or one new token.
        is_new = bool(tokens.positions[row, 0] >= tokens.prompt_lengths[row, 0])
        own = value[row : row + 1]
        try:
            for one in self.edits:
                if one.selection.span != ("prompt" if is_new else "new"):
                    own = apply_to_slice(replace(one.selection, span=None), one.selection.name, one.edit, own)
        except Exception as error:
            self.fail(f"the edit of {one.selection.name} raised {type(error).__name__}: {error}")
            return value
        return torch.cat([value[:row], own, value[row + 1 :]])


class EditedSite:
    """The scale and the shift of each slot at a site: one of its prompt, and one of its new tokens."""

    def __init__(self, site: Site, shape: Sequence[int], slots: int, like: Tensor, manager: HookManager) -> None:
        self.name, self._site, self._manager = f"edits of {site.name}", site, manager
        self.hook = Hook(_whole(site), edit=self._edit, by_position=True)  # in passes of the whole batch
        # In float32 at least, which leaves the values of other requests as they are, to the bit.
        dtype = torch.promote_types(like.dtype, torch.float32)
        with torch.inference_mode(False):
            self.scale = torch.ones(2 * slots, *shape, dtype=dtype, device=like.device)
            self.shift = torch.zeros_like(self.scale)

    def _edit(self, value: Tensor) -> Tensor:
        """Return an activation [B, S, ...] or [B, H, S, ...] as the requests of its tokens edit it."""
        tokens = self._manager.generated
        if tokens is None:  # the pass of an encoder
            return value
        rows = tokens.rows * 2 + (tokens.positions >= tokens.prompt_lengths)  # [B, S]
        scale, shift = self.scale[rows], self.shift[rows]
        if "head" in self._site.axes:
            scale, shift = scale.transpose(1, 2), shift.transpose(1, 2)
        return torch.addcmul(shift, value.to(shift.dtype), scale).to(value.dtype)


class RequestEdits:
    """The edits of the requests of an engine, by slot."""

    def __init__(self, model: Decoder | Seq2Seq, slots: int) -> None:
        self._model, self._slots = model, slots
        self._sites: dict[str, EditedSite] = {}
        self._of_slots: dict[int, list[RequestEdit]] = {}

    def set(self, slot: int, edits: Sequence[RequestEdit]) -> None:
        """Edit the next request of a slot."""
        for site in {edit.site.name: edit.site for edit in self._of_slots.pop(slot, [])}:
            held = self._sites[site]
            held.scale[2 * slot : 2 * slot + 2], held.shift[2 * slot : 2 * slot + 2] = 1.0, 0.0
        for edit in linear(edits):
            held = self._at(edit.site)
            for row, span in ((2 * slot, "prompt"), (2 * slot + 1, "new")):
                if edit.selection.span in (None, span):
                    edit.apply(held.scale[row], held.shift[row])
        if edits := linear(edits):
            self._of_slots[slot] = edits

    def copy(self, source: int, target: int) -> None:
        """Edit a slot like another one, whose sequence it gets."""
        self.set(target, self._of_slots.get(source, []))

    def of(self, requests: Iterable[Sequence[RequestEdit]]) -> list[EditedSite]:
        """Return the sites that some requests edit without functions, from the edits of each."""
        names = {edit.site.name for edits in requests for edit in linear(edits)}
        return [self._sites[name] for name in sorted(names)]

    def by_functions(self, slot: int, edits: Sequence[RequestEdit], fail: Callable[[str], None]) -> list[Hook]:
        """Return hooks for a sequence's edits at the sites where one is a function."""
        names = dict.fromkeys(edit.site.name for edit in edits if edit.is_function)
        by_site = [[edit for edit in edits if edit.site.name == name] for name in names]
        return [EditedRequest(slot, some, fail, hook_manager_of(self._model)).hook for some in by_site]

    def _at(self, site: Site) -> EditedSite:
        if site.name not in self._sites:
            (own,) = select(self._model, site.name)
            like = self._model.token_embedding.table.weight
            shape = _slot_shape(site, self._model)
            self._sites[site.name] = EditedSite(own.site, shape, self._slots, like, hook_manager_of(self._model))
        return self._sites[site.name]


def linear(edits: Iterable[RequestEdit]) -> list[RequestEdit]:
    """Return the edits of a request that are a scale and a shift: those of sites without a function."""
    listed = list(edits)
    by_function = {one.site.name for one in listed if one.is_function}
    return [one for one in listed if one.site.name not in by_function]


def request_edits(
    model: Decoder | Seq2Seq, edits: Mapping[str, SlotEdit | Sequence[SlotEdit]], find: FindSites = select
) -> tuple[RequestEdit, ...]:
    """Return the edits that a request asks for, checked: by site, each with one edit or several in order.

    >>> import glasshouse as gh
    >>> model = gh.build(gh.preset("tiny-decoder"))
    >>> [edit.site.name for edit in request_edits(model, {"z.*[head=1]": 0.0})]
    ['z.0', 'z.1']
    """
    return tuple(
        _request_edit(model, one, each)
        for name, given in edits.items()
        for one in find(model, name)
        for each in (given if isinstance(given, Sequence) else [given])
    )


def _request_edit(model: Decoder | Seq2Seq, selection: Selection, edit: SlotEdit) -> RequestEdit:
    site = selection.site
    if (
        site.is_cached
        or not (site.hook_point == "output" or isinstance(site.hook_point, int))
        or "position" not in site.axes
        or site.name.startswith("encoder.")
    ):
        raise InputError(
            f"{site.name} cannot be edited by request: name a site of the residual stream, what a sublayer adds to "
            "it, z, q, or neurons; or edit the model for all requests by gh.edit."
        )
    by_axis = dict(zip(site.axes, selection.index, strict=True))
    if any(by_axis[axis] != slice(None) for axis in ("batch", "position")):
        raise InputError(
            f"{selection.name} is of some rows or positions, but a request is edited at all of its positions, at "
            "[position=prompt] or at [position=new]."
        )
    selection.check(site_shape(site, model.spec))
    index = tuple(one for axis, one in by_axis.items() if axis not in ("batch", "position"))
    found = RequestEdit(selection, index, edit)
    if isinstance(edit, bool) or not (isinstance(edit, Scale | Add | Tensor | float | int) or callable(edit)):
        raise InputError(f"the edit of {selection.name} is a {type(edit).__name__}, but it must be {NAMED}.")
    if found.is_function:
        return found
    scratch = torch.ones(_slot_shape(site, model))
    try:
        found.apply(scratch, scratch.clone())
    except RuntimeError:
        given = edit.vector if isinstance(edit, Add) else edit
        shape = list(given.shape) if isinstance(given, Tensor) else []
        raise InputError(
            f"the edit of {selection.name} has shape {shape}, but there it must be {list(scratch[index].shape)}."
        ) from None
    return found


def _slot_shape(site: Site, model: Decoder | Seq2Seq) -> tuple[int, ...]:
    """Return the shape of an activation of one token."""
    sizes = zip(site.axes, site_shape(site, model.spec), strict=True)
    return tuple(size for axis, size in sizes if axis not in ("batch", "position"))


def _whole(site: Site) -> Selection:
    return Selection(site, (slice(None),) * len(site.axes))
