"""Recording: what stood at chosen sites during a call."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatchcase
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from glasshouse.config import did_you_mean
from glasshouse.errors import InputError
from glasshouse.inspection.hooks import Hook, hook_manager_of
from glasshouse.inspection.html_display import HtmlDisplay, picture, shown
from glasshouse.inspection.sites import Selection, select

MOST_MAPS = 48  # drawn; the rest is named


class NotRecordedError(InputError, KeyError):
    """A site was asked for that is not among what was recorded."""

    __str__ = Exception.__str__  # a KeyError would put the sentence in quotes


class _Asked(NamedTuple):
    """What `Seen` needs to know of a selection: with the site it would keep the model alive."""

    site: str
    part: frozenset[str]  # {"head=2", "query=-1"}
    axes: tuple[str, ...]
    layer: int
    is_pattern: bool
    first_head: int


class Recording(HtmlDisplay, Mapping[str, Tensor]):
    """What was recorded, by site: that of the latest call that was not broken off by an error.

    A part is found by the name it was asked for, and by its site's where no other part of it was recorded. With `*`
    for the layer, all that were recorded come in one tensor.
    """

    def __init__(self, asked: list[Selection]) -> None:
        self._asked = {one.name: _asked(one) for one in asked}
        self._before: dict[str, Tensor] = {}  # of calls that have ended
        self._now: dict[str, Tensor] | None = None  # of the call that is under way

    @property
    def _values(self) -> dict[str, Tensor]:
        return self._before if self._now is None else self._before | self._now

    def __getitem__(self, name: str) -> Tensor:
        found = self._find(name)
        known = self._values
        for one in found:
            if one not in known:
                raise NotRecordedError(f"{one} has not been seen; call the model inside the with block.")
        values = [known[one] for one in found]
        return torch.stack(values) if "*" in name else values[0]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def axes(self, name: str) -> tuple[str, ...]:
        """Return the names of the axes of what is recorded under a name.

        >>> import torch, glasshouse as gh
        >>> model = gh.build(gh.preset("tiny-decoder"))
        >>> with gh.record(model, "pattern.*[head=2, query=-1]") as seen:
        ...     _ = model(torch.tensor([[1, 2, 3]]))
        >>> seen.axes("pattern.*"), seen["pattern.*"].shape
        (('layer', 'batch', 'key'), torch.Size([2, 1, 3]))
        """
        axes = self._asked[self._find(name)[0]].axes
        return ("layer", *axes) if "*" in name else axes

    def put(self, asked: Selection, value: Tensor) -> None:
        """Take what now stands at a site."""
        (self._before if self._now is None else self._now)[asked.name] = value

    def begin(self) -> None:
        """Keep what comes from now on apart from what is there, until the call has ended."""
        self._now = {}

    def end(self, whole: bool) -> None:
        """Take over what was seen in the call, or if it broke off, let go of that."""
        if self._now is not None and whole:
            self._before |= self._now
        self._now = None

    @property
    def complete(self) -> bool:
        """Whether everything asked for has been seen in the latest call."""
        return (self._before if self._now is None else self._now).keys() == self._asked.keys()

    def _find(self, name: str) -> list[str]:
        """Return the names under which what is meant was asked for, in the order of the layers."""
        if not isinstance(name, str):
            raise NotRecordedError(f"{name!r} is no name of a site, such as resid_post.0")
        if name in self._asked:
            return [name]
        stem, _, inside = name.replace(" ", "").partition("[")
        part = frozenset(filter(None, inside.rstrip("]").split(",")))
        found = {
            known: one
            for known, one in self._asked.items()
            if fnmatchcase(one.site, stem) and part in (one.part, frozenset())
        }
        if not found:
            raise NotRecordedError(f"{name!r} is not among what is recorded; {did_you_mean(name, self._asked)}")
        kinds = {(one.site.rpartition(".")[0], one.part) for one in found.values()}
        if len(kinds) > 1 or ("*" not in name and len(found) > 1):
            raise NotRecordedError(f"{name!r} could be {' or '.join(found)}; say which, as it was asked for.")
        return sorted(found, key=lambda known: found[known].layer)

    def _drawing(self) -> str:
        """Draw attention maps as pictures, those of the first row of the batch, and say what else there is."""
        maps, lines = [], ""
        for name, value in self._values.items():
            axes = self.axes(name)
            sizes = ", ".join(f"{axis} {size}" for axis, size in zip(axes, value.shape, strict=True))
            lines += f"<tr><th>{shown(name)}</th><td>{shown(sizes)}</td></tr>"
            if axes[-2:] == ("query", "key") and self._asked[name].is_pattern and value.numel():
                first = value[0] if "batch" in axes else value
                many = "head" in axes
                maps += [
                    picture(one, caption=f"{name}, head {head}" if many else name)
                    for head, one in enumerate(first if many else [first], self._asked[name].first_head)
                ]
        left = f"<p>{len(maps) - MOST_MAPS} more maps are not drawn</p>" if len(maps) > MOST_MAPS else ""
        return f'<div class="side">{"".join(maps[:MOST_MAPS])}</div>{left}<table>{lines}</table>'

    def __repr__(self) -> str:
        shapes = ", ".join(f"{name} {list(value.shape)}" for name, value in self._values.items())
        return f"Seen({shapes})"


def _asked(one: Selection) -> _Asked:
    heads = dict(zip(one.site.axes, one.index, strict=True)).get("head", slice(None))
    return _Asked(
        one.site.name,
        frozenset(filter(None, one.written.strip("[]").replace(" ", "").split(","))),
        one.axes,
        int(layer) if (layer := one.site.name.rpartition(".")[2]).isdigit() else 0,
        one.site.hook_point == "pattern",
        (heads.start or 0) if isinstance(heads, slice) else heads,
    )


@contextmanager
def record(model: nn.Module, *names: str, grad: bool = False, stop: bool = False) -> Iterator[Recording]:
    """Record what stands at the named sites while the model is called.

    A name may have `*` for every layer, and an index in brackets: `pattern.3[head=2, query=-1]` works out that row
    alone. With `grad` the very tensors of the pass are given, for derivatives by them; else they are detached. With
    `stop` the block ends as soon as everything was seen, and the rest of the model is not computed. Of a call that
    raises an error nothing is kept. Calls of other threads are not recorded, and another record of the same model
    waits for this one.

    >>> import torch, glasshouse as gh
    >>> model = gh.build(gh.preset("tiny-decoder"))
    >>> with gh.record(model, "pattern.1", "resid_post.*") as seen:
    ...     logits = model(torch.tensor([[1, 2, 3]]))
    >>> seen["pattern.1"].shape, seen["resid_post.0"].shape
    (torch.Size([1, 4, 3, 3]), torch.Size([1, 3, 64]))
    """
    asked = [one for name in names for one in select(model, name)]
    if not asked:
        raise InputError("record was given no site; name at least one, such as resid_post.*")
    if grad and (part := next((one for one in asked if not one.whole), None)) is not None:
        raise InputError(f"{part.name} is a part, which has no derivatives; record {part.site.name} and index that.")
    seen = Recording(asked)

    def take(one: Selection, value: Tensor) -> None:
        if not grad:
            value = value.detach()
            # A part would keep the whole; what lies in a cache would change.
            if value.untyped_storage().nbytes() > value.numel() * value.element_size() or one.site.is_cached:
                value = value.clone()
        seen.put(one, value)
        if stop and seen.complete:
            seen.end(whole=True)
            raise _StopForward(seen)

    uses = [Hook(one, read=partial(take, one), in_graph=grad) for one in asked]
    board = hook_manager_of(model)
    with board.registered(uses, seen):
        try:
            yield seen
        except _StopForward as enough:
            if enough.seen is not seen:
                raise
            board.stop()
        finally:
            seen.end(whole=False)  # an interrupt comes past the model's own hooks


class _StopForward(BaseException):  # so that no one's `except Exception` on the way takes it for a failure
    def __init__(self, seen: Recording) -> None:
        super().__init__()
        self.seen = seen
