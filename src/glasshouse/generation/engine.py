"""The engine: every generation, whoever asked for it, goes through one batch that requests join and leave."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from glasshouse.errors import InputError
from glasshouse.generation import beam
from glasshouse.generation.admission import (
    check_count,
    check_ids,
    check_length,
    check_memory,
    check_model,
    read_prompt,
)
from glasshouse.generation.arrangement import Weights, compiled, prepare
from glasshouse.generation.graphs import Graphs, bucket
from glasshouse.generation.options import Options
from glasshouse.generation.request import Request
from glasshouse.generation.sampling import VACANT, Sampler, logprobs_of
from glasshouse.generation.slots import Row, Slots
from glasshouse.generation.speculation import Drafts, Speculator
from glasshouse.layers.cache import Cache
from glasshouse.models import Decoder, Seq2Seq, check_pair
from glasshouse.text import Tokenizer


@dataclass
class _Launch:
    """A step that was given to the device, and whose tokens the host has not read yet."""

    rows: list[tuple[Row, Request]]
    tokens: Tensor  # [n, T], on the host once `copied` has happened
    logprobs: Tensor  # [n, T], likewise
    counts: list[int]  # how many of a row's tokens count
    copied: torch.cuda.Event | None = None


class Engine:
    """Generate for many requests at once, each as if it were alone.

    Memory for `slots` sequences of `max_len` tokens is taken when the engine is made, and never more. At each step
    waiting requests join as slots fall free, at most `chunk` tokens of their prompts are read, and every request
    that has read its prompt gets a token. The model must stay as it is while an engine uses it: the engine may
    hold its weights once more, in an order in which they are read faster, or with `weights="int8"` in a byte each.
    To `compile` takes a minute or so, and pays where an engine runs for long on a GPU.

    >>> import glasshouse as gh
    >>> engine = gh.Engine(gh.build(gh.preset("tiny-decoder")), slots=2, max_len=32)
    >>> requests = [engine.submit([1, 2, 3], max_new_tokens=n) for n in (4, 5, 6)]
    >>> engine.run()
    >>> [len(request.ids) for request in requests]
    [4, 5, 6]
    """

    def __init__(
        self,
        model: Decoder | Seq2Seq,
        tok: Tokenizer | None = None,
        *,
        slots: int = 8,
        max_len: int | None = None,
        source_len: int | None = None,
        chunk: int = 256,
        speculator: Speculator | None = None,
        weights: Weights = "own",
        compile: bool = False,  # noqa: A002 (torch's word)
    ) -> None:
        check_model(model)
        if tok is not None:
            check_pair(model, tok)
        self.tok = tok
        self.spec = model.spec
        self.max_len = check_length(model.spec, max_len)
        self.source_len = check_length(model.spec, source_len, "source_len") if isinstance(model, Seq2Seq) else 0
        self.chunk = min(check_count("chunk", chunk), self.max_len)
        check_memory(model, check_count("slots", slots), self.max_len, self.source_len)
        self._model = prepare(model, weights, slots)
        self._compiled = compiled(self._model) if compile else {}
        cache = self._make_cache(model, slots, max(self.chunk, 1 if speculator is None else speculator.count + 1))
        self.slots = Slots(cache, slots, shares=isinstance(model, Decoder))
        self._sampler = Sampler(slots, model.spec.vocab_size, cache.lengths.device)
        self._speculator = speculator
        if speculator is not None:
            speculator.open(model, slots, self.max_len)
        self._queue: deque[Request] = deque()
        self._last = torch.zeros(slots, 1, dtype=torch.long, device=cache.lengths.device)  # what each row reads next
        self._searches: dict[Request, tuple[beam.Search, list[Row]]] = {}
        self._launched: deque[_Launch] = deque()
        self._in_use = torch.zeros(slots, dtype=torch.long, device=self._last.device)  # 1 for rows that write
        self._reading: dict[int, tuple[Tensor, Tensor]] = {}  # what the graphs of prompts read, by their width
        self._graphs = (
            Graphs(lambda: [cache.lengths, self._last, *self._sampler.state]) if self._last.is_cuda else None
        )

    @property
    def n_bytes(self) -> int:
        """How much memory the keys and values of all slots take."""
        return self.slots.cache.n_bytes

    def submit(
        self,
        prompt: str | bytes | Sequence[int],
        options: Options | None = None,
        *,
        n_best: int = 1,
        keep_tree: bool = False,
        **settings: object,
    ) -> Request:
        """Put a request in the queue: a text, or ids; with `Options`, or the settings that make them.

        A beam search returns its `n_best` texts and, with `keep_tree`, all that it considered.
        """
        if options is not None and settings:
            raise InputError(f"options and {', '.join(settings)} were both given; put everything into the options.")
        options = Options.parse(settings) if options is None else options
        ids = read_prompt(prompt, self.tok, self.spec)
        if options.stop and self.tok is None:
            raise InputError(f"stop is {options.stop!r}, but there is no tokenizer; give stop_ids instead.")
        check_ids(options, self.spec.vocab_size)
        if options.beams > len(self.slots):
            raise InputError(f"beams is {options.beams}, but the engine has {len(self.slots)} slots; make more.")
        if not 1 <= n_best <= options.beams:
            raise InputError(
                f"n_best is {n_best}, but a search of {options.beams} beams returns 1 to {options.beams}."
            )
        source: list[int] = []
        if isinstance(self._model, Seq2Seq):
            if len(ids) > self.source_len:
                raise InputError(
                    f"the source has {len(ids)} tokens, but source_len is {self.source_len}; shorten it."
                )
            assert self.spec.start_id is not None
            ids, source = [self.spec.start_id], ids
        if len(ids) > self.max_len:
            raise InputError(f"the prompt has {len(ids)} tokens, but max_len is {self.max_len}; shorten it.")
        limit = min(options.max_new_tokens, self.max_len - len(ids))
        request = Request(
            ids,
            options,
            tok=self.tok,
            end_ids=frozenset((*self.spec.end_ids, *options.stop_ids)),
            limit=limit,
            source=source,
            n_best=n_best,
            keep_tree=keep_tree,
        )
        if options.beams > 1 and limit:
            self._search_of(request)  # refuses what cannot be searched before anything is computed
        if limit == 0:
            request.finish("length")
        else:
            self._queue.append(request)
        return request

    @torch.inference_mode()
    def cancel(self, request: Request) -> None:
        """End a request now, whether it waits, reads its prompt or writes; what it has written stays."""
        if request.done:
            return
        request.finish("cancelled")
        self._searches.pop(request, None)
        if request in self._queue:
            self._queue.remove(request)
        self._leave([row for row in self.slots.rows if row.request is request])

    def run(self) -> None:
        """Take steps until every request is done."""
        while self.step():
            pass

    def stream(self, request: Request) -> Iterator[str]:
        """Take steps until a request is done, and yield its text as it comes, in whole characters."""
        while not request.done:
            self.step()
            if piece := request.take():
                yield piece
        if piece := request.take():
            yield piece

    @torch.inference_mode()
    def step(self) -> bool:
        """Let requests join, read a chunk of prompts, and give each row its next token; say whether work is left."""
        self._fill()
        rows = [row for row in self.slots.rows if not row.reading]
        if rows:
            drafts = None if self._speculator is None else self._speculator.propose(rows, self._sampler)
            if drafts is None:
                self._write(rows)
            else:
                self._write_with(drafts, rows)
        # A GPU works on a step while the host reads the one before it; where the next step depends on what is read,
        # or the host does the work itself, it waits.
        ahead = self._last.is_cuda and not self._searches and self._speculator is None and bool(rows)
        while len(self._launched) > int(ahead):
            self._deliver(self._launched.popleft())
        return bool(self._queue or self.slots.rows or self._launched)

    def _fill(self) -> None:
        """Let requests join while there are slots, and read their prompts, a chunk in all."""
        left = self.chunk
        while left > 0:
            row = self.slots.rows[-1] if self.slots.rows and self.slots.rows[-1].reading else self._admit()
            if row is None:
                return
            if row.reading:
                left -= self._read(row, left)
            if not row.reading:
                self._start(row)

    def _admit(self) -> Row | None:
        """Give the first request in the queue a slot, if there are as many as it needs."""
        if not self._queue or len(self.slots.free) < self._queue[0].options.beams:
            return None
        request = self._queue.popleft()
        row = self.slots.join(request)
        if isinstance(self._model, Seq2Seq):
            source = torch.tensor([request.source], device=self._last.device)
            self._model.read(source, self.slots.cache.narrow(slice(row.slot, row.slot + 1)))
        return row

    def _read(self, row: Row, most: int) -> int:
        """Read the next tokens of a prompt into the cache, all but its last; return how many."""
        assert row.request is not None
        ids = row.request.prompt[row.length : min(row.length + most, len(row.request.prompt) - 1)]
        stop = row.length + len(ids)
        if row.length == 0:
            self._read_first(ids, row.slot)
        else:
            view = self.slots.cache.narrow(slice(row.slot, row.slot + 1), stop)
            self._forward(torch.tensor([ids], device=self._last.device), view, keep=self._in_use[:0])
        row.length, row.written = stop, max(row.written, stop)
        return len(ids)

    def _read_first(self, ids: list[int], slot: int) -> None:
        """Read the beginning of a prompt, which sees nothing but itself."""
        device, cache = self._last.device, self.slots.cache
        if self._graphs is None:
            view = cache.packed(torch.full((len(ids),), slot, device=device))
            self._forward(torch.tensor([ids], device=device), view, keep=self._in_use[:0])
            return
        width = bucket(len(ids))
        if width not in self._reading:
            self._reading[width] = torch.zeros(2, width, dtype=torch.long, device=device), self._in_use.new_zeros(1)
        given, length = self._reading[width]
        given.copy_(torch.tensor([ids + [0] * (width - len(ids)), [slot] * width]).pin_memory(), non_blocking=True)
        length.fill_(len(ids))
        view = cache.packed(given[1])
        self._graphs.run(
            ("read", width), lambda: (self._forward(given[:1], view, lengths=length, keep=self._in_use[:0]),)
        )

    def _start(self, row: Row) -> None:
        """Let a row that has read its prompt write; a search gets a row for each beam."""
        request = row.request
        assert request is not None
        rows = [row, *(self.slots.fork(row) for _ in range(request.options.beams - 1))]
        for one in rows:
            options = request.options if len(rows) == 1 else VACANT
            self._sampler.join(one.slot, options, request.prompt, sorted(request.end_ids))
            self._last[one.slot] = request.prompt[-1]
        if len(rows) > 1:
            self._searches[request] = self._search_of(request), rows

    def _search_of(self, request: Request) -> beam.Search:
        return beam.Search(
            replace(request.options, max_new_tokens=request.limit),
            sorted(request.end_ids),
            self.spec.vocab_size,
            n_best=request.n_best,
            keep_tree=request.keep_tree,
            prompt=request.prompt,
        )

    def _write(self, rows: list[Row]) -> None:
        """Give each row its next token."""
        n = len(rows)
        if self._graphs is None:
            logits, tokens, logprobs = self._advance(self._last[:n], self._view(rows, 1))
        else:
            width = min(bucket(n), len(self.slots))
            self._in_use[:n], self._in_use[n:] = 1, 0
            view = self.slots.cache.narrow(slice(0, width))
            logits, tokens, logprobs = self._graphs.run(
                ("write", width, self._sampler.plan(width)),
                lambda: self._advance(self._last[:width], view, self._in_use[:width]),
            )
        self._launch(rows, tokens[:n, None], logprobs[:n, None], [1] * n)
        for row in rows:
            row.length += 1
            row.scheduled += 1
            row.written = max(row.written, row.length)
        self._search(logits)
        # What such rows still have to come is on its way, so others may have their slots.
        self._leave([row for row in rows if row.scheduled >= row.limit])

    def _advance(self, ids: Tensor, view: Cache, in_use: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Read ids [n, 1] and choose what follows; return logits [n, V], tokens [n] and their log-probabilities."""
        logits = self._forward(ids, view, lengths=in_use)[:, 0]
        tokens = self._sampler.choose(logits)
        logprobs = logprobs_of(logits, tokens)
        ids[:, 0] = tokens  # what the next step reads
        return logits, tokens, logprobs

    def _write_with(self, drafts: Drafts, rows: list[Row]) -> None:
        """Give each row its drafts as far as the model agrees, and the token after them."""
        n, k = drafts.tokens.shape
        ids = torch.cat([self._last[:n], drafts.tokens], 1)
        logits = self._forward(ids, self._view(rows, k + 1), lengths=drafts.counts + 1)
        tokens, counts = self._sampler.verify(logits, drafts.tokens, drafts.counts, drafts.probabilities)
        logprobs = logprobs_of(logits.flatten(0, 1), tokens.flatten()).view(n, k + 1)
        kept_by_row = counts.tolist()
        self._launch(rows, tokens, logprobs, kept_by_row)
        for row, kept, tried in zip(rows, kept_by_row, drafts.counts.tolist(), strict=True):
            row.written = max(row.written, row.length + tried + 1)
            row.length += kept
            row.scheduled += kept
        self.slots.cache.lengths[:n] = torch.tensor([row.length for row in rows], device=self._last.device)
        self._last[:n] = tokens.gather(1, counts[:, None] - 1)
        self._search(logits[:, 0])

    def _search(self, logits: Tensor) -> None:
        """Let each search choose the tokens of its rows, and put the rows in the order it asks for."""
        for width in sorted({search.options.beams for search, _ in self._searches.values()}):
            group = [(search, rows) for search, rows in self._searches.values() if search.options.beams == width]
            places = torch.tensor([row.slot for _, rows in group for row in rows], device=logits.device)
            _, self._last[places, 0] = beam.advance([search for search, _ in group], logits[places])
            for search, rows in group:
                for move in search.moves:
                    source, target = rows[move.source], rows[move.target]
                    assert target.request is not None
                    shared = len(target.request.prompt) + move.start
                    self.slots.cache.copy_row(source.slot, target.slot, shared, source.length)
        for request, (search, rows) in list(self._searches.items()):
            if search.done:
                request.conclude(search.results(), search.tree if request.keep_tree else None)
                del self._searches[request]
                self._leave(rows)

    def _launch(self, rows: list[Row], tokens: Tensor, logprobs: Tensor, counts: list[int]) -> None:
        """Note who gets the tokens of a step, and have them copied to the host when the device is so far."""
        asked = [(row, row.request) for row in rows if row.request is not None]
        copied = None
        if tokens.is_cuda:
            tokens, logprobs = (
                torch.empty(one.shape, dtype=one.dtype, pin_memory=True).copy_(one, non_blocking=True)
                for one in (tokens, logprobs)
            )
            copied = torch.cuda.Event()
            copied.record()
        self._launched.append(_Launch(asked, tokens, logprobs, counts, copied))

    def _deliver(self, launch: _Launch) -> None:
        """Hand the tokens of a step to their requests, unless they ended meanwhile."""
        if launch.copied is not None:
            launch.copied.synchronize()
        tokens, logprobs = launch.tokens.tolist(), launch.logprobs.tolist()
        for (row, request), new, values, count in zip(launch.rows, tokens, logprobs, launch.counts, strict=True):
            if request.options.beams > 1:
                continue
            for token, logprob in zip(new[:count], values[:count], strict=True):
                if not request.done:
                    row.tokens.append(token)
                    request.add(token, logprob)
        self._leave([row for row, request in launch.rows if request.done and row.request is request])

    def _leave(self, rows: list[Row]) -> None:
        for row in sorted(rows, key=lambda row: -row.slot):  # from the last on, so that none moves that will leave
            self._sampler.leave(row.slot)
            for old, new in self.slots.leave(row):
                self._sampler.move(old, new)
                self._last[new] = self._last[old]
                if self._speculator is not None:
                    self._speculator.move(old, new)

    def _view(self, rows: list[Row], new: int) -> Cache:
        """Return the rows' part of the cache, no longer than the longest will be with so many new tokens."""
        longest = max(row.length for row in rows) + new
        source = max((len(row.request.source) for row in rows if row.request is not None), default=0)
        return self.slots.cache.narrow(slice(0, len(rows)), longest, source)

    def _forward(
        self, ids: Tensor, cache: Cache, *, lengths: Tensor | None = None, keep: Tensor | None = None
    ) -> Tensor:
        step = ids.shape[1] == 1  # prompts come in too many lengths to compile
        run: Callable[..., Tensor] = self._compiled.get(len(ids) == 1, self._model) if step else self._model
        if isinstance(self._model, Seq2Seq):
            return run(None, ids, target_lengths=lengths, cache=cache, keep=keep)
        return run(ids, lengths=lengths, cache=cache, keep=keep)

    def _make_cache(self, model: Decoder | Seq2Seq, slots: int, chunk: int) -> Cache:
        if isinstance(model, Seq2Seq):
            cache = model.make_cache(slots, self.max_len, self.source_len, chunk=chunk)
        else:
            cache = model.make_cache(slots, self.max_len, chunk=chunk)
        cache.heard = True
        return cache
