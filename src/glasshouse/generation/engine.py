"""The engine: every generation, whoever asked for it, goes through one batch that requests join and leave."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence

from glasshouse import spec
from glasshouse.errors import InputError
from glasshouse.generation.generation_config import read_token_rules
from glasshouse.generation.inference_model import Weights, check_weights, weight_copy_bytes
from glasshouse.generation.model_runner import ModelRunner
from glasshouse.generation.recording import Recorder, recorded_sites
from glasshouse.generation.request import Request
from glasshouse.generation.sampling import Sampler
from glasshouse.generation.sampling_params import SamplingParams
from glasshouse.generation.scheduler import Scheduler, make_beam_search
from glasshouse.generation.slots import Slots
from glasshouse.generation.speculation import Speculator
from glasshouse.generation.validation import (
    check_allowed,
    check_beams,
    check_count,
    check_length,
    check_memory,
    check_model,
    check_option_ids,
    encode_prompt,
    ids_of,
)
from glasshouse.layers.cache import Cache
from glasshouse.models import Decoder, Seq2Seq, check_tokenizer
from glasshouse.text import Tokenizer


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
        prefill_chunk: int = 256,
        speculator: Speculator | None = None,
        weights: Weights = "copy",
        compile: bool = False,  # noqa: A002 (torch's word)
        record: str | Sequence[str] = (),
    ) -> None:
        check_model(model)
        if tok is not None:
            check_tokenizer(model, tok)
        views = recorded_sites(model, record)
        if views and compile:
            raise InputError("record and compile were both given; what is compiled cannot be seen, so leave one out.")
        if views and speculator is not None:
            raise InputError("record and speculator were both given; drafts are not recorded, so leave one out.")
        self.tok = tok
        self.spec = model.spec
        self.max_len = check_length(model.spec, max_len)
        self.source_len = check_length(model.spec, source_len, "source_len") if isinstance(model, Seq2Seq) else 0
        self.prefill_chunk = min(check_count("prefill_chunk", prefill_chunk), self.max_len)
        check_count("slots", slots)
        check_weights(weights)
        check_memory(model, slots, self.max_len, self.source_len, weight_copy_bytes(model, weights))
        most = max(self.prefill_chunk, 1 if speculator is None else speculator.n_draft_tokens + 1)
        # To record, every token passes the model itself, and the place of a key is its position, so that layers with
        # a window do not use their slots in turn.
        cache = self._make_cache(model, slots, self.max_len if views else most)
        self.slots = Slots(cache, slots, shares=isinstance(model, Decoder) and not views)
        sampler = Sampler(slots, model.spec.vocab_size, cache.lengths.device)
        self._runner = ModelRunner(model, cache, sampler, weights=weights, compile=compile, recording=bool(views))
        self._recorder = Recorder(self._runner.model, views) if views else None
        self._speculator = speculator
        if speculator is not None:
            speculator.setup(model, slots, self.max_len)
        self._rules = read_token_rules(model)
        self._queue: deque[Request] = deque()
        self._batch = Scheduler(
            self.slots,
            self._runner,
            self._queue,
            prefill_chunk=self.prefill_chunk,
            vocab_size=model.spec.vocab_size,
            speculator=speculator,
            recorder=self._recorder,
        )
        # Guards the queue and what follows; notified of a new request, and when a step is over.
        self._turn = threading.Condition()
        self._stepper: int | None = None  # the thread that is in a step; the batch is its own
        self._cancelled = False  # whether a request was cancelled that may still be in the queue or the batch
        self._closed = False

    @property
    def n_bytes(self) -> int:
        """How much memory the keys and values of all slots take."""
        return self.slots.cache.n_bytes

    def submit(
        self,
        prompt: str | bytes | Sequence[int],
        options: SamplingParams | None = None,
        *,
        n_best: int = 1,
        keep_tree: bool = False,
        target_prefix: Sequence[int] = (),
        **settings: object,
    ) -> Request:
        """Put a request in the queue: a text, or ids; with `Options`, or the settings that make them.

        A beam search returns its `n_best` texts and, with `keep_tree`, all that it considered. An encoder-decoder
        goes on after the tokens that its target has `begun` with.
        """
        if options is not None and settings:
            raise InputError(f"options and {', '.join(settings)} were both given; put everything into the options.")
        options = SamplingParams.parse(settings) if options is None else options
        ids = encode_prompt(prompt, self.tok, self.spec)
        if options.stop and self.tok is None:
            raise InputError(f"stop is {options.stop!r}, but there is no tokenizer; give stop_token_ids instead.")
        check_option_ids(options, self.spec.vocab_size)
        options = self._rules.apply(options)
        end_ids = frozenset((*self.spec.end_ids, *options.stop_token_ids))
        check_allowed(options, end_ids, self.spec.vocab_size)
        if options.beams > len(self.slots):
            raise InputError(f"beams is {options.beams}, but the engine has {len(self.slots)} slots; make more.")
        check_beams(self._runner.model, options.beams, self.max_len, self.source_len)
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
            ids, source = (
                [self.spec.start_id, *self._rules.forced_prefix, *ids_of(target_prefix, self.spec.vocab_size)],
                ids,
            )
        elif target_prefix:
            raise InputError(
                f"target_prefix has {len(target_prefix)} tokens, but the model has no target; put them into the prompt."
            )
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
            search = make_beam_search(request, self.spec.vocab_size)  # refuses what cannot be searched
            if limit == 0:
                request.finish_search(search.results(), search.tree if keep_tree else None)
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
            for request in (*self._queue, *self._batch.requests):
                request.finish("cancelled")
            self._queue.clear()
            self._batch.clear()

    def stream(self, request: Request) -> Iterator[str]:
        """Take steps until a request is done, and yield its text as it comes, in whole characters.

        A request that failed raises its sentence after its last text.
        """
        while not request.done:
            self.step()
            if piece := request.take_text():
                yield piece
        if piece := request.take_text():
            yield piece
        request.raise_on_error()

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
                if self._cancelled:
                    self._drop_cancelled()
                self._batch.step()
            return self._has_work()
        except BaseException as error:
            if self._stepper == me:  # rows and cache may disagree now, so that none of them can go on
                for request in self._batch.requests:
                    request.fail(f"a step of the engine raised {type(error).__name__}: {error}; submit it again.")
                self._batch.clear()
            raise
        finally:
            if self._stepper == me:
                with self._turn:
                    self._stepper = None
                    self._turn.notify_all()

    def _has_work(self) -> bool:
        return bool(self._queue or self._batch.busy)

    def _drop_cancelled(self) -> None:
        """Take cancelled requests out of the queue and the batch."""
        self._cancelled = False  # first, so that one cancelled meanwhile is found by the next step
        with self._turn:
            for request in [request for request in self._queue if request.done]:
                self._queue.remove(request)  # one by one: other threads take an empty queue for the end of all work
        self._batch.drop_cancelled()

    def _make_cache(self, model: Decoder | Seq2Seq, slots: int, prefill_chunk: int) -> Cache:
        if isinstance(model, Seq2Seq):
            cache = model.make_cache(slots, self.max_len, self.source_len, chunk=prefill_chunk)
        else:
            cache = model.make_cache(slots, self.max_len, chunk=prefill_chunk)
        cache.has_source = True
        return cache
