"""The engine: every generation, whoever asked for it, goes through one batch that requests join and leave."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from glasshouse import spec
from glasshouse.errors import InputError
from glasshouse.generation import beam
from glasshouse.generation.admission import (
    check_allowed,
    check_beams,
    check_count,
    check_ids,
    check_length,
    check_memory,
    check_model,
    ids_of,
    read_prompt,
)
from glasshouse.generation.arrangement import Weights, check_weights, copied_bytes
from glasshouse.generation.options import Options
from glasshouse.generation.passes import RIDERS, Passes, Riders
from glasshouse.generation.published import rules_of
from glasshouse.generation.recording import Recorder, Recording, views_of
from glasshouse.generation.request import NOT_FINITE, Request
from glasshouse.generation.sampling import VACANT, Sampler
from glasshouse.generation.slots import Row, Slots
from glasshouse.generation.speculation import Drafts, Speculator
from glasshouse.generation.survey import logprobs_of
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
    that has read its prompt gets a token. The model must stay as it is while an engine uses it: the engine holds a
    copy of its weights, in an order in which they are read faster, unless `weights` is "own", or "int8", a byte each.
    To `compile` takes a minute or so, and pays where an engine runs for long on a GPU with its slots in use: a
    step there is then always one of all slots. `record` names sites, as for `gh.record`: each completion has what
    stood there in its `seen`, as told at `gh.generate`.

    Threads may share an engine. `submit` and `cancel` return at once, from any thread and also during a step: they
    do nothing on the device. Any thread may call `step`, `run` or `stream`; one thread steps at a time, and for the
    others a call of `step` waits until that step is over. A server gives one thread `run_forever`, submits from
    others, waits by `Request.wait` or `Request.stream`, and ends with `close`. If a step raises, the requests in the
    batch end with finish_reason "error", and the engine can be used further.

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
        weights: Weights = "copy",
        compile: bool = False,  # noqa: A002 (torch's word)
        record: str | Sequence[str] = (),
    ) -> None:
        check_model(model)
        if tok is not None:
            check_pair(model, tok)
        views = views_of(model, record)
        if views and compile:
            raise InputError("record and compile were both given; what is compiled cannot be seen, so leave one out.")
        if views and speculator is not None:
            raise InputError("record and speculator were both given; drafts are not recorded, so leave one out.")
        self.tok = tok
        self.spec = model.spec
        self.max_len = check_length(model.spec, max_len)
        self.source_len = check_length(model.spec, source_len, "source_len") if isinstance(model, Seq2Seq) else 0
        self.chunk = min(check_count("chunk", chunk), self.max_len)
        check_count("slots", slots)
        check_weights(weights)
        check_memory(model, slots, self.max_len, self.source_len, copied_bytes(model, weights))
        most = max(self.chunk, 1 if speculator is None else speculator.count + 1)
        # To record, every token passes the model itself, and the place of a key is its position, so that layers with
        # a window do not use their slots in turn.
        cache = self._make_cache(model, slots, self.max_len if views else most)
        self.slots = Slots(cache, slots, shares=isinstance(model, Decoder) and not views)
        self._sampler = Sampler(slots, model.spec.vocab_size, cache.lengths.device)
        self._passes = Passes(model, cache, self._sampler, weights=weights, compile=compile, watched=bool(views))
        self._recorder = Recorder(self._passes.model, views) if views else None
        self._speculator = speculator
        if speculator is not None:
            speculator.open(model, slots, self.max_len)
        self._rules = rules_of(model)
        self._queue: deque[Request] = deque()
        self._searches: dict[Request, tuple[beam.Search, list[Row]]] = {}
        self._launched: deque[_Launch] = deque()
        # Guards the queue and what follows; notified of a new request, and when a step is over.
        self._turn = threading.Condition()
        self._stepper: int | None = None  # the thread that is in a step; all state but the queue is its own
        self._cancelled = False  # whether a request was cancelled that may still be in the queue or the batch
        self._closed = False

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
        begun: Sequence[int] = (),
        **settings: object,
    ) -> Request:
        """Put a request in the queue: a text, or ids; with `Options`, or the settings that make them.

        A beam search returns its `n_best` texts and, with `keep_tree`, all that it considered. An encoder-decoder
        goes on after the tokens that its target has `begun` with.
        """
        if options is not None and settings:
            raise InputError(f"options and {', '.join(settings)} were both given; put everything into the options.")
        options = Options.parse(settings) if options is None else options
        ids = read_prompt(prompt, self.tok, self.spec)
        if options.stop and self.tok is None:
            raise InputError(f"stop is {options.stop!r}, but there is no tokenizer; give stop_ids instead.")
        check_ids(options, self.spec.vocab_size)
        options = self._rules.apply(options)
        end_ids = frozenset((*self.spec.end_ids, *options.stop_ids))
        check_allowed(options, end_ids, self.spec.vocab_size)
        if options.beams > len(self.slots):
            raise InputError(f"beams is {options.beams}, but the engine has {len(self.slots)} slots; make more.")
        check_beams(self._passes.model, options.beams, self.max_len, self.source_len)
        if options.beams > 1 and self._recorder is not None:
            raise InputError(f"beams is {options.beams}, but a search cannot be recorded; leave one of them out.")
        if not 1 <= n_best <= options.beams:
            raise InputError(
                f"n_best is {n_best}, but a search of {options.beams} beams returns 1 to {options.beams}."
            )
        source: list[int] = []
        if isinstance(self.spec, spec.Seq2SeqSpec):
            if len(ids) > self.source_len:
                raise InputError(
                    f"the source has {len(ids)} tokens, but source_len is {self.source_len}; shorten it."
                )
            assert self.spec.start_id is not None
            ids, source = [self.spec.start_id, *self._rules.opening, *ids_of(begun, self.spec.vocab_size)], ids
        elif begun:
            raise InputError(f"begun has {len(begun)} tokens, but the model has no target; put them into the prompt.")
        if len(ids) > self.max_len:
            raise InputError(f"the prompt has {len(ids)} tokens, but max_len is {self.max_len}; shorten it.")
        limit = min(options.max_new_tokens, self.max_len - len(ids))
        request = Request(
            ids,
            options,
            tok=self.tok,
            end_ids=end_ids,
            limit=limit,
            source=source,
            n_best=n_best,
            keep_tree=keep_tree,
            recording=None if self._recorder is None else self._recorder.open(len(source)),
        )
        if options.beams > 1:
            search = self._search_of(request)  # refuses what cannot be searched before anything is computed
            if limit == 0:
                request.conclude(search.results(), search.tree if keep_tree else None)
        elif limit == 0:
            request.finish("length")
        with self._turn:
            if self._closed:
                raise InputError("the engine is closed, so that it takes no more requests; make another.")
            if not request.done:
                self._queue.append(request)
                self._turn.notify_all()
        return request

    def cancel(self, request: Request) -> None:
        """End a request now, whether it waits, reads its prompt or writes; what it has written stays.

        Its slots are free for others from the next step on.
        """
        if request.finish("cancelled"):
            self._cancelled = True

    def run(self) -> None:
        """Take steps until every request is done."""
        while self.step():
            pass

    def run_forever(self) -> None:
        """Take steps whenever there is work, and wait while there is none, until another thread calls `close`.

        If a step raises, the engine is closed, so that nobody waits in vain, and the error is raised here.
        """
        try:
            while not self._closed:
                with self._turn:
                    self._turn.wait_for(lambda: self._closed or self._has_work())
                self.step()
        finally:
            self.close()

    def close(self) -> None:
        """Cancel every request that is not done and take no more; a step that has begun is waited for."""
        with self._turn:
            self._closed = True
            self._turn.notify_all()
            self._turn.wait_for(lambda: self._stepper is None)
            for request in (*self._queue, *self._in_batch()):
                request.finish("cancelled")
            self._queue.clear()
            self._clear()

    def stream(self, request: Request) -> Iterator[str]:
        """Take steps until a request is done, and yield its text as it comes, in whole characters.

        A request that failed raises its sentence after its last text.
        """
        while not request.done:
            self.step()
            if piece := request.take():
                yield piece
        if piece := request.take():
            yield piece
        request.check()

    def step(self) -> bool:
        """Let requests join, read a chunk of prompts, and give each row its next token; say whether work is left.

        While another thread is in a step, no second one begins: the call returns when that step is over.
        """
        me = threading.get_ident()
        try:
            with self._turn:
                if self._stepper is not None:
                    self._turn.wait()
                elif not self._closed:
                    self._stepper = me
            if self._stepper == me:
                self._step()
            return self._has_work()
        except BaseException as error:
            if self._stepper == me:  # rows and cache may disagree now, so that none of them can go on
                for request in self._in_batch():
                    request.fail(f"a step of the engine raised {type(error).__name__}: {error}; submit it again.")
                self._clear()
            raise
        finally:
            if self._stepper == me:
                with self._turn:
                    self._stepper = None
                    self._turn.notify_all()

    def _has_work(self) -> bool:
        return bool(self._queue or self.slots.rows or self._launched)

    def _in_batch(self) -> set[Request]:
        """Return the requests that have a row, or tokens on their way."""
        rows = {row.request for row in self.slots.rows if row.request is not None}
        return rows | {request for launch in self._launched for _, request in launch.rows}

    def _clear(self) -> None:
        """Take all slots back at once."""
        self._searches.clear()
        self._launched.clear()
        for slot in range(len(self.slots)):
            self._sampler.leave(slot)
        self.slots.clear()

    def _drop_cancelled(self) -> None:
        """Take cancelled requests out of the queue and the batch."""
        self._cancelled = False  # first, so that one cancelled meanwhile is found by the next step
        with self._turn:
            self._queue = deque(request for request in self._queue if not request.done)
        for request in [request for request in self._searches if request.done]:
            del self._searches[request]
        ended = [row for row in self.slots.rows if row.request is not None and row.request.done]
        for row in ended:
            if row.request is not None and not row.request.ids:  # no token has shown yet that what it holds is finite
                self.slots.forget(row)
        self._leave(ended)

    @torch.inference_mode()
    def _step(self) -> None:
        if self._cancelled:
            self._drop_cancelled()
        riders = None
        if self._is_crowded():
            riders = self._board()
        else:
            self._fill()
        rows = [row for row in self.slots.rows if not row.reading]
        if rows:
            drafts = None if self._speculator is None else self._speculator.propose(rows, self._sampler)
            if drafts is None:
                self._write(rows, riders)
            else:
                self._write_with(drafts, rows)
        # A GPU works on a step while the host reads the one before it; where the next step depends on what is read,
        # or the host does the work itself, it waits.
        ahead = self._passes.last.is_cuda and not self._searches and self._speculator is None and bool(rows)
        while len(self._launched) > int(ahead):
            self._deliver(self._launched[0])
            self._launched.popleft()

    def _fill(self) -> None:
        """Let requests join while there are slots, and read their prompts, a chunk in all."""
        left = self.chunk
        while left > 0 and (row := self._next_reader()) is not None:
            if row.reading:
                left -= self._read(row, left)
            if not row.reading:
                self._start(row)

    def _is_crowded(self) -> bool:
        """Whether so many rows write that a newcomer had better read its prompt along with their steps."""
        if not self._passes.mixes or self._speculator is not None or not self.slots.rows:
            return False
        writing = len(self.slots.rows) - int(self.slots.rows[-1].reading)
        return writing > 0 and len(self.slots.free) <= max(1, len(self.slots) // 8)

    def _board(self) -> Riders | None:
        """Let requests join, up to one that has a prompt to read; return what of it is read along with this step."""
        while (row := self._next_reader()) is not None:
            assert row.request is not None
            if row.reading and row.request.options.beams == 1:
                stop = min(row.length + RIDERS, row.length + self.chunk, len(row.request.prompt) - 1)
                ids = row.request.prompt[row.length : stop]
                riders = Riders(row.slot, row.length, ids)
                row.length += len(ids)
                row.written = max(row.written, row.length)
                self.slots.cache.lengths[row.slot] = row.length
                if not row.reading:
                    self._start(row)  # its first step is this one: layers write keys before they look at any
                return riders
            if row.reading:  # the beams of a search begin as copies of what is held, so it cannot ride
                self._read(row, self.chunk)
            if row.reading:
                return None
            self._start(row)
        return None

    def _next_reader(self) -> Row | None:
        """Return the row that is reading its prompt, or else one for the first request in the queue."""
        return self.slots.rows[-1] if self.slots.rows and self.slots.rows[-1].reading else self._admit()

    def _admit(self) -> Row | None:
        """Give the first request in the queue a slot, if there are as many as it needs."""
        while self._queue and self._queue[0].done:  # cancelled while it waited
            self._queue.popleft()
        if not self._queue or len(self.slots.free) < self._queue[0].options.beams:
            return None
        request = self._queue[0]
        row = self.slots.join(request)
        self._queue.popleft()  # not before it has a row, so that it can always be found
        if request.source:
            with self._watching([row], len(request.source)):
                self._passes.hear(request.source, row.slot)
        return row

    def _read(self, row: Row, most: int) -> int:
        """Read the next tokens of a prompt into the cache, all but its last; return how many."""
        assert row.request is not None
        ids = row.request.prompt[row.length : min(row.length + most, len(row.request.prompt) - 1)]
        with self._watching([row], len(ids)):
            self._passes.read(ids, row.slot, row.length)
        row.length += len(ids)
        row.written = max(row.written, row.length)
        return len(ids)

    def _start(self, row: Row) -> None:
        """Let a row that has read its prompt write; a search gets a row for each beam."""
        request = row.request
        assert request is not None
        rows = [row, *(self.slots.fork(row) for _ in range(request.options.beams - 1))]
        for one in rows:
            options = request.options if len(rows) == 1 else VACANT
            self._sampler.join(one.slot, options, request.prompt, sorted(request.end_ids))
            self._passes.last[one.slot] = request.prompt[-1]
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

    def _write(self, rows: list[Row], riders: Riders | None) -> None:
        """Give each row its next token, and read what rides along."""
        with self._watching(rows, 1):
            written = self._passes.write(len(rows), *_lengths(rows, 1), riders)
        self._launch(rows, written.tokens[:, None], written.logprobs[:, None], [1] * len(rows))
        for row in rows:
            row.length += 1
            row.scheduled += 1
            row.written = max(row.written, row.length)
        self._search(written.logits)
        # What such rows still have to come is on its way, so others may have their slots.
        self._leave([row for row in rows if row.scheduled >= row.limit])

    def _write_with(self, drafts: Drafts, rows: list[Row]) -> None:
        """Give each row its drafts as far as the model agrees, and the token after them."""
        n, k = drafts.tokens.shape
        logits = self._passes.judge(drafts.tokens, drafts.counts, *_lengths(rows, k + 1))
        tokens, counts = self._sampler.verify(logits, drafts.tokens, drafts.counts, drafts.probabilities)
        logprobs = logprobs_of(logits.flatten(0, 1), tokens.flatten()).view(n, k + 1)
        kept_by_row = counts.tolist()
        self._launch(rows, tokens, logprobs, kept_by_row)
        for row, kept, tried in zip(rows, kept_by_row, drafts.counts.tolist(), strict=True):
            row.written = max(row.written, row.length + tried + 1)
            row.length += kept
            row.scheduled += kept
        self.slots.cache.lengths[:n] = torch.tensor([row.length for row in rows], device=logits.device)
        self._passes.last[:n] = tokens.gather(1, counts[:, None] - 1)
        self._search(logits[:, 0])

    def _search(self, logits: Tensor) -> None:
        """Let each search choose the tokens of its rows, and put the rows in the order it asks for."""
        for width in sorted({search.options.beams for search, _ in self._searches.values()}):
            group = [(search, rows) for search, rows in self._searches.values() if search.options.beams == width]
            slots = [row.slot for _, rows in group for row in rows]
            places = torch.tensor(slots, device=logits.device)
            theirs = logits if slots == list(range(len(logits))) else logits[places]
            _, self._passes.last[places, 0] = beam.advance([search for search, _ in group], theirs)
            for search, rows in group:
                for move in search.moves:
                    source, target = rows[move.source], rows[move.target]
                    assert target.request is not None
                    shared = len(target.request.prompt) + move.start
                    self.slots.cache.copy_row(source.slot, target.slot, shared, source.length)
        for request, (search, rows) in list(self._searches.items()):
            if search.done:
                if search.not_finite:
                    request.fail(NOT_FINITE)
                    self.slots.purge(rows)
                else:
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
                if request.add(token, logprob):
                    row.tokens.append(token)
            if request.error is not None:
                self.slots.purge([row])
        self._leave([row for row, request in launch.rows if request.done and row.request is request])

    def _watching(self, rows: list[Row], count: int) -> AbstractContextManager[None]:
        """Record the pass inside the block, in which each row brings so many tokens."""
        if self._recorder is None:
            return nullcontext()
        return self._recorder.watching([(_recording_of(row), row.length) for row in rows], count)

    def _leave(self, rows: list[Row]) -> None:
        for row in sorted(rows, key=lambda row: -row.slot):  # from the last on, so that none moves that will leave
            self._sampler.leave(row.slot)
            for old, new in self.slots.leave(row):
                self._sampler.move(old, new)
                self._passes.last[new] = self._passes.last[old]
                if self._speculator is not None:
                    self._speculator.move(old, new)

    def _make_cache(self, model: Decoder | Seq2Seq, slots: int, chunk: int) -> Cache:
        if isinstance(model, Seq2Seq):
            cache = model.make_cache(slots, self.max_len, self.source_len, chunk=chunk)
        else:
            cache = model.make_cache(slots, self.max_len, chunk=chunk)
        cache.heard = True
        return cache


def _recording_of(row: Row) -> Recording:
    assert row.request is not None
    assert row.request.recording is not None
    return row.request.recording


def _lengths(rows: list[Row], new: int) -> tuple[int, int]:
    """Return the most tokens that a row will have with so many new ones, and the most that a source has."""
    sources = (len(row.request.source) for row in rows if row.request is not None)
    return max(row.length for row in rows) + new, max(sources, default=0)
