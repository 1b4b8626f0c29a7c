"""Record activations at chosen sites during a forward pass, and the queries and keys of attention maps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from glasshouse.errors import InputError
from glasshouse.inspection.attention_map import AttendCall, AttentionMap
from glasshouse.inspection.display.html import MAX_COLUMNS, Drawing, HtmlDisplay, Picture, Table, labels, shown
from glasshouse.inspection.hooks import Hook, hook_manager_of
from glasshouse.inspection.sites import Selection, Site, select, suggest_site
from glasshouse.layers.attend.layout import make_layout
from glasshouse.text import Tokenizer

MAX_MAPS = 48  # drawn; the others are only listed


class NotRecordedError(InputError, KeyError):
    """The requested site was not recorded."""

    __str__ = Exception.__str__  # KeyError's would quote the message


class _Entry(NamedTuple):
    """What `Recording` needs of a selection, without the site, which would keep the model alive."""

    site: str
    indices: frozenset[str]  # {"head=2", "query=-1"}
    axes: tuple[str, ...]
    layer: int
    is_pattern: bool
    first_head: int
    first_row: int


class Recording(HtmlDisplay, Mapping[str, Tensor]):
    """Recorded activations by site, from the latest forward pass that did not raise an error.

    A slice is found by the name it was requested under, and by its site's name if no other slice of it was recorded.
    With `*` for the layer, all recorded layers are stacked in one tensor.
    """

    def __init__(self, selections: list[Selection], tok: Tokenizer | None = None) -> None:
        self.tok = tok
        self._call: dict[str, Any] = {}  # the ids of the latest forward pass and their padding
        self._source: object = None  # and those of the source, in an encoder-decoder
        self._entries = {one.name: _entry(one) for one in selections}
        self._finished: dict[str, Tensor] = {}  # from completed forward passes
        self._current: dict[str, Tensor] | None = None  # from the forward pass in progress

    @property
    def _values(self) -> dict[str, Tensor]:
        return self._finished if self._current is None else self._finished | self._current

    def __getitem__(self, name: str) -> Tensor:
        found = self._find(name)
        known = self._values
        for one in found:
            if one not in known:
                raise NotRecordedError(f"{one} has not been recorded yet; call the model inside the with block.")
        values = [known[one] for one in found]
        return torch.stack(values) if "*" in name else values[0]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def axes(self, name: str) -> tuple[str, ...]:
        """Return the names of the axes of a recorded activation.

        >>> import torch, glasshouse as gh
        >>> model = gh.build(gh.preset("tiny-decoder"))
        >>> with gh.record(model, "pattern.*[head=2, query=-1]") as seen:
        ...     _ = model(torch.tensor([[1, 2, 3]]))
        >>> seen.axes("pattern.*"), seen["pattern.*"].shape
        (('layer', 'batch', 'key'), torch.Size([2, 1, 3]))
        """
        axes = self._entries[self._find(name)[0]].axes
        return ("layer", *axes) if "*" in name else axes

    @property
    def str_tokens(self) -> list[list[str]]:
        """The tokens of the input of the latest forward pass as text, without padding; `record` was given `tok`.

        >>> import glasshouse as gh
        >>> model, tok = gh.load("python-3m")
        >>> with gh.record(model, "pattern.3", tok=tok) as seen:
        ...     _ = gh.inspection.run(model, "import os", tok=tok)
        >>> seen.str_tokens
        [['import', '␣os']]
        """
        if self.tok is None or not isinstance(ids := self._call.get("ids"), Tensor):
            raise NotRecordedError("the tokens are unknown; give tok to gh.record and call the model in its block.")
        real = make_layout(**self._call).real
        rows = ids if real is None else [row[kept] for row, kept in zip(ids, real, strict=True)]
        return [labels(row, self.tok) for row in rows]

    def gradient(self, name: str, of: Tensor) -> Tensor:
        """Return the gradient of a scalar with respect to an activation recorded with grad=True.

        With `*` the gradients of all layers are stacked; a layer that the scalar does not depend on has zeros.

        >>> import torch, glasshouse as gh
        >>> model = gh.build(gh.preset("tiny-decoder"))
        >>> with gh.record(model, "resid_post.*", grad=True) as seen:
        ...     logits = model(torch.tensor([[1, 2, 3]]))
        >>> seen.gradient("resid_post.*", of=logits[0, -1, 7]).shape
        torch.Size([2, 1, 3, 64])
        """
        names = self._find(name)
        values = [self[one] for one in names]
        if not of.requires_grad or not all(value.requires_grad for value in values):
            raise InputError(
                f"{name} is not in the graph of the scalar; use gh.record(..., grad=True) without no_grad."
            )
        found = torch.autograd.grad(of, values, retain_graph=True, materialize_grads=True)
        return torch.stack(found) if "*" in name else found[0]

    def put(self, selection: Selection, value: Tensor) -> None:
        """Store the activation of a site."""
        (self._finished if self._current is None else self._current)[selection.name] = value

    def begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Keep what is recorded from now on separate until the forward pass has ended."""
        self._current = {}
        side = "target_" if len(args) == 2 or "target" in kwargs else ""  # of an encoder-decoder
        ids = kwargs.get("target" if side else "ids", args[-1] if args else None)
        padding = {name: kwargs.get(side + name) for name in ("lengths", "mask")}
        self._call = {"ids": ids, **padding, "side": side}
        self._source = kwargs.get("source", args[0] if args else None) if side else None

    def end(self, whole: bool) -> None:
        """Keep what the forward pass recorded, or discard it if it raised an error."""
        if self._current is not None and whole:
            self._finished |= self._current
        self._current = None

    @property
    def complete(self) -> bool:
        """Whether every requested site has been recorded in the latest forward pass."""
        return (self._finished if self._current is None else self._current).keys() == self._entries.keys()

    def _find(self, name: str) -> list[str]:
        """Return the recorded names that a name stands for, in layer order."""
        if not isinstance(name, str):
            raise NotRecordedError(f"{name!r} is not the name of a site, such as resid_post.0")
        if name in self._entries:
            return [name]
        stem, _, inside = name.replace(" ", "").partition("[")
        index = frozenset(filter(None, inside.rstrip("]").split(",")))
        found = {
            known: one
            for known, one in self._entries.items()
            if fnmatchcase(one.site, stem) and index in (one.indices, frozenset())
        }
        if not found:
            raise NotRecordedError(f"{name!r} is not recorded; {suggest_site(name, self._entries)}")
        kinds = {(one.site.rpartition(".")[0], one.indices) for one in found.values()}
        if len(kinds) > 1 or ("*" not in name and len(found) > 1):
            raise NotRecordedError(f"{name!r} is ambiguous: {' or '.join(found)}; give the full name.")
        return sorted(found, key=lambda known: found[known].layer)

    def _maps(self) -> list[Picture]:
        """Return the attention maps of the first sequence of the batch."""
        maps = []
        for name, value in self._values.items():
            axes = self.axes(name)
            if axes[-2:] == ("query", "key") and self._entries[name].is_pattern and value.numel():
                first = value[0] if "batch" in axes else value
                many = "head" in axes
                rows, columns = (self._axis_names(name, axis, first.shape[axis]) for axis in (-2, -1))
                maps += [
                    Picture(one, f"{name}, head {head}" if many else name, rows, columns)
                    for head, one in enumerate(first if many else [first], self._entries[name].first_head)
                ]
        return maps

    def _axis_names(self, name: str, axis: int, size: int) -> list[str]:
        """Return the tokens along an axis of a map; none where they are too many, or a slice or a cache of others."""
        entry = self._entries[name]
        of_source = entry.site.startswith("encoder.") or (axis == -1 and ".cross_" in entry.site)
        ids = self._source if of_source else self._call.get("ids")
        if not isinstance(ids, Tensor) or ids.shape[1] != size or size > MAX_COLUMNS:
            return []
        return labels(ids[entry.first_row], self.tok)

    def _drawings(self) -> list[Drawing]:
        sizes = {
            name: ", ".join(f"{axis} {size}" for axis, size in zip(self.axes(name), value.shape, strict=True))
            for name, value in self._values.items()
        }
        return [*self._maps()[:MAX_MAPS], Table(sizes)]

    def _html_body(self) -> str:
        """Draw the maps beside each other, and list the shape of every activation."""
        *maps, sizes = self._drawings()
        of = "".join(f"<p>{shown(line)}</p>" for line in self._texts())
        hidden = len(self._maps()) - MAX_MAPS
        left = f"<p>{hidden} more maps are not drawn</p>" if hidden > 0 else ""
        return f'{of}<div class="side">{"".join(one.html() for one in maps)}</div>{left}{sizes.html()}'

    def _texts(self) -> list[str]:
        words = self.str_tokens[0] if self._maps() and self.tok is not None else []
        return [f"tokens: {' '.join(words)}"] if words else []

    def __repr__(self) -> str:
        shapes = ", ".join(f"{name} {list(value.shape)}" for name, value in self._values.items())
        return f"Recording({shapes})"


def _entry(one: Selection) -> _Entry:
    index = dict(zip(one.site.axes, one.index, strict=True))

    def first(axis: str) -> int:
        given = index.get(axis, 0)
        return (given.start or 0) if isinstance(given, slice) else given

    return _Entry(
        one.site.name,
        frozenset(filter(None, one.index_text.strip("[]").replace(" ", "").split(","))),
        one.axes,
        int(layer) if (layer := one.site.name.rpartition(".")[2]).isdigit() else 0,
        one.site.hook_point == "pattern",
        first("head"),
        first("batch"),
    )


@contextmanager
def record(
    model: nn.Module, *names: str, grad: bool = False, stop: bool = False, tok: Tokenizer | None = None
) -> Iterator[Recording]:
    """Record the activations at the named sites while the model is called.

    A name may have `*` for every layer, and an index in brackets: `pattern.3[head=2, query=-1]` computes that query
    alone. With `grad` the tensors stay in the autograd graph, for gradients with respect to them; otherwise they are
    detached. With `stop` the block ends as soon as every site was recorded, and the rest of the model is not
    computed. Nothing is kept of a call that raises an error. Calls of other threads are not recorded, and another
    record of the same model waits for this one. With `tok` the recording knows its tokens; `gh.inspection.run` calls
    the model on texts.

    >>> import torch, glasshouse as gh
    >>> model = gh.build(gh.preset("tiny-decoder"))
    >>> with gh.record(model, "pattern.1", "resid_post.*") as seen:
    ...     logits = model(torch.tensor([[1, 2, 3]]))
    >>> seen["pattern.1"].shape, seen["resid_post.0"].shape
    (torch.Size([1, 4, 3, 3]), torch.Size([1, 3, 64]))
    """
    selections = [one for name in names for one in select(model, name)]
    if (part := next((one for one in selections if one.span is not None), None)) is not None:
        raise InputError(f"{part.name} is for edits; record {part.site.name}, or positions such as [position=3:5].")
    if not selections:
        raise InputError("record was given no site; name at least one, such as resid_post.*")
    if grad and (part := next((one for one in selections if not one.whole), None)) is not None:
        raise InputError(
            f"{part.name} is a slice, which is not in the autograd graph; record {part.site.name} and index that."
        )
    seen = Recording(selections, tok)

    def take(one: Selection, value: Tensor) -> None:
        if not grad:
            value = value.detach()
            # A view would keep the whole tensor alive; a KV cache is overwritten.
            if value.untyped_storage().nbytes() > value.numel() * value.element_size() or one.site.is_cached:
                value = value.clone()
        seen.put(one, value)
        if stop and seen.complete:
            seen.end(whole=True)
            raise _StopForward(seen)

    hooks = [Hook(one, read=partial(take, one), in_graph=grad) for one in selections]
    manager = hook_manager_of(model)
    with manager.registered(hooks, seen):
        try:
            yield seen
        except _StopForward as stopped:
            if stopped.recording is not seen:
                raise
            manager.stop()
        finally:
            seen.end(whole=False)  # a KeyboardInterrupt does not run the model's own hooks


class _StopForward(BaseException):  # not an Exception, so that no `except Exception` on the way catches it
    def __init__(self, recording: Recording) -> None:
        super().__init__()
        self.recording = recording


@contextmanager
def capture_attention(model: nn.Module, *names: str) -> Iterator[dict[str, AttentionMap]]:
    """Capture the queries and keys of the named patterns, such as `pattern.*`, while the model is called.

    >>> import torch, glasshouse as gh
    >>> model = gh.build(gh.preset("tiny-decoder"))
    >>> with capture_attention(model, "pattern.*") as maps:
    ...     _ = model(torch.tensor([[1, 2, 3]]))
    >>> maps["pattern.1"].shape, maps["pattern.1"].weights(head=2, query=0)
    ((1, 4, 3, 3), tensor([[1., 0., 0.]]))
    """
    maps: dict[str, AttentionMap] = {}
    selections = [one for name in names for one in select(model, name)]
    for one in selections:
        if one.site.hook_point != "pattern" or not one.whole:
            raise InputError(f"{one.name} is not a whole pattern; name one, such as pattern.0.")

    def capture(site: Site, kernel: AttendCall) -> None:
        maps[site.name] = AttentionMap(site, kernel)

    with hook_manager_of(model).registered(Hook(one, capture=partial(capture, one.site)) for one in selections):
        yield maps
