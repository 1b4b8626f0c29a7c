"""Reading of activations during generation: recordings by request and position, and scores of linear probes."""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from glasshouse import spec
from glasshouse.errors import InputError
from glasshouse.inspection.hooks import Hook, hook_manager_of
from glasshouse.inspection.linear_probe import LinearProbe
from glasshouse.inspection.recording import Recording
from glasshouse.inspection.sites import Index, Selection, Site, select
from glasshouse.layers.sublayer import PAIRS
from glasshouse.models import Decoder, Seq2Seq

FindSites = Callable[[Decoder | Seq2Seq, str], list[Selection]]  # `select`, or one that remembers


class Reading(Protocol):
    """What is read at some sites in a forward pass, for the whole batch."""

    @property
    def name(self) -> str:
        """The name that tells it from others."""
        ...

    def in_pass(self, model: Decoder | Seq2Seq) -> list[Selection]:
        """Return the selections for a forward pass of the inference copy."""
        ...

    def of(self, *values: Tensor) -> Tensor:
        """Return what is kept of the values there."""
        ...


class Reader:
    """Reads sites in the forward passes of an engine, edited or not, through the inference copy of the model."""

    def __init__(self, model: Decoder | Seq2Seq) -> None:
        self._model, self._hook_manager = model, hook_manager_of(model)
        self._values: dict[str, list[Tensor]] = {}  # of this forward pass

    @contextmanager
    def reading(
        self, readings: Iterable[Reading], edits: Iterable[Hook] = (), packed: int | None = None
    ) -> Iterator[list[Tensor]]:
        """Read one forward pass inside the block; the values are in the list after it, in this order.

        Of `packed` sequences the new tokens are the first of the pass, which is of one row.
        """
        found: list[Tensor] = []
        asked = list(readings)
        if not (hooks := [*edits, *(hook for one in asked for hook in self._hooks(one, packed))]):
            yield found
            return
        try:
            with self._hook_manager.registered(hooks):
                yield found
            found += [one.of(*self._values[one.name]) for one in asked]
        finally:
            self._values.clear()

    def _hooks(self, reading: Reading, packed: int | None) -> list[Hook]:
        values = self._values.setdefault(reading.name, [])

        def hook(selection: Selection) -> Hook:
            def read(value: Tensor) -> None:
                values.append(value if packed is None else _unpacked(value, selection.axes.index("position"), packed))

            return Hook(selection, read=read, captured=True)

        return [hook(one) for one in reading.in_pass(self._model)]


def _unpacked(value: Tensor, position: int, n: int) -> Tensor:
    """Return the first n tokens of one row [1, ..., S, ...] as rows of their own, [n, ..., 1, ...]."""
    return value.narrow(position, 0, n).transpose(0, position)


class RequestRecording:
    """The recorded activations of one request, whose passes have at most `max_len` tokens."""

    def __init__(self, sites: Sequence[RecordedSite], prompt_len: int, max_len: int, source_len: int = 0) -> None:
        self._prompt_len, self._max_len, self._source_len = prompt_len, max_len, source_len
        self._sites = list(sites)
        each = {site.name: site for site in sites if site.per_token}
        self._of_prompt = {name: site for name, site in each.items() if site.selection.span != "new"}
        self._of_new = {name: site for name, site in each.items() if site.selection.span != "prompt"}
        self._of_one_pass = [site for site in sites if not (site.per_token or site.of_encoder)]
        self._values: dict[RecordedSite, Tensor] = {}  # with room for all tokens
        self._counts: dict[RecordedSite, int] = {}  # the tokens that are there
        self._pieces: dict[RecordedSite, list[Tensor]] = {}  # of other sites, one per pass
        self._result: Recording | None = None
        self.on_result: Callable[[], None] | None = None  # called before the result is made: hands over what is held

    @property
    def of_prompt(self) -> bool:
        """Whether positions of the prompt are recorded."""
        return any(site.selection.span != "new" for site in self._sites)

    @property
    def of_single_tokens(self) -> bool:
        """Whether what is read of a token can be cut out of a pass with tokens of other sequences in its row."""
        return all(site.joins_steps and not site.from_cache for site in self._sites)

    @property
    def of_source(self) -> list[RecordedSite]:
        """The sites to read while the source is encoded."""
        return [site for site in self._sites if site.of_encoder]

    def most_bytes(self, length: int) -> int:
        """Return how many bytes the recording has at most, of a sequence of at most `length` tokens."""
        spans = {site: self._span(site) for site in self._sites}
        return sum(
            site.most_bytes(max(min(length, span.stop) - span.start, 0), length, self._source_len)
            for site, span in spans.items()
        )

    def of_pass(self, start: int) -> dict[str, RecordedSite]:
        """Return the sites to read in a pass of the decoder whose first token is at a position, by name."""
        found = self._of_prompt if start < self._prompt_len else self._of_new
        return found | {site.name: site for site in self._of_one_pass if site not in self._pieces}

    def add_steps(self, name: str, value: Tensor, start: int, count: int) -> None:
        """Keep the values of this sequence in decode steps, the first of whose tokens is at position `start`."""
        site = next((one for one in self._sites if one.name == name), None)
        if site is None:
            return
        if not site.per_token:
            if site not in self._pieces:  # else a pass before had all of it
                self.add(site, value, start, count)
            return
        span = self._span(site)
        kept = range(max(start, span.start), min(start + count, span.stop))
        if kept:
            self.add(site, value.narrow(site.seq_dim, kept.start - start, len(kept)), kept.start, len(kept))

    def add(self, site: RecordedSite, value: Tensor, start: int, count: int) -> None:
        """Keep the values of this sequence in a forward pass, whose new tokens start at position `start`."""
        if self._result is not None:
            return
        piece = site.cut(value, start, count, self._source_len)
        if not site.joins_steps:
            # A copy: a view would keep the whole batch alive, and keys and values change in the engine's cache.
            self._pieces.setdefault(site, []).append(piece.clone())
            return
        first = self._span(site).start
        if site not in self._values:
            shape = list(piece.shape)
            shape[site.seq_dim] = min(self._span(site).stop, self._max_len) - first
            with torch.inference_mode(False):
                self._values[site] = piece.new_empty(shape)
        self._values[site].narrow(site.seq_dim, start - first, count).copy_(piece)
        self._counts[site] = start - first + count

    def result(self, length: int) -> Recording:
        """Return the recording of a finished request, by position, up to position `length`."""
        if self._result is None:
            if self.on_result is not None:
                self.on_result()
                self.on_result = None
            self._result = Recording([site.selection for site in self._sites])
            for site in self._sites:
                span = self._span(site)
                kept = min(length, span.stop) - span.start  # none of an answer that was withheld
                if kept <= 0:
                    continue
                if site in self._values:
                    whole, count = self._values[site], min(kept, self._counts[site])
                    own = whole.narrow(site.seq_dim, 0, count)
                    self._result.put(site.selection, own if count == whole.shape[site.seq_dim] else own.clone())
                elif site in self._pieces:
                    self._result.put(site.selection, site.join(self._pieces[site], kept, self._source_len))
            self._values, self._pieces = {}, {}
        return self._result

    def _span(self, site: RecordedSite) -> range:
        """Return the positions that are recorded at a site."""
        match site.selection.span:
            case "prompt":
                return range(self._prompt_len)
            case "new":
                return range(self._prompt_len, sys.maxsize)
            case _:
                return range(sys.maxsize)


class RecordedSite:
    """One recorded site or part of it: how the values of each pass are cut and joined."""

    def __init__(self, selection: Selection, shape: tuple[int, ...]) -> None:
        site = selection.site
        self._shape = shape  # of the value, with no limit on axes that depend on the call
        self.name = selection.name
        self.pairs = site.axes == PAIRS
        keys = selection.index[-1] if self.pairs else slice(None)
        self.one_key = isinstance(keys, int)
        # The selected key may come after the first passes, in which the slice is empty.
        self.keys = slice(keys, keys + 1) if isinstance(keys, int) else keys
        self.selection = replace(selection, index=(0, *selection.index[1:]))  # the result has no batch axis
        self.seq_dim = self.selection.axes.index("query" if self.pairs else "position")
        self.from_cache = site.is_cached  # values include the cached tokens before
        self.crosses = ".cross." in site.path
        self.of_encoder = site.name.startswith("encoder.")
        # Values of the encoder or its output are complete in one pass; elsewhere each pass adds positions.
        self.per_token = not self.of_encoder and not (self.crosses and self.from_cache)
        # Values of several steps may be concatenated: pairs have more keys in each.
        self.joins_steps = self.per_token and not self.pairs

    def in_pass(self, model: Decoder | Seq2Seq) -> list[Selection]:
        """Return the selection for a forward pass of the inference copy, for the whole batch."""
        index: tuple[Index, ...] = (slice(None), *self.selection.index[1:])
        whole = replace(
            self.selection,
            site=replace(self.selection.site, model=model),  # the kept selection must not reference it
            index=(*index[:-1], self.keys) if self.pairs else index,
        )
        return [whole]

    def of(self, *values: Tensor) -> Tensor:
        """Return the value."""
        return values[0]

    def at(self, value: Tensor, positions: Tensor) -> Tensor:
        """Return the part of a batch's value in a decode step that is of the new tokens, at positions [n].

        Of keys and values, which are those of the whole cache, that is one position for each sequence.
        """
        if not self.from_cache or self.crosses:
            return value
        axis = self.seq_dim + 1  # after the batch
        return value.take_along_dim(positions.view(-1, *[1] * (value.dim() - 1)), axis)

    def cut(self, value: Tensor, start: int, count: int, source_len: int) -> Tensor:
        """Return the part of one sequence's value for its new tokens, the first of which is at `start`."""
        if self.pairs:
            return value[..., : self._count(source_len if self.crosses else start + count)]
        if self.from_cache:
            first, length = (0, source_len) if self.crosses else (start, count)
            # In a decode step `at` has taken its one position already.
            return value.narrow(self.seq_dim, 0 if value.shape[self.seq_dim] == count else first, length)
        return value

    def join(self, pieces: list[Tensor], length: int, source_len: int) -> Tensor:
        """Concatenate the values of passes, up to `length` tokens."""
        if not self.pairs:
            return torch.cat(pieces, self.seq_dim)
        sizes = [piece.shape[self.seq_dim] for piece in pieces]
        extra = sum(sizes) - length
        if self.per_token and extra > 0:  # tokens after a stop, one per pass
            pieces, sizes = pieces[:-extra], sizes[:-extra]
        n_keys = 1 if self.one_key else pieces[-1].shape[-1]
        # Causal: a query does not attend to later keys.
        hidden = 0.0 if self.selection.site.hook_point == "pattern" else -math.inf
        joined = pieces[0].new_full((*pieces[0].shape[:-2], sum(sizes), n_keys), hidden)
        for piece, rows in zip(pieces, joined.split(sizes, -2), strict=True):
            rows[..., : piece.shape[-1]] = piece
        return joined[..., 0] if self.one_key else joined

    def most_bytes(self, n_positions: int, length: int, source_len: int) -> int:
        """Return the bytes of so many recorded positions of a sequence of so many tokens."""
        keys = source_len if self.crosses or self.of_encoder else length
        positions = source_len if self.of_encoder or (self.crosses and self.from_cache) else n_positions
        dynamic = {"batch": 1, "position": positions, "query": positions, "key": keys}
        found = max(self.selection.site.model.get_parameter("token_embedding.table.weight").element_size(), 4)
        for axis, size, index in zip(self.selection.site.axes, self._shape, self.selection.index, strict=True):
            found *= len(range(dynamic.get(axis, size))[index]) if isinstance(index, slice) else 1
        return found

    def _count(self, n_keys: int) -> int:
        """Return how many of `n_keys` keys are selected."""
        return len(range(n_keys)[self.keys])


@dataclass(frozen=True, eq=False)
class ProbedSite:
    """The linear probes that read one site, and their scores of the token that decodes."""

    name: str
    selection: Selection
    columns: Mapping[str, int]  # of the scores, by the probe's name
    directions: Tensor  # [D, P], float32
    biases: Tensor  # [P]

    def in_pass(self, model: Decoder | Seq2Seq) -> list[Selection]:
        """Return the selection for a forward pass of the inference copy."""
        return [replace(self.selection, site=replace(self.selection.site, model=model))]

    def of(self, *values: Tensor) -> Tensor:
        """Return the scores [n, P] of activations [n, 1, D]."""
        return torch.addmm(self.biases, values[0][:, -1].float(), self.directions)


def probed_sites(model: Decoder | Seq2Seq, probes: Mapping[str, LinearProbe]) -> list[ProbedSite]:
    """Return what probes read, by site."""
    device = model.token_embedding.table.weight.device
    found = []
    for site in dict.fromkeys(probe.site for probe in probes.values()):
        here = {name: probe for name, probe in probes.items() if probe.site == site}
        directions = torch.stack([probe.direction for probe in here.values()], 1).float().to(device)
        biases = torch.tensor([probe.bias for probe in here.values()], device=device)
        columns = {name: column for column, name in enumerate(here)}
        (selection,) = select(model, site)
        found.append(ProbedSite(f"probes of {site}", selection, columns, directions, biases))
    return found


def check_probes(model: Decoder | Seq2Seq, probes: Mapping[str, LinearProbe]) -> None:
    """Raise for probes of another model."""
    for name, probe in probes.items():
        probe.check(model, f"the probe {name!r}")


def recorded_sites(
    model: Decoder | Seq2Seq, names: str | Sequence[str], find: FindSites = select
) -> list[RecordedSite]:
    """Return the sites that names select, each once.

    >>> import glasshouse as gh
    >>> model = gh.build(gh.preset("tiny-decoder"))
    >>> [site.selection.name for site in recorded_sites(model, ("z.*[head=1]", "z.0[head=1]"))]
    ['z.0[head=1]', 'z.1[head=1]']
    """
    listed = [names] if isinstance(names, str) else names
    selections = {one.name: one for name in listed for one in find(model, name)}
    for one in selections.values():
        _check(one, model.spec)
    return [RecordedSite(one, site_shape(one.site, model.spec)) for one in selections.values()]


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
    selection.check(site_shape(selection.site, s))


def site_shape(site: Site, s: spec.Spec) -> tuple[int, ...]:
    """Return the shape of the values at a site, with no limit on axes that depend on the call."""
    sizes = {
        "head": s.n_kv_heads if site.is_cached else s.n_heads,
        "width": s.d_head if "head" in site.axes and site.hook_point != "result" else s.d_model,
        "neuron": s.d_ff,
    }
    return tuple(sizes.get(axis, sys.maxsize) for axis in site.axes)


def own_namespace(namespace: str, recording: RequestRecording | None, edits: Sequence[object]) -> str:
    """Return the namespace of a request's cached prefixes: its own if its prompt is recorded or it is edited."""
    if edits or (recording is not None and recording.of_prompt):
        return f"{namespace} of request {next(_numbers)} alone"
    return namespace


_numbers = itertools.count()
