"""Edit activations at chosen sites during a forward pass: ablation, scaling, steering, patching."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal, cast

import torch
from torch import Tensor, nn

from glasshouse.errors import InputError
from glasshouse.inspection.hooks import Hook, HookManager, hook_manager_of
from glasshouse.inspection.inputs.call_arguments import CallArguments
from glasshouse.inspection.inputs.forward_pass import check_full_sequence
from glasshouse.inspection.sites import Selection, Site, select, unwrap_model

Change = Callable[[Tensor], Tensor]
AblationValue = Literal["zero", "mean"] | Tensor | float
EditAt = Callable[[Tensor, int], None]  # edits an activation [B, ...] at one index, in place

MAX_ELEMENTS = 2**25  # in the largest tensor of a forward pass under batched edits


@dataclass(frozen=True, eq=False)
class AblationEdit:
    """Ablation of some heads, or of a whole activation; unlike a function, it gets the axes of the site."""

    heads: tuple[int, ...] | None  # None: the whole activation
    to: AblationValue

    def of(self, value: Tensor, site: Site) -> Tensor:
        """Return the ablated activation of a site."""
        if self.heads is None:
            return self._replacement(value, site)
        if "head" not in site.axes:
            raise InputError(f"{site.name} has no head axis to ablate; use z.")
        count = value.shape[1]
        if wrong := [head for head in self.heads if not -count <= head < count]:
            raise InputError(f"head {wrong[0]} is to be ablated, but there are {count}; use 0 to {count - 1}.")
        chosen = torch.stack([value[:, head] for head in self.heads], 1)  # an index tensor would synchronize the GPU
        replacement = self._replacement(chosen, site)
        ablated = value.clone()
        for number, head in enumerate(self.heads):
            ablated[:, head] = replacement[:, number]
        return ablated

    def _replacement(self, value: Tensor, site: Site) -> Tensor:
        """Return the ablation value in the shape of an activation, or of the chosen heads of one."""
        if isinstance(self.to, Tensor):
            try:
                return self.to.to(value).expand_as(value)
            except RuntimeError:
                raise InputError(
                    f"{site.name} is to be ablated to a tensor of shape {list(self.to.shape)}, which does not "
                    f"broadcast to {list(value.shape)}; give one that does."
                ) from None
        if self.to == "mean":
            if "query" in site.axes:
                raise InputError(f"{site.name} has no mean that respects the attention mask; ablate z to its mean.")
            over = [number for number, axis in enumerate(site.axes) if axis in ("batch", "position")]
            return value.mean(over, keepdim=True).expand_as(value)
        return torch.full_like(value, 0.0 if self.to == "zero" else self.to)


Edit = Change | AblationEdit | Tensor | float  # a function of the activation, or its replacement


@contextmanager
def edit(model: nn.Module, edits: Mapping[str, Edit | Sequence[Edit]]) -> Iterator[None]:
    """Edit the activations at the named sites while the model is called.

    An edit is a function of the activation, or its replacement; several for one name run in order, and so do the
    edits of nested blocks, outer ones first. Names are those of `record`: with an index in brackets only that slice
    is edited. During generation `[position=3:5]` are absolute positions of each request, `[position=prompt]` is its
    prompt and `[position=new]` what it generates; a function gets some of several positions at a time, and is to
    treat each alone. Editing scores or a pattern replaces the fused attention kernel of that layer by an explicit
    one. Calls of other threads are not edited. Call `backward` inside the block.

    >>> import torch, glasshouse as gh
    >>> model = gh.build(gh.preset("tiny-decoder", init="normal")).eval()
    >>> ids = torch.tensor([[1, 2, 3]])
    >>> with gh.edit(model, {"z.1": gh.ablate_head(2), "ffn_out.0[position=-1]": 0.0}):
    ...     changed = model(ids)
    >>> torch.equal(changed, model(ids))
    False
    """
    if not isinstance(edits, Mapping):
        raise InputError(f"edits is a {type(edits).__name__}, but it must map sites to edits, as in {{'z.3': 0.0}}.")
    manager = hook_manager_of(model)
    hooks = [
        Hook(
            one,
            edit=partial(_apply, manager, one, name, each),
            by_position=_is_by_position(one),
            position_dependent=_is_position_dependent(one, each),
        )
        for name, given in edits.items()
        for one in select(model, name)
        for each in (given if isinstance(given, Sequence) else [given])
    ]
    with manager.registered(hooks):
        yield


def _apply(manager: HookManager, selection: Selection, name: str, edit: Edit, value: Tensor) -> Tensor:
    """Return an activation edited at the selected positions, or in the selected slice."""
    if not _is_by_position(selection):
        return apply_to_slice(selection, name, edit, value)
    if manager.generated is None:  # the whole text, all of which is a prompt
        return value if selection.span == "new" else apply_to_slice(replace(selection, span=None), name, edit, value)
    at = selection.site.axes.index("position")
    index = (*selection.index[:at], slice(None), *selection.index[at + 1 :])
    if isinstance(selection.index[at], int) and callable(edit):
        # As in a forward pass of the whole text, the function is given an activation without the axis of positions.
        edit = partial(_at_each_position, edit, sum(isinstance(one, slice) for one in index[:at]))
    edited = apply_to_slice(replace(selection, index=index, span=None), name, edit, value)
    chosen = manager.generated.selected(selection)
    shape = [
        chosen.shape[("batch", "position").index(axis)] if axis in ("batch", "position") else 1
        for axis in selection.site.axes
    ]
    return edited.where(chosen.view(shape), value)


def _at_each_position(edit: Change, axis: int, value: Tensor) -> Tensor:
    """Return an activation [B, ..., S at `axis`, ...] edited position by position, each as a row of the batch."""
    merged = value.movedim(axis, 1).flatten(0, 1)
    new: object = edit(merged)
    if not isinstance(new, Tensor) or new.shape[1:] != merged.shape[1:]:
        return cast(Tensor, new)  # which broadcasts, or is refused
    return new.expand_as(merged).unflatten(0, (len(value), -1)).movedim(1, axis)


def apply_to_slice(selection: Selection, name: str, edit: Edit, value: Tensor) -> Tensor:
    """Return an activation with the selected slice edited."""
    part = selection.of(value)
    new: object
    if isinstance(edit, AblationEdit):
        new = selection.of(edit.of(value, selection.site))
    else:
        # A copy: an in-place edit must reach neither a recording nor a KV cache.
        new = edit(part.clone()) if callable(edit) else edit
    if not isinstance(new, Tensor | float | int):
        raise InputError(
            f"the edit of {name} returned a {type(new).__name__}; return a tensor of the shape it is given."
        )
    # Without a copy from the host, which a CUDA graph could not capture.
    new = new.to(value) if isinstance(new, Tensor) else value.new_full((), new)
    try:
        new = new.expand(part.shape)
    except RuntimeError:
        raise InputError(
            f"the edit of {name} gave shape {list(new.shape)}, but the activation has {list(part.shape)}; "
            "return one of the same shape."
        ) from None
    if selection.whole:
        return new
    edited = value.clone()
    edited[selection.index] = new
    return edited


def _is_by_position(selection: Selection) -> bool:
    """Whether it selects some positions, counted from the beginning of the text."""
    index = dict(zip(selection.site.axes, selection.index, strict=True)).get("position", slice(None))
    return selection.span is not None or index != slice(None)


def _is_position_dependent(selection: Selection, edit: Edit) -> bool:
    """Whether an edit means something else in a forward pass of a few tokens than in one of the whole text."""
    index = dict(zip(selection.site.axes, selection.index, strict=True))
    sliced = any(index.get(axis, slice(None)) != slice(None) for axis in ("batch", "query", "key"))
    ends = index.get("position", 0)
    from_end = any((end or 0) < 0 for end in ((ends.start, ends.stop) if isinstance(ends, slice) else (ends,)))
    at = selection.axes.index("position") - len(selection.axes) if "position" in selection.axes else 0
    each = isinstance(edit, Tensor) and at and edit.dim() >= -at and edit.shape[at] > 1  # a value for each position
    of_cache = selection.site.is_cached and _is_by_position(selection)
    to_mean = isinstance(edit, AblationEdit) and isinstance(edit.to, str) and edit.to == "mean"
    return sliced or from_end or bool(each) or of_cache or to_mean


def ablate_head(*heads: int, to: AblationValue = "zero") -> AblationEdit:
    """Return an edit that ablates attention heads: to zero, to their mean, or to a given value.

    The mean is over the batch and positions, padding included; a tensor must broadcast to [B, heads, S, d].

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
    """Return an edit for mean ablation: to the mean over the batch and positions of the call.

    >>> import glasshouse as gh
    >>> model = gh.build(gh.preset("tiny-decoder"))
    >>> with gh.edit(model, {"hidden.0[neuron=5]": mean_ablate()}), gh.record(model, "hidden.0[neuron=5]") as seen:
    ...     _ = model(torch.tensor([[1, 2, 3]]))
    >>> len(seen["hidden.0"].unique())
    1
    """
    return AblationEdit(None, "mean")


@dataclass(frozen=True, eq=False)
class Scale:
    """Multiplication by a factor."""

    factor: float

    def __call__(self, value: Tensor) -> Tensor:
        return value * self.factor


@dataclass(frozen=True, eq=False)
class Add:
    """Addition of a vector."""

    vector: Tensor
    _moved: dict[tuple[torch.device, torch.dtype], Tensor] = field(default_factory=dict, init=False, repr=False)

    def __call__(self, value: Tensor) -> Tensor:
        if self.vector.requires_grad:
            return value + self.vector.to(value)
        key = (value.device, value.dtype)
        if key not in self._moved:  # CUDA graphs of an engine cannot copy from the host
            self._moved[key] = self.vector.to(value)
        return value + self._moved[key]


def scale(factor: float) -> Scale:
    """Return an edit that multiplies by a factor.

    >>> scale(2.0)(torch.ones(2))
    tensor([2., 2.])
    """
    return Scale(factor)


def add(vector: Tensor) -> Add:
    """Return an edit that adds a vector, such as a steering vector, at every position.

    >>> add(torch.tensor([0.0, 1.0]))(torch.ones(2, 2))
    tensor([[1., 2.],
            [1., 2.]])
    """
    return Add(vector)


@dataclass(frozen=True, eq=False)
class BatchedEdits:
    """A prompt whose metric is computed under one edit at a time, in batches of copies with an edit each."""

    model: nn.Module
    prompt: CallArguments
    metric: Callable[[Tensor], Tensor]  # of the output of one copy
    n_outputs: int  # elements in the output of one copy

    def __post_init__(self) -> None:
        check_full_sequence({"cache": self.prompt.model_kwargs.get("cache")})  # logits_to_keep is allowed

    def metric_per_edit(self, site: str, edit_at: EditAt, n_edits: int, n_elements: int) -> Tensor:
        """Return the metric under each edit of a site, whose activation has `n_elements`, [edit]."""
        widest = sum(ids.numel() for ids in self.prompt.inputs) * unwrap_model(self.model).spec.d_ff
        batch_size = max(1, MAX_ELEMENTS // max(widest, self.n_outputs, n_elements))
        values: list[Tensor] = []
        for start in range(0, n_edits, batch_size):
            indices = range(start, min(start + batch_size, n_edits))
            with edit(self.model, {site: partial(_edit_each, edit_at, indices)}):
                output = self.prompt.repeated(len(indices)).run(self.model)
            values += [self.metric(one) for one in output.chunk(len(indices))]
        return torch.stack(values)


def _edit_each(edit_at: EditAt, indices: range, value: Tensor) -> Tensor:
    """Return an activation [copies * B, ...] with another index edited in each copy."""
    copies = value.unflatten(0, (len(indices), -1)).clone()
    for copy, index in zip(copies, indices, strict=True):
        edit_at(copy, index)
    return copies.flatten(0, 1)
