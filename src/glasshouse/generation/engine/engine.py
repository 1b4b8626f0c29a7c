"""The generation engine: all requests share one batch (continuous batching)."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from glasshouse.errors import InputError, check_count
from glasshouse.generation.beam.driver import BeamDriver, make_beam_search
from glasshouse.generation.editing import request_edits
from glasshouse.generation.engine.capacity import check_beams, check_memory, choose_prefill_chunk
from glasshouse.generation.engine.inference_model import Weights, check_weights, weight_copy_bytes
from glasshouse.generation.engine.model_runner import ModelRunner
from glasshouse.generation.engine.output_processor import OutputProcessor
from glasshouse.generation.engine.scheduler import Scheduler
from glasshouse.generation.engine.slots import Slots
from glasshouse.generation.recording import (
    RecordedSite,
    RequestRecording,
    check_probes,
    own_namespace,
    recorded_sites,
)
from glasshouse.generation.request import Request
from glasshouse.generation.sampling_params import SamplingParams
from glasshouse.generation.speculation import Speculator
from glasshouse.generation.steering import check_vectors, steered_namespace
from glasshouse.generation.tops import Attended
from glasshouse.generation.validation import (
    HOOKED,
    check_allowed,
    check_compile,
    check_engine_options,
    check_model,
    check_option_names,
    check_speculator,
    split_source,
)
from glasshouse.inspection.hooks import hook_manager_of
from glasshouse.inspection.linear_probe import LinearProbe
from glasshouse.inspection.sites import select
from glasshouse.inspection.steering import SteeringVector
from glasshouse.models import Decoder, Model, Seq2Seq, check_tokenizer
from glasshouse.models.checks import check_length
from glasshouse.models.generation_config import read_token_rules
from glasshouse.models.prompt import Prompt, encode_prompt
from glasshouse.text import Tokenizer

MOST_NAMES = 256  # of sites, that are remembered


class Engine:
    """Generate for many requests at once, each as if it were alone.

    Memory for `slots` sequences of `max_len` tokens is allocated when the engine is made, never more. At each step
    waiting requests take free slots, at most `prefill_chunk` tokens of their prompts are prefilled (default: 256, on
    CUDA 4,096), several prompts in one pass, and every request with a complete prompt decodes one token. The model
    must not change while an engine uses it: the engine has a copy of its weights in a faster memory layout, unless
    `weights` is "own" (no copy), "int8" (quantized; on CUDA for one slot) or "int4" (on the CPU). `record` names
    sites, as for `gh.record`, to record for every request; a request's own `record` names more. The activations are
    in the `recording` of its completion. `steering` has steering vectors by name, which a request's `steer` scales
    and adds at all of its positions; `probes` has linear probes by name, and those that a request's `probes` names
    score its new tokens, by which its `rules` stop, withhold or steer the answer. Its `edits` change
    activations of its own tokens, as `gh.edit` changes those of all.

    On CUDA decode steps are CUDA graphs of kernels made for them, each captured when it is first needed, or all by
    `warm_up`. With `compile` they are also compiled by torch, which takes ten to twenty seconds at first, and
    decodes up to 6% faster where all slots are busy.

    With `batch_invariant` the log-probabilities of a request are bitwise identical for any composition of the batch:
    a GPU runs all slots at their full length, a CPU each sequence by itself, each prompt is prefilled in passes of
    its own, and no prefix is shared. Without it other requests can change the order of a sum, and so a token where
    two are equally likely.

    An engine belongs to one thread: a call while another thread uses it raises. `make_request` alone may run in any
    thread, so that a server prepares requests in many and enqueues and steps in one, as `glasshouse serve` does. If a
    step raises, the requests that have slots end with finish_reason "error", and the engine remains usable.

    >>> import glasshouse as gh
    >>> engine = gh.Engine(gh.build(gh.preset("tiny-decoder")), slots=2, max_len=32)
    >>> requests = [engine.submit([1, 2, 3], max_new_tokens=n) for n in (4, 5, 6)]
    >>> engine.run()
    >>> [len(request.ids) for request in requests]
    [4, 5, 6]
    """

    def __init__(
        self,
        model: Model,
        tok: Tokenizer | None = None,
        *,
        slots: int = 8,
        max_len: int | None = None,
        source_len: int | None = None,
        prefill_chunk: int | None = None,
        speculator: Speculator | None = None,
        weights: Weights = "copy",
        compile: bool = False,  # noqa: A002 (torch's word)
        batch_invariant: bool = False,
        record: str | Sequence[str] = (),
        steering: Mapping[str, SteeringVector] | None = None,
        probes: Mapping[str, LinearProbe] | None = None,
    ) -> None:
        model = check_model(model)
        check_vectors(model, steering or {})
        check_probes(model, probes or {})
        if tok is not None:
            check_tokenizer(model, tok)
        sites = recorded_sites(model, record)
        # What was new to one request may be the prompt of another.
        by_position = any(hook.by_position for hook in hook_manager_of(model).hooks)
        check_speculator(speculator is not None, recorded=bool(sites), batch_invariant=batch_invariant)
        self.tok, self.spec = tok, model.spec
        self.steering, self.probes = dict(steering or {}), dict(probes or {})
        self._sites, self._rules = {site.name: site for site in sites}, read_token_rules(model)
        self._compiles = compile
        self._find = functools.lru_cache(MOST_NAMES)(select)  # listing the sites takes as long as a step
        self.max_len = check_length(model.spec, max_len)
        self.source_len = check_length(model.spec, source_len, "source_len") if isinstance(model, Seq2Seq) else 0
        self.prefill_chunk = check_count(
            "prefill_chunk", choose_prefill_chunk(model) if prefill_chunk is None else prefill_chunk
        )
        check_count("slots", slots)
        check_weights(weights)
        check_memory(model, slots, self.max_len, self.source_len, weight_copy_bytes(model, weights))
        chunk = max(min(self.prefill_chunk, self.max_len), 1 if speculator is None else speculator.n_draft_tokens + 1)
        # To record, a key's index in the cache must be its position, so sliding-window layers use no ring buffers.
        self._runner = ModelRunner(
            model,
            slots=slots,
            max_len=self.max_len,
            source_len=self.source_len,
            chunk=self.max_len if sites else chunk,
            prefill_chunk=self.prefill_chunk,
            weights=weights,
            compile=check_compile(compile, recorded=bool(sites)),
            batch_invariant=batch_invariant,
            speculator=speculator,
            vectors=self.steering,
            probes=self.probes,
            sites=sites,
        )
        self.speculation = self._runner.speculation  # how far drafts were accepted so far
        self.slots: Slots = Slots(
            slots,
            prefix_caching=isinstance(model, Decoder) and not sites and not batch_invariant and not by_position,
            max_rollback=self._runner.cache.max_rollback,
        )
        self._scheduler = Scheduler(
            self.slots, prefill_chunk=self.prefill_chunk, mixed_prefill=self._runner.supports_mixed_prefill
        )
        self._outputs = OutputProcessor(self.slots, self._runner, BeamDriver(self._runner, model.spec.vocab_size))
        self._in_use = threading.RLock()  # held by the thread that is inside a call
        self._cancelled = False  # whether a cancelled request is still queued or scheduled
        self._closed = False

    @property
    def n_waiting(self) -> int:
        """How many requests wait for a slot."""
        return len(self._scheduler.waiting)

    @property
    def n_bytes(self) -> int:
        """Size of the KV cache in bytes."""
        return self._runner.cache.n_bytes

    def submit(
        self,
        prompt: Prompt,
        options: SamplingParams | None = None,
        *,
        n_best: int = 1,
        keep_tree: bool = False,
        target_prefix: Sequence[int] = (),
        **settings: object,
    ) -> Request:
        """Queue a request: a text or ids, with `SamplingParams` or the settings that make them.

        A beam search returns its `n_best` hypotheses and, with `keep_tree`, every candidate. An encoder-decoder
        continues a target that starts with `target_prefix`.
        """
        if options is not None and settings:
            raise InputError(f"options and {', '.join(settings)} were both given; put everything into the options.")
        options = SamplingParams.parse(settings) if options is None else options
        ids = encode_prompt(prompt, self.tok, self.spec)
        return self.submit_ids(ids, options, n_best=n_best, keep_tree=keep_tree, target_prefix=target_prefix)

    def submit_ids(
        self,
        ids: list[int],
        options: SamplingParams,
        *,
        n_best: int = 1,
        keep_tree: bool = False,
        target_prefix: Sequence[int] = (),
    ) -> Request:
        """Queue a request for ids that `encode_prompt` has returned: they are not checked again."""
        request = self.make_request(ids, options, n_best=n_best, keep_tree=keep_tree, target_prefix=target_prefix)
        self.enqueue(request)
        return request

    def make_request(
        self,
        ids: list[int],
        options: SamplingParams,
        *,
        n_best: int = 1,
        keep_tree: bool = False,
        target_prefix: Sequence[int] = (),
        namespace: str = "",
    ) -> Request:
        """Return a request that `enqueue` takes; raise where its parameters do not fit this engine.

        Only requests of one `namespace` share cached prefixes: cache hits would reveal, by their time, other prompts.
        """
        check_option_names(options, self.tok, self.spec.vocab_size, self.steering, self.probes)
        options = options.with_suppressed(self._rules.suppressed)
        end_ids = frozenset((*self.spec.end_ids, *options.stop_token_ids))
        check_allowed(options, end_ids, self.spec.vocab_size)
        drafts = self._runner.speculator is not None
        check_engine_options(options, n_best, len(self.slots), recorded=bool(self._sites), drafts=drafts)
        check_beams(self._runner.model, options.beams, self.max_len, self.source_len)
        prompt, source = split_source(
            list(ids), self.spec, self._rules, target_prefix, max_len=self.max_len, source_len=self.source_len
        )
        sites, edits = self._recorded_sites(options), request_edits(self._runner.model, options.edits, self._find)
        for edit in edits:
            self._runner.check_hookable(edit.site)
        limit = min(options.max_new_tokens, self.max_len - len(prompt))
        recording = RequestRecording(sites, len(prompt), len(prompt) + limit - 1, len(source)) if sites else None
        constraint = None
        if options.constraint is not None:
            constraint = options.constraint.start(self.spec.vocab_size, end_ids)
        request = Request(
            prompt,
            options,
            tok=self.tok,
            end_ids=end_ids,
            limit=limit,
            source=source,
            n_best=n_best,
            keep_tree=keep_tree,
            recording=recording,
            attended=self._attended(options),
            edits=edits,
            namespace=own_namespace(steered_namespace(namespace, options), recording, edits),
            constraint=constraint,
        )
        if options.beams > 1:
            search = make_beam_search(request, self.spec.vocab_size)  # raises for settings that cannot be searched
            if request.limit == 0:
                request.finish_search(search.results(), search.tree if keep_tree else None)
        elif request.limit == 0:
            request.finish("length")
        return request

    def _recorded_sites(self, options: SamplingParams) -> list[RecordedSite]:
        """Return the sites to record for a request: the engine's, and its own."""
        asked = next((one for one in HOOKED if getattr(options, one)), None)
        if asked is not None and self._compiles:
            raise InputError(f"{asked} was given, but the engine compiles its steps; make it with compile=False.")
        own = recorded_sites(self._runner.model, options.record, self._find)
        for site in own:
            self._runner.check_readable(site)
        return list((self._sites | {site.name: site for site in own}).values())

    def _attended(self, options: SamplingParams) -> list[Attended]:
        """Return what is read of the attention of a request."""
        found = []
        for name, count in options.attended.items():
            for site in recorded_sites(self._runner.model, name, self._find):
                if site.selection.site.hook_point != "pattern":
                    raise InputError(f"{name} has no attended positions; name a pattern, such as pattern.0[head=1].")
                self._runner.check_readable(site)
                found.append(Attended(site, count))
        return found

    def enqueue(self, request: Request) -> None:
        """Queue a request of `make_request`."""
        with self._exclusive():
            if self._closed:
                raise InputError("the engine is closed and takes no more requests; make a new one.")
            if not request.done:
                self._scheduler.waiting.append(request)

    def cancel(self, request: Request) -> None:
        """End a request now, whether it is waiting, in prefill or decoding; its tokens so far are kept.

        Its slots are free from the next step on.
        """
        with self._exclusive():
            self._cancelled |= request.finish("cancelled")

    def run(self) -> None:
        """Step until every request is done."""
        while self.step():
            pass

    def warm_up(self, options: SamplingParams | None = None) -> None:
        """Compile and capture the CUDA graphs of decode steps now, so that no request waits for it.

        `options` are those that most requests will have (default: greedy). It does nothing while requests run.
        """
        with self._exclusive():
            for _ in self.warm_up_steps(options):
                pass

    def warm_up_steps(self, options: SamplingParams | None = None) -> Iterator[None]:
        """Warm up for one batch size at a time, the largest first, so that requests can run in between."""
        for width in self._runner.warm_up_widths:
            with self._exclusive(), torch.inference_mode():
                if not self.slots.running:
                    self._runner.warm_up(options or SamplingParams(), width)
                    self._outputs.clear()
            yield

    def close(self) -> None:
        """Cancel every unfinished request and accept no more."""
        with self._exclusive():
            self._closed = True
            for request in (*self._scheduler.waiting, *self._outputs.requests):
                request.finish("cancelled")
            self._scheduler.waiting.clear()
            self._outputs.clear()

    def stream(self, request: Request) -> Iterator[str]:
        """Step until a request is done, and yield its text as it is generated, in whole characters.

        A failed request raises its error after the last text.
        """
        while not request.done:
            self.step()
            if piece := request.take_text():
                yield piece
        if piece := request.take_text():
            yield piece
        request.raise_on_error()

    def step(self) -> bool:
        """Schedule requests, prefill a chunk of prompts, and decode one token each; return whether work is left."""
        with self._exclusive(), torch.inference_mode():
            if self._cancelled:
                self._drop_cancelled()
            try:
                step = self._scheduler.schedule()
                output = self._runner.run(step)
                self._outputs.postprocess(step, output)
            except BaseException as error:  # sequences and cache may be inconsistent now
                for request in self._outputs.requests:
                    request.fail(f"a step of the engine raised {type(error).__name__}: {error}; submit it again.")
                self._outputs.clear()
                raise
            return bool(self._scheduler.waiting or self.slots.running or self._outputs.pending)

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        """Hold the engine for a call; raise where another thread is inside one."""
        if not self._in_use.acquire(blocking=False):
            raise InputError(
                "the engine is in use by another thread; give each thread an engine of its own, or all calls to one "
                "thread, as `glasshouse serve` does."
            )
        try:
            yield
        finally:
            self._in_use.release()

    def _drop_cancelled(self) -> None:
        """Remove cancelled requests, whether they wait or have a slot."""
        self._cancelled = False
        waiting = self._scheduler.waiting
        for request in [request for request in waiting if request.done]:
            waiting.remove(request)
        self._outputs.drop_cancelled()
