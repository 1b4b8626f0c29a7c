"""Recording while writing: what stands at chosen sites in the passes of an engine, by request and position."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from glasshouse import spec
from glasshouse.errors import InputError
from glasshouse.inspection.hooks import Hook, hook_manager_of
from glasshouse.inspection.recording import Recording
from glasshouse.inspection.sites import PAIRS, Index, Selection, Site, select
from glasshouse.models import Decoder, Seq2Seq


class Recorder:
    """Looks into the passes of an engine, which go through a twin of the model."""

    def __init__(self, twin: Decoder | Seq2Seq, views: Sequence[RecordedSite]) -> None:
        self._views = views
        self._board = hook_manager_of(twin)
        self._now: dict[RecordedSite, Tensor] = {}  # what stood there in this pass, of all its rows
        self._uses = [Hook(view.in_pass(twin), read=partial(self._now.__setitem__, view)) for view in views]

    def open(self, source_len: int) -> RequestRecording:
        """Return where what is seen of a new request goes, of which an encoder reads so many tokens."""
        return RequestRecording(self._views, source_len)

    @contextmanager
    def recording(self, rows: Sequence[tuple[RequestRecording, int]], count: int) -> Iterator[None]:
        """Look into one pass, of rows that bring `count` tokens each, with the position of each row's first."""
        try:
            with self._board.registered(self._uses):
                yield
            for place, (recording, start) in enumerate(rows):
                for view, values in self._now.items():
                    recording.add(view, values[place], start, count)
        finally:
            self._now.clear()


class RequestRecording:
    """What was seen of one request, pass by pass until it is put together."""

    def __init__(self, views: Sequence[RecordedSite], source_len: int) -> None:
        self._source_len = source_len
        self._pieces: dict[RecordedSite, list[Tensor]] = {view: [] for view in views}
        self._seen: Recording | None = None

    def add(self, view: RecordedSite, value: Tensor, start: int, count: int) -> None:
        """Keep what a pass showed of one row, whose new tokens stand from `start` on."""
        pieces = self._pieces[view]
        if view.grows or not pieces:  # a source stays as it is
            # A copy: a part would keep the values of all rows, and keys and values lie in the engine's cache.
            pieces.append(view.cut(value, start, count, self._source_len).clone())

    def result(self, length: int) -> Recording:
        """Return all of it once the request is done, by position, up to `length` of them."""
        if self._seen is None:
            self._seen = Recording([view.asked for view in self._pieces])
            for view, pieces in self._pieces.items():
                if pieces:
                    self._seen.put(view.asked, view.join(pieces, length, self._source_len))
            self._pieces.clear()
        return self._seen


class RecordedSite:
    """One of the sites that are recorded, or a part of it: how passes are cut, and put together again."""

    def __init__(self, asked: Selection) -> None:
        site = asked.site
        self.pairs = site.axes == PAIRS
        keys = asked.index[-1] if self.pairs else slice(None)
        self.one_key = isinstance(keys, int)
        # The key asked for may come later than the first passes, in which it is then a span of none.
        self.keys = slice(keys, keys + 1) if isinstance(keys, int) else keys
        self.asked = replace(asked, index=(0, *asked.index[1:]))  # the row of a batch is no axis of the result
        self.along = self.asked.axes.index("query" if self.pairs else "position")
        self.held = site.is_cached  # they come with those of the tokens before
        self.crosses = ".cross." in site.path
        # What an encoder or its output gives is there at once and whole; else each pass brings some positions.
        self.grows = not site.name.startswith("encoder.") and not (self.crosses and self.held)

    def in_pass(self, twin: Decoder | Seq2Seq) -> Selection:
        """Return what to look at in a pass of the twin, all rows of it."""
        index: tuple[Index, ...] = (slice(None), *self.asked.index[1:])
        return replace(
            self.asked,
            site=replace(self.asked.site, model=twin),  # which what is kept must not hold on to
            index=(*index[:-1], self.keys) if self.pairs else index,
        )

    def cut(self, value: Tensor, start: int, count: int, source_len: int) -> Tensor:
        """Return, of the value of one row in a pass, what its new tokens brought: its first stands at `start`."""
        if self.pairs:
            return value[..., : self._count(source_len if self.crosses else start + count)]
        if self.held:
            first, many = (0, source_len) if self.crosses else (start, count)
            return value.narrow(self.along, first, many)
        return value

    def join(self, pieces: list[Tensor], length: int, source_len: int) -> Tensor:
        """Put the pieces together, up to a length."""
        sizes = [piece.shape[self.along] for piece in pieces]
        spare = sum(sizes) - length
        if self.grows and spare > 0:  # tokens after a stop, which came one in a pass
            pieces, sizes = pieces[:-spare], sizes[:-spare]
        if not self.pairs:
            return torch.cat(pieces, self.along)
        n_keys = 1 if self.one_key else self._count(source_len if self.crosses else sum(sizes))
        # A query sees no key that came after it.
        unseen = 0.0 if self.asked.site.hook_point == "pattern" else -math.inf
        made = pieces[0].new_full((*pieces[0].shape[:-2], sum(sizes), n_keys), unseen)
        for piece, rows in zip(pieces, made.split(sizes, -2), strict=True):
            rows[..., : piece.shape[-1]] = piece
        return made[..., 0] if self.one_key else made

    def _count(self, n_keys: int) -> int:
        """Return how many of so many keys are asked for."""
        return len(range(n_keys)[self.keys])


def recorded_sites(model: Decoder | Seq2Seq, names: str | Sequence[str]) -> list[RecordedSite]:
    """Return what names of sites ask for, each once.

    >>> import glasshouse as gh
    >>> model = gh.build(gh.preset("tiny-decoder"))
    >>> [view.asked.name for view in recorded_sites(model, ("z.*[head=1]", "z.0[head=1]"))]
    ['z.0[head=1]', 'z.1[head=1]']
    """
    listed = [names] if isinstance(names, str) else names
    asked = {one.name: one for name in listed for one in select(model, name)}
    for one in asked.values():
        _check(one, model.spec)
    return [RecordedSite(one) for one in asked.values()]


def _check(asked: Selection, s: spec.Spec) -> None:
    """Refuse a part that cannot be told while tokens come, before any does."""
    for axis, one in zip(asked.site.axes, asked.index, strict=True):
        if axis in ("batch", "position", "query") and one != slice(None):
            raise InputError(
                f"{asked.name} asks for a {axis}, but requests are recorded one by one and whole, as their tokens "
                "come; leave it out, and index the result."
            )
        ends = (one.start, one.stop) if isinstance(one, slice) else (one,)
        if axis == "key" and any(end is not None and end < 0 for end in ends):
            raise InputError(f"{asked.name} counts keys from the end, which is not known yet; count from 0.")
    asked.check(_shape(asked.site, s))


def _shape(site: Site, s: spec.Spec) -> tuple[int, ...]:
    """Return the shape that values at a site have, with no end to what depends on the call."""
    sizes = {
        "head": s.n_kv_heads if site.is_cached else s.n_heads,
        "width": s.d_head if "head" in site.axes else s.d_model,
        "neuron": s.d_ff,
    }
    return tuple(sizes.get(axis, sys.maxsize) for axis in site.axes)
