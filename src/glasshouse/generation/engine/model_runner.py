"""Runs the model of an engine over the slots of its KV cache: prefill, decode, draft verification and sampling."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from glasshouse.errors import InputError
from glasshouse.generation.editing import RequestEdits
from glasshouse.generation.engine.cpu_graphs import CpuGraphs
from glasshouse.generation.engine.cuda_graphs import Graphs, bucket, copy_to_device
from glasshouse.generation.engine.inference_model import (
    Weights,
    compile_decode,
    make_cache,
    prepare_for_inference,
    use_kernels,
)
from glasshouse.generation.engine.prefill import NewPrompt, Prefill, for_any_shape
from glasshouse.generation.engine.scheduler import MIXED_PREFILL_TOKENS
from glasshouse.generation.engine.slots import Move, SequenceState
from glasshouse.generation.engine.step import (
    DecodeOutput,
    PassHooks,
    PrefillChunk,
    ReadStep,
    SampledTokens,
    ScheduledStep,
    StepOutput,
)
from glasshouse.generation.recording import Reader, Reading, RecordedSite, probed_sites
from glasshouse.generation.sampling.logits_kernels import token_logprobs, top_logprobs
from glasshouse.generation.sampling.sampler import Sampler
from glasshouse.generation.sampling.sampling_slots import EMPTY_SLOT, SlotParams
from glasshouse.generation.sampling_params import MOST_TOP, SamplingParams
from glasshouse.generation.speculation import Drafts, SpeculationStats, Speculator
from glasshouse.generation.steering import Steering
from glasshouse.generation.tops import LensReading
from glasshouse.inspection.hooks import Hook
from glasshouse.inspection.inputs.forward_pass import final_stack
from glasshouse.inspection.linear_probe import LinearProbe
from glasshouse.inspection.sites import Site
from glasshouse.inspection.steering import SteeringVector
from glasshouse.layers.cache import CacheView, MixedBatch
from glasshouse.layers.module_swap import is_own_code
from glasshouse.models import Decoder, Seq2Seq

NO_HOOKS = PassHooks()
FEW = 5  # tokens of a lens, for which there are graphs beside those for the most
MOST_HOOK_SETS = 32  # that requests record, score and edit, each with CUDA graphs of its own
SOURCE_STEP = 16  # tokens; to a multiple of it the sources that a decode step attends to are padded on a CPU


class ModelRunner:
    """Runs the steps that the scheduler decided, as CUDA graphs on a GPU.

    It owns what a slot has on the device: its row of the cache, its sampling parameters and its next input.
    """

    def __init__(
        self,
        model: Decoder | Seq2Seq,
        *,
        slots: int,
        max_len: int,
        source_len: int,
        chunk: int,  # tokens per sequence and call, at most
        prefill_chunk: int,  # tokens of sources per pass, at most, but for a longer one alone
        weights: Weights,
        compile: bool,  # noqa: A002 (torch's word)
        batch_invariant: bool,
        speculator: Speculator | None,
        vectors: Mapping[str, SteeringVector],
        probes: Mapping[str, LinearProbe],
        sites: Sequence[RecordedSite],  # those of every request: then there are no kernels, which have sites inside
    ) -> None:
        self.cache, self.speculator = make_cache(model, slots, max_len, source_len, chunk), speculator
        cache, device = self.cache, self.cache.lengths.device
        self.sampler = Sampler(slots, model.spec.vocab_size, device)
        self.next_input_ids = torch.zeros(slots, 1, dtype=torch.long, device=device)  # the input of the next step
        self.model = prepare_for_inference(model, weights, slots)
        if not sites and not compile:  # whose sites are inside of them; which fuses operations itself
            use_kernels(self.model, cache)
        # Ring buffers are read in another way from a length on.
        records = device.type == "cpu" and not (sites or compile) and cache.max_rollback == math.inf
        self._cpu_graphs = CpuGraphs() if records and is_own_code(self.model) else None
        self._steering = Steering(self.model, vectors, slots) if isinstance(self.model, Decoder) and vectors else None
        self._prompt_lengths = _prompt_lengths(self.model, slots)
        self._reader, self._edits = Reader(self.model), RequestEdits(self.model, slots)
        self._hook_sets: set[tuple[str, ...]] = {()}  # names
        self._probed = probed_sites(self.model, probes)
        self._lenses: dict[int, LensReading] = {}  # by the number of tokens
        self._compiled = compile_decode(self.model, slots) if compile else None
        weight = model.token_embedding.table.weight
        can_mix = isinstance(self.model, Decoder) and self.model.stack.supports_mixed_prefill(weight)
        self.batch_invariant = batch_invariant
        self.supports_mixed_prefill = can_mix and not sites and speculator is None and not batch_invariant
        self._in_use = torch.zeros(slots, dtype=torch.long, device=device)  # 1 for slots that decode
        self._slot_ids = torch.arange(slots, device=device)
        # The mixed prefill chunk: ids, slots, positions, and 1 for tokens in use.
        self._staged = self.next_input_ids.new_zeros(4, MIXED_PREFILL_TOKENS)
        use_graphs = device.type == "cuda" and not sites
        self._graphs = (
            Graphs(lambda: [cache.lengths, self.next_input_ids, *self.sampler.slots.tensors]) if use_graphs else None
        )
        self._prefill, self._prefill_chunk = Prefill(cache, self._graphs), prefill_chunk
        self.speculation = SpeculationStats()
        if speculator is not None:
            speculator.setup(self.model, slots, max_len)

    def check_readable(self, site: RecordedSite) -> None:
        """Raise for a site that is not read in this engine: inside a kernel, or of a cache that drops positions."""
        if (site.pairs or site.from_cache) and not site.crosses and self.cache.max_rollback < math.inf:
            raise InputError(
                f"{site.name} is of keys that sliding windows drop from the cache; name it in gh.Engine(record=...)."
            )
        self.check_hookable(site.selection.site, "name it in gh.Engine(record=...)")

    def check_hookable(self, site: Site, advice: str = "edit the model by gh.edit") -> None:
        """Raise for a site that is inside a kernel of this engine."""
        try:
            _ = replace(site, model=self.model).module
        except AttributeError:
            raise InputError(f"{site.name} is inside a kernel; {advice}.") from None

    @property
    def runs_ahead(self) -> bool:
        """Whether a GPU runs a step while the host processes the one before: the next step needs no output of it."""
        return self.next_input_ids.is_cuda and self.speculator is None

    def run(self, step: ScheduledStep) -> StepOutput | None:
        """Prefill the chunks of a step and decode; return None where no sequence decodes."""
        self._prefill_chunks(step.chunks)
        mixed = [] if step.mixed is None else [step.mixed]
        for chunk in mixed:
            self._fill_slot(chunk)
            self.cache.lengths[chunk.seq.slot] = chunk.start + len(chunk.ids)
        self._start_decoding([chunk for chunk in (*step.chunks, *mixed) if chunk.is_last])
        if not step.decoding:
            return None
        self._write_constraint_masks(step.decoding)
        drafts = None if self.speculator is None else self.speculator.propose(step.decoding, self.sampler)
        output = self._decode_step(step) if drafts is None else self._verify_step(step.decoding, drafts)
        if self.speculator is not None:
            self.speculation.add(output.sampled.counts, output.written)
        return output

    def _write_constraint_masks(self, seqs: Sequence[SequenceState]) -> None:
        """Write what each constrained sequence may sample next; one whose mask takes too much work fails."""
        rows, masks = [], []
        for seq in seqs:
            state = seq.request.constraint
            if state is not None and not seq.request.done:
                try:
                    masks.append(state.allowed())
                    rows.append(seq.slot)
                except InputError as error:
                    seq.request.fail(str(error))
        if rows:
            self.sampler.slots.set_allowed(rows, masks)

    def _prefill_chunks(self, chunks: Sequence[PrefillChunk]) -> None:
        """Prefill chunks of prompts, as many as possible in one pass."""
        self._encode_sources(chunks)
        batch: list[PrefillChunk] = []
        edited: list[PrefillChunk] = []
        for chunk in chunks:
            if chunk.prefix_slot in {one.seq.slot for one in batch}:  # the prefix to copy is in that batch
                self._prefill.run(self._forward, batch)
                batch = []
            self._fill_slot(chunk)
            if chunk.ids and self._can_batch(chunk):
                (edited if chunk.seq.request.edits else batch).append(chunk)
            elif chunk.ids:
                with self._hooking_prompt(chunk):
                    eager = chunk.seq.request.records_prompt or bool(chunk.seq.request.edits)
                    self.prefill(chunk.ids, chunk.seq.slot, chunk.start, eager=eager)
        self._prefill.run(self._forward, batch)
        with self._reader.reading([], self._edit_hooks([chunk.seq for chunk in edited])):
            self._prefill.run(self._forward, edited, eager=True)

    def _can_batch(self, chunk: PrefillChunk) -> bool:
        """Whether a chunk may share a pass with others."""
        functions = any(edit.is_function for edit in chunk.seq.request.edits)
        if self.batch_invariant or chunk.seq.request.records_prompt or functions:
            return False
        if chunk.start == 0:
            # On a GPU sliding windows run in FlexAttention, which would be compiled for the shapes of batches.
            return isinstance(self.model, Decoder) and (self._graphs is None or self.model.stack.windows == [0])
        return self.supports_mixed_prefill and len(chunk.ids) <= MIXED_PREFILL_TOKENS

    def _fill_slot(self, chunk: PrefillChunk) -> None:
        """Before the first chunk of a prompt, copy its cached prefix into the slot."""
        slot = chunk.seq.slot
        if chunk.prefix_slot is None:
            return
        self._save(chunk.saved)
        self.steer(chunk.seq)
        self._edits.set(slot, chunk.seq.request.edits)
        self._prompt_lengths[slot] = len(chunk.seq.request.prompt)
        if chunk.prefix_slot == slot:
            self.cache.lengths[slot] = chunk.start
        else:
            self.cache.copy_row(chunk.prefix_slot, slot, 0, chunk.start)

    def _encode_sources(self, chunks: Sequence[PrefillChunk]) -> None:
        """Encode the sources of new requests, those of similar lengths in one pass."""
        if not isinstance(self.model, Seq2Seq):
            return
        new = {chunk.seq.slot: chunk for chunk in chunks if chunk.prefix_slot is not None}
        sources = [NewPrompt(slot, chunk.seq.request.source) for slot, chunk in new.items()]
        alone = self.batch_invariant or any(chunk.seq.request.recording is not None for chunk in new.values())
        passes = [[one] for one in sources] if alone else self._prefill.group(sources, self._prefill_chunk)
        for group in passes:
            chunk = new[group[0].slot]
            recording = chunk.seq.request.recording
            sites = [] if recording is None else recording.of_source
            ids, lengths, slots = self._prefill.stack(group)
            with self._reader.reading(sites) as values, for_any_shape(ids.device):
                self.model.encode_source(ids, self.cache, lengths=lengths, rows=slots[:, 0])
            for site, value in zip(sites, values, strict=True):
                assert recording is not None
                recording.add(site, value[0].cpu(), 0, len(group[0].ids))

    def _start_decoding(self, chunks: Sequence[PrefillChunk]) -> None:
        """After the last chunks of prompts, set up their slots for decoding; a beam search has one slot per beam."""
        rows, inputs = [], []
        for chunk in chunks:
            seq, request = chunk.seq, chunk.seq.request
            options = EMPTY_SLOT if chunk.forks else request.options
            for fork in chunk.forks:
                self.cache.copy_row(seq.slot, fork.slot, 0, seq.n_cached)
                self._copy_state(seq.slot, fork.slot)
            for one in (seq, *chunk.forks):
                rows.append(SlotParams(one.slot, options, request.prompt, sorted(request.end_ids)))
                inputs.append((one.slot, request.prompt[-1]))
        if rows:
            self.sampler.slots.set_many(rows)
            slots, ids = copy_to_device(inputs, self.next_input_ids.device).T
            self.set_next_inputs(slots, ids)

    def _decode_step(self, step: ScheduledStep) -> StepOutput:
        """Decode one token per sequence, and prefill the mixed chunk."""
        seqs, hooks = step.decoding, self._hooks(step)
        if self.batch_invariant and self._graphs is None:
            output = self._decode_each(seqs, hooks)
        else:
            left = min(seq.request.limit - seq.n_generated for seq in seqs)  # steps with the same sequences
            output = self.decode(len(seqs), *_lengths(seqs, 1), left, step.mixed, hooks)
        starts = [seq.n_cached for seq in seqs]
        read = ReadStep(hooks.readings, list(output.read), starts) if hooks.readings else None
        ones = [1] * len(seqs)
        k = max(seq.request.options.top_logprobs for seq in seqs)
        top = top_logprobs(output.logits, k) if k else None  # before the next step overwrites the logits
        tokens, logprobs = output.tokens[:, None], output.logprobs[:, None]
        sampled = SampledTokens.start_copy(tokens, logprobs, ones, top, output.candidates, read)
        return StepOutput(sampled, output.logits, written=ones)

    def _hooks(self, step: ScheduledStep) -> PassHooks:
        """Return what some sequence wants of a decode step: recorded sites, lens, probes, and edits."""
        seqs = step.decoding
        edited = seqs if step.mixed is None or step.mixed.is_last else [*seqs, step.mixed.seq]
        recorded: dict[str, Reading] = {}
        names: set[str] = set()
        for seq in seqs:
            names |= seq.request.scores.keys()
            recorded |= {one.name: one for one in seq.request.attended}
            if seq.request.recording is not None:
                recorded |= seq.request.recording.of_pass(seq.n_cached)
        if count := max(seq.request.options.lens for seq in seqs):
            count = FEW if count <= FEW else MOST_TOP
            if count not in self._lenses:
                self._lenses[count] = LensReading(self.model, count)
            recorded[self._lenses[count].name] = self._lenses[count]
        probed = [site for site in self._probed if names & site.columns.keys()]
        edits = self._edits.of(seq.request.edits for seq in edited)
        return PassHooks([*(recorded[name] for name in sorted(recorded)), *probed], edits, self._edit_functions(seqs))

    def _decode_each(self, seqs: Sequence[SequenceState], hooks: PassHooks) -> DecodeOutput:
        """Decode sequence by sequence: on a CPU, how a row of a matmul rounds depends on its place."""
        passes = []
        for seq in seqs:
            row = slice(seq.slot, seq.slot + 1)
            view = self.cache.narrow(row, *_lengths([seq], 1))
            passes.append(self._step(self.next_input_ids[row], view, hooks))
        # Keys are padded to the longest sequence, and those past a sequence's own are cut off.
        logits, *read = (pad_and_concatenate(list(pieces)) for pieces in zip(*passes, strict=True))
        return self._sample(logits)._replace(read=tuple(read))

    def _step(self, ids: Tensor, view: CacheView, hooks: PassHooks, **arguments: Tensor | None) -> tuple[Tensor, ...]:
        """Return the logits [n, V] of one new token per sequence, and what was read, [n, ...]."""
        before = view.start_positions() if hooks.readings else None
        positions = None if before is None else before.clone()
        with self._reader.reading(hooks.readings, [*(one.hook for one in hooks.edits), *hooks.functions]) as values:
            logits = self._forward(ids, view, step=True, **arguments)[:, 0]
        return logits, *(
            reading.at(value, positions) if isinstance(reading, RecordedSite) and positions is not None else value
            for reading, value in zip(hooks.readings, values, strict=True)
        )

    def _verify_step(self, seqs: list[SequenceState], drafts: Drafts) -> StepOutput:
        """Sample the accepted draft tokens of each sequence, and the token after them."""
        n, k = drafts.tokens.shape
        logits = self.verify_drafts(drafts.tokens, drafts.counts, *_lengths(seqs, k + 1))
        tokens, counts = self.sampler.verify(logits, drafts.tokens, drafts.counts, drafts.probabilities)
        logprobs = token_logprobs(logits.flatten(0, 1), tokens.flatten()).view(n, k + 1)
        kept = counts.tolist()
        sampled = SampledTokens.start_copy(tokens, logprobs, kept)
        lengths = [seq.n_cached + count for seq, count in zip(seqs, kept, strict=True)]
        self.cache.lengths[:n] = torch.tensor(lengths, device=logits.device)
        self.next_input_ids[:n] = tokens.gather(1, counts[:, None] - 1)
        return StepOutput(sampled, logits[:, 0], written=[count + 1 for count in drafts.counts.tolist()])

    @contextmanager
    def _hooking_prompt(self, chunk: PrefillChunk) -> Iterator[None]:
        """Edit and record the forward pass of a chunk inside the block, as its request wants it."""
        recording = chunk.seq.request.recording
        sites = [] if recording is None else list(recording.of_pass(chunk.start).values())
        with self._reader.reading(sites, self._edit_hooks([chunk.seq])) as values:
            yield
        for site, value in zip(sites, values, strict=True):
            assert recording is not None
            recording.add(site, value[0].cpu(), chunk.start, len(chunk.ids))

    def _edit_hooks(self, seqs: Sequence[SequenceState]) -> list[Hook]:
        fixed = self._edits.of(seq.request.edits for seq in seqs)
        return [*(one.hook for one in fixed), *self._edit_functions(seqs)]

    def _edit_functions(self, seqs: Sequence[SequenceState]) -> list[Hook]:
        return [
            hook
            for seq in seqs
            if seq.request.edits
            for hook in self._edits.by_functions(seq.slot, seq.request.edits, seq.request.fail)
        ]

    def _copy_state(self, source: int, target: int) -> None:
        """Give a slot, which gets the sequence of another one, what edits and steering know of that."""
        if self._steering is not None:
            self._steering.copy(source, target)
        self._edits.copy(source, target)
        self._prompt_lengths[target] = self._prompt_lengths[source]

    def steer(self, seq: SequenceState) -> None:
        """Steer the slot of a sequence as its request says now."""
        if self._steering is not None:
            request = seq.request
            self._steering.set(seq.slot, request.steering, request.options.steer_at, len(request.prompt))

    def set_next_inputs(self, slots: Tensor, tokens: Tensor) -> None:
        """Set the input of the next step of these slots."""
        self.next_input_ids[slots, 0] = tokens

    def copy_cache(self, source: int, target: int, start: int, stop: int) -> None:
        """Copy the cache of a slot up to position `stop` to one that has the same tokens up to `start`."""
        self.cache.copy_row(source, target, start, stop)

    def clear_cache(self, slot: int, start: int) -> None:
        """Overwrite the cache of a slot from position `start` on.

        A masked key has weight 0, but 0 times NaN is NaN: a NaN left in the cache would reach the next request there.
        """
        self.cache.clear_row(slot, start)

    def _save(self, move: Move | None) -> None:
        """Copy what a slot has cached to a free one, which stays free."""
        if move is not None:
            self.cache.copy_row(move.source, move.target, 0, move.n_cached)
            self.cache.lengths[move.target] = 0

    def release_slot(self, slot: int, saved: Move | None, moves: Sequence[Move]) -> None:
        """Release a slot, save what it has cached, and move the sequences that close the gap."""
        self._save(saved)
        self.sampler.slots.clear(slot)
        for source, target, n_cached in moves:
            self.cache.copy_row(source, target, 0, n_cached)
            self.sampler.slots.move(source, target)
            self.next_input_ids[target] = self.next_input_ids[source]
            self._copy_state(source, target)
            if self.speculator is not None:
                self.speculator.move(source, target)
            slot = source
        self.cache.lengths[slot] = 0

    @property
    def warm_up_widths(self) -> list[int]:
        """The batch sizes to compile or capture: the largest, which needs most memory, then from one on."""
        count = len(self.next_input_ids)
        if self._graphs is None:
            return [] if self._compiled is None else [count]
        *smaller, largest = sorted({self._width(n) for n in range(1, count + 1)})
        return [largest, *smaller]

    def warm_up(self, options: SamplingParams, width: int) -> None:
        """Compile or capture the decode steps of a batch size, for these options; all slots must be free."""
        count = len(self.next_input_ids)
        self.sampler.slots.set_many([SlotParams(slot, options, [], []) for slot in range(count)])
        if self._graphs is None:
            self.decode(width, 1, 1, 0)
            return
        self._in_use.zero_()
        self._staged.zero_()
        self._run_decode("decode", width)
        if self.supports_mixed_prefill:
            self._run_decode("mixed", width)

    def release_all(self) -> None:
        """Release every slot."""
        for slot in range(len(self.next_input_ids)):
            self.sampler.slots.clear(slot)
        self.cache.lengths.zero_()

    def prefill(self, ids: list[int], slot: int, start: int, *, eager: bool = False) -> None:
        """Write the keys and values of prompt tokens at positions from `start` on to a slot, in a pass of its own."""
        if start > 0 or isinstance(self.model, Seq2Seq):  # they attend to cached tokens, or to a source
            view = self.cache.narrow(slice(slot, slot + 1), start + len(ids))
            self._forward(self._row(ids), view, logits_to_keep=self._in_use[:0])
        else:
            self._prefill.run_alone(self._forward, NewPrompt(slot, ids), eager=eager)

    def decode(
        self,
        n: int,
        longest: int,
        source_len: int,
        left: int,
        mixed: PrefillChunk | None = None,
        hooks: PassHooks = NO_HOOKS,
    ) -> DecodeOutput:
        """Run one decode step for the first n slots, together with a chunk of a prompt if one is given.

        With the new tokens, no sequence is longer than `longest`, and no source than `source_len`; at most `left`
        steps are of the same sequences.
        """
        if mixed is None and self._graphs is None:
            return self._decode_rows(n, longest, source_len, left, hooks)
        width = self._width(n)
        self._in_use[:n], self._in_use[n:] = 1, 0
        if mixed is not None:
            self._stage(mixed)
        name: Literal["decode", "mixed"] = "decode" if mixed is None else "mixed"
        return as_output(one[:n] for one in self._run_decode(name, width, hooks))

    def _decode_rows(self, n: int, longest: int, source_len: int, left: int, hooks: PassHooks) -> DecodeOutput:
        """Run one decode step for the first n slots, as a CPU graph once there is one."""
        if self.cache.source is not None:  # few lengths need few graphs
            source_len = min(-(-source_len // SOURCE_STEP) * SOURCE_STEP, self.cache.source.source_len)

        def work(length: int) -> tuple[Tensor, ...]:
            view = self.cache.narrow(slice(0, n), length, source_len)
            logits, *read = self._step(self.next_input_ids[:n], view, hooks)
            return results_of(self._sample(logits), read)

        if self._cpu_graphs is None or not hooks.fits_graphs:
            return as_output(work(longest))
        key = (n, source_len, self.sampler.slots.metadata(n), hooks.names)
        return as_output(self._cpu_graphs.run(key, work, longest, self.cache.max_len, left))

    def _run_decode(
        self, name: Literal["decode", "mixed"], width: int, hooks: PassHooks = NO_HOOKS
    ) -> tuple[Tensor, ...]:
        def work() -> tuple[Tensor, ...]:
            return self._decode_batch(width, hooks) if name == "decode" else self._decode_mixed(width, hooks)

        if not hooks.fits_graphs or not self._is_captured(hooks):
            return work()
        return self._run((name, width, self.sampler.slots.metadata(width), hooks.names), work)

    def _is_captured(self, hooks: PassHooks) -> bool:
        """Whether CUDA graphs may be captured for hooks: of the first few sets of them, since each keeps memory."""
        if len(self._hook_sets) < MOST_HOOK_SETS:
            self._hook_sets.add(hooks.names)
        return hooks.names in self._hook_sets

    def _width(self, n: int) -> int:
        """Return the number of slots that a step runs for the first n of them."""
        slots = len(self.next_input_ids)
        return slots if self._compiled is not None or self.batch_invariant else min(bucket(n), slots)

    def _decode_batch(self, width: int, hooks: PassHooks) -> tuple[Tensor, ...]:
        view, in_use = self.cache.narrow(slice(0, width)), self._in_use[:width]
        logits, *read = self._step(self.next_input_ids[:width], view, hooks, lengths=in_use)
        return results_of(self._sample(logits), read)

    def _decode_mixed(self, width: int, hooks: PassHooks) -> tuple[Tensor, ...]:
        """Run the decode tokens of all slots and the prefill tokens as one packed sequence."""
        ids, slots, positions, in_use = self._staged
        view = MixedBatch(
            self.cache, torch.cat([self._slot_ids[:width], slots]), torch.cat([self.cache.lengths[:width], positions])
        )
        real = torch.cat([self._in_use[:width], in_use]) > 0
        ids = torch.cat([self.next_input_ids[:width, 0], ids])[None]
        with self._reader.reading(hooks.readings, [one.hook for one in hooks.edits], packed=width) as values:
            logits = self._forward(ids, view, mask=real[None], logits_to_keep=self._slot_ids[:width], step=True)[0]
        return results_of(self._sample(logits), values)

    def _stage(self, chunk: PrefillChunk) -> None:
        """Copy a prefill chunk into the tensors that CUDA graphs read."""
        n = len(chunk.ids)
        padding = [0] * (MIXED_PREFILL_TOKENS - n)
        positions = range(chunk.start, chunk.start + n)
        rows = [chunk.ids + padding, [chunk.seq.slot] * n + padding, [*positions, *padding], [1] * n + padding]
        self._staged.copy_(copy_to_device(rows, self._staged.device))

    def _sample(self, logits: Tensor) -> DecodeOutput:
        """Sample the next tokens from logits [n, V] and make them the next step's input."""
        tokens, candidates = self.sampler.sample_with_candidates(logits)
        if self.sampler.slots.metadata(len(logits)).idle:  # beam search chooses its own tokens
            return DecodeOutput(logits, tokens, torch.zeros_like(tokens, dtype=logits.dtype), candidates)
        self.next_input_ids[: len(tokens), 0] = tokens
        own = candidates[:, 0, 2] if candidates.shape[1] else token_logprobs(logits, tokens)
        return DecodeOutput(logits, tokens, own, candidates)

    def verify_drafts(self, drafts: Tensor, counts: Tensor, longest: int, source_len: int) -> Tensor:
        """Return the logits [n, k + 1, V] of the first n slots, before their first draft [n, k] and after each."""
        ids = torch.cat([self.next_input_ids[: len(drafts)], drafts], 1)
        view = self.cache.narrow(slice(0, len(drafts)), longest, source_len)
        return self._forward(ids, view, lengths=counts + 1)

    def _row(self, ids: list[int]) -> Tensor:
        return copy_to_device([ids], self.next_input_ids.device)

    def _run(self, key: Hashable, work: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        return work() if self._graphs is None else self._graphs.run(key, work)

    def _forward(
        self,
        ids: Tensor,
        cache: CacheView,
        *,
        lengths: Tensor | None = None,
        mask: Tensor | None = None,
        logits_to_keep: Tensor | None = None,
        step: bool = False,  # prompts have too many lengths to compile for
    ) -> Tensor:
        run: Callable[..., Tensor] = self._compiled if step and self._compiled is not None else self.model
        if isinstance(self.model, Seq2Seq):
            return run(None, ids, target_lengths=lengths, cache=cache, logits_to_keep=logits_to_keep)
        return run(ids, lengths=lengths, mask=mask, cache=cache, logits_to_keep=logits_to_keep)


def _prompt_lengths(copy: Decoder | Seq2Seq, slots: int) -> Tensor:
    """Return the prompt length of each slot, for edits that are limited to some positions."""
    _, stack = final_stack(copy)
    with torch.inference_mode(False):
        lengths = torch.zeros(slots, dtype=torch.long, device=copy.token_embedding.table.weight.device)
    stack.prompt_lengths = lengths
    return lengths


def _lengths(seqs: list[SequenceState], new: int) -> tuple[int, int]:
    """Return the length of the longest sequence with `new` more tokens, and of the longest source."""
    return max(seq.n_cached for seq in seqs) + new, max(len(seq.request.source) for seq in seqs)


def results_of(output: DecodeOutput, read: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return the results of a decode step as a graph has them: those of the sampler, then what was read."""
    return output.logits, output.tokens, output.logprobs, output.candidates, *read


def as_output(results: Iterable[Tensor]) -> DecodeOutput:
    """Return the output that has these results."""
    logits, tokens, logprobs, candidates, *read = results
    return DecodeOutput(logits, tokens, logprobs, candidates, tuple(read))


def pad_and_concatenate(rows: Sequence[Tensor]) -> Tensor:
    """Concatenate tensors [1, ...] that differ in the size of their last axis, with zeros after the shorter ones.

    >>> pad_and_concatenate([torch.tensor([[1]]), torch.tensor([[2, 3]])]).tolist()
    [[1, 0], [2, 3]]
    """
    longest = max(row.shape[-1] for row in rows)
    return torch.cat([F.pad(row, (0, longest - row.shape[-1])) for row in rows])
