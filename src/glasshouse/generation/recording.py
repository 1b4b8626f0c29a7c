"""Recording of activations during generation, by request and position."""

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
from glasshouse.inspection.sites import Index, Selection, Site, select
from glasshouse.layers.sublayer import PAIRS
from glasshouse.models import Decoder, Seq2Seq


class Recorder:
    """Records the forward passes of an engine, which run through the inference copy of the model."""

    def __init__(self, model: Decoder | Seq2Seq, sites: Sequence[RecordedSite]) -> None:
        self._hook_manager = hook_manager_of(model)
        self._values: dict[RecordedSite, Tensor] = {}  # of this forward pass, for the whole batch
        self._hooks = [Hook(site.in_pass(model), read=partial(self._values.__setitem__, site)) for site in sites]

    @contextmanager
    def recording(self, batch: Sequence[tuple[RequestRecording, int]], count: int) -> Iterator[None]:
        """Record one forward pass with `count` new tokens per sequence, from the given position of each on."""
        try:
            with self._hook_manager.registered(self._hooks):
                yield
            for row, (recording, start) in enumerate(batch):
                for site, values in self._values.items():
                    recording.add(site, values[row], start, count)
        finally:
            self._values.clear()


class RequestRecording:
    """The recorded activations of one request, one piece per forward pass until they are joined."""

    def __init__(self, sites: Sequence[RecordedSite], source_len: int) -> None:
        self._source_len = source_len
        self._pieces: dict[RecordedSite, list[Tensor]] = {site: [] for site in sites}
        self._result: Recording | None = None

    def add(self, site: RecordedSite, value: Tensor, start: int, count: int) -> None:
        """Keep the values of one sequence in a forward pass, whose new tokens start at position `start`."""
        pieces = self._pieces[site]
        if site.per_token or not pieces:  # a source does not change
            # A copy: a view would keep the whole batch alive, and keys and values change in the engine's cache.
            pieces.append(site.cut(value, start, count, self._source_len).clone())

    def result(self, length: int) -> Recording:
        """Return the recording of a finished request, by position, up to `length` tokens."""
        if self._result is None:
            self._result = Recording([site.selection for site in self._pieces])
            for site, pieces in self._pieces.items():
                if pieces:
                    self._result.put(site.selection, site.join(pieces, length, self._source_len))
            self._pieces.clear()
        return self._result


class RecordedSite:
    """One recorded site or part of it: how the values of each pass are cut and joined."""

    def __init__(self, selection: Selection) -> None:
        site = selection.site
        self.pairs = site.axes == PAIRS
        keys = selection.index[-1] if self.pairs else slice(None)
        self.one_key = isinstance(keys, int)
        # The selected key may come after the first passes, in which the slice is empty.
        self.keys = slice(keys, keys + 1) if isinstance(keys, int) else keys
        self.selection = replace(selection, index=(0, *selection.index[1:]))  # the result has no batch axis
        self.seq_dim = self.selection.axes.index("query" if self.pairs else "position")
        self.from_cache = site.is_cached  # values include the cached tokens before
        self.crosses = ".cross." in site.path
        # Values of the encoder or its output are complete in one pass; elsewhere each pass adds positions.
        self.per_token = not site.name.startswith("encoder.") and not (self.crosses and self.from_cache)

    def in_pass(self, model: Decoder | Seq2Seq) -> Selection:
        """Return the selection for a forward pass of the inference copy, for the whole batch."""
        index: tuple[Index, ...] = (slice(None), *self.selection.index[1:])
        return replace(
            self.selection,
            site=replace(self.selection.site, model=model),  # the kept selection must not reference it
            index=(*index[:-1], self.keys) if self.pairs else index,
        )

    def cut(self, value: Tensor, start: int, count: int, source_len: int) -> Tensor:
        """Return the part of one sequence's value for its new tokens, the first of which is at `start`."""
        if self.pairs:
            return value[..., : self._count(source_len if self.crosses else start + count)]
        if self.from_cache:
            first, length = (0, source_len) if self.crosses else (start, count)
            return value.narrow(self.seq_dim, first, length)
        return value

    def join(self, pieces: list[Tensor], length: int, source_len: int) -> Tensor:
        """Concatenate the pieces, up to `length` tokens."""
        sizes = [piece.shape[self.seq_dim] for piece in pieces]
        extra = sum(sizes) - length
        if self.per_token and extra > 0:  # tokens after a stop, one per pass
            pieces, sizes = pieces[:-extra], sizes[:-extra]
        if not self.pairs:
            return torch.cat(pieces, self.seq_dim)
        n_keys = 1 if self.one_key else self._count(source_len if self.crosses else sum(sizes))
        # Causal: a query does not attend to later keys.
        hidden = 0.0 if self.selection.site.hook_point == "pattern" else -math.inf
        joined = pieces[0].new_full((*pieces[0].shape[:-2], sum(sizes), n_keys), hidden)
        for piece, rows in zip(pieces, joined.split(sizes, -2), strict=True):
            rows[..., : piece.shape[-1]] = piece
        return joined[..., 0] if self.one_key else joined

    def _count(self, n_keys: int) -> int:
        """Return how many of `n_keys` keys are selected."""
        return len(range(n_keys)[self.keys])


def recorded_sites(model: Decoder | Seq2Seq, names: str | Sequence[str]) -> list[RecordedSite]:
    """Return the sites that names select, each once.

    >>> import glasshouse as gh
    >>> model = gh.build(gh.preset("tiny-decoder"))
    >>> [site.selection.name for site in recorded_sites(model, ("z.*[head=1]", "z.0[head=1]"))]
    ['z.0[head=1]', 'z.1[head=1]']
    """
    listed = [names] if isinstance(names, str) else names
    selections = {one.name: one for name in listed for one in select(model, name)}
    for one in selections.values():
        _check(one, model.spec)
    return [RecordedSite(one) for one in selections.values()]


def _check(selection: Selection, s: spec.Spec) -> None:
    """Raise for a selection that is not possible during generation."""
    for axis, one in zip(selection.site.axes, selection.index, strict=True):
        if axis in ("batch", "position", "query") and one != slice(None):
            raise InputError(
                f"{selection.name} selects by {axis}, but requests are recorded one by one and in full, token by "
                "token; leave it out, and index the result."
            )
        ends = (one.start, one.stop) if isinstance(one, slice) else (one,)
        if axis == "key" and any(end is not None and end < 0 for end in ends):
            raise InputError(
                f"{selection.name} counts keys from the end, but the final length is not known yet; count from 0."
            )
    selection.check(_shape(selection.site, s))


def _shape(site: Site, s: spec.Spec) -> tuple[int, ...]:
    """Return the shape of the values at a site, with no limit on axes that depend on the call."""
    sizes = {
        "head": s.n_kv_heads if site.is_cached else s.n_heads,
        "width": s.d_head if "head" in site.axes else s.d_model,
        "neuron": s.d_ff,
    }
    return tuple(sizes.get(axis, sys.maxsize) for axis in site.axes)
