"""Sampling parameters by slot: a row of a few tensors on the model's device, and what a batch of rows needs.

Which operations a row needs is decided on the host when a request takes the slot; sampling itself needs no value on
the host, so it does not synchronise and can be part of a CUDA graph.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from glasshouse.errors import InputError
from glasshouse.generation.engine.cuda_graphs import copy_to_device
from glasshouse.generation.sampling.counter_rng import seed_state
from glasshouse.generation.sampling_params import MAX_FLOAT32, SamplingParams

# Settings are clamped to what float32 can divide and multiply by; larger values would only produce infinities.
MIN_FLOAT32 = torch.finfo(torch.float32).tiny
MOST_FREQUENCY = MAX_FLOAT32 / 2**31  # finite when multiplied by a token count

EMPTY_SLOT = SamplingParams()  # compared by identity: samples of such a row are ignored


@dataclass(frozen=True)
class SamplingMetadata:
    """The operations that the batch needs. Equal metadata run equal kernels, so it can key a CUDA graph."""

    greedy: bool  # some row is greedy
    random: bool  # some row samples
    top: int  # how many of the largest logits top_k and top_p need
    top_p: bool
    min_p: bool
    repetition: bool
    frequency: bool  # or presence
    bias: bool
    minimum: bool
    candidates: int  # how many some row wants to see
    constrained: bool

    @property
    def idle(self) -> bool:
        """Whether all samples are ignored."""
        return not (self.greedy or self.random)

    @property
    def needs_token_counts(self) -> bool:
        """Whether penalties need counts of generated tokens."""
        return self.repetition or self.frequency

    @property
    def needs_logits_processing(self) -> bool:
        """Whether logits change before the argmax."""
        return self.needs_token_counts or self.bias or self.minimum or self.constrained


class SlotParams(NamedTuple):
    """What a slot must know of its request; no `end_ids` are sampled before `min_new_tokens`."""

    slot: int
    options: SamplingParams
    prompt: Sequence[int]
    end_ids: Sequence[int]


class SamplingSlots:
    """The parameters of each slot, and the tokens that it has generated.

    >>> slots = SamplingSlots(2, vocab_size=3, device=torch.device("cpu"))
    >>> slots.set(1, SamplingParams(temperature=0.5), prompt=[1], end_ids=[2])
    >>> slots.metadata(1).idle, slots.metadata(2).random
    (True, True)
    """

    def __init__(self, count: int, vocab_size: int, device: torch.device) -> None:
        self.count, self.vocab_size, self.device = count, vocab_size, device
        self.tensors: list[Tensor] = []  # all tensors, with a row per slot; setting a slot may add some
        real = torch.float32 if device.type == "mps" else torch.float64
        # Settings share two tensors, so that setting or moving a slot is one copy of each.
        self._reals, self._wholes = self._new(real, 6), self._new(torch.int64, 5)
        self.temperature, self.top_p, self.min_p, self.repetition, *penalties = self._reals.unbind(1)
        self.frequency, self.presence = penalties
        # stream is the start of the seed's random numbers, n_generated the number of tokens so far.
        self.greedy, self.top_k, self.minimum, self.stream, self.n_generated = self._wholes.unbind(1)
        self._write_settings(range(count), [EMPTY_SLOT] * count)
        self.tables: dict[str, Tensor] = {}  # [slots, V], each allocated when first needed
        self._options = [EMPTY_SLOT] * count
        self._metadata: dict[int, SamplingMetadata] = {}  # by batch size, until a slot changes

    def set(self, slot: int, options: SamplingParams, prompt: Sequence[int], end_ids: Sequence[int]) -> None:
        """Install the parameters of a request in a slot; no `end_ids` are sampled before `min_new_tokens`."""
        self.set_many([SlotParams(slot, options, prompt, end_ids)])

    def set_many(self, rows: Sequence[SlotParams]) -> None:
        """Install the parameters of several requests, with as many copies to the device as for one."""
        for slot, options, prompt, end_ids in rows:
            self._set_tables(slot, options, prompt, end_ids)
            self._set(slot, options)
        self._write_settings([row.slot for row in rows], [row.options for row in rows])

    def _set_tables(self, slot: int, options: SamplingParams, prompt: Sequence[int], end_ids: Sequence[int]) -> None:
        if (largest := max(options.logit_bias, default=0)) >= self.vocab_size:
            raise InputError(f"logit_bias names id {largest}, but ids go to {self.vocab_size - 1}; leave it out.")
        # Rows of tables that these settings do not use are left as they are.
        metadata = _make_metadata([options], self.vocab_size)
        if metadata.needs_token_counts:
            self._table("counts", torch.int32)[slot] = 0
        if metadata.repetition:
            self._mark(self._table("prompt", torch.bool)[slot], prompt)
        if metadata.minimum:
            self._mark(self._table("ends", torch.bool)[slot], end_ids)
        if metadata.constrained or "forbidden" in self.tables:
            self._table("forbidden", torch.bool)[slot] = False
        if metadata.bias or "bias" in self.tables:
            row = self._table("bias", torch.float32)[slot].zero_()
            values = [_clamp(value, -math.inf, MAX_FLOAT32) for value in options.logit_bias.values()]
            row[self._ids(options.logit_bias)] = torch.tensor(values, dtype=row.dtype, device=self.device)

    def set_allowed(self, slots: Sequence[int], masks: Sequence[Tensor]) -> None:
        """Set which tokens, bool [V], the next step of these slots may sample: their requests have a constraint."""
        forbidden = ~torch.stack(tuple(masks))
        if self.device.type == "cuda":  # without waiting for the work of the GPU
            forbidden = forbidden.pin_memory().to(self.device, non_blocking=True)
        forbidden = forbidden.to(self.device)
        self._table("forbidden", torch.bool)[copy_to_device(slots, self.device)] = forbidden

    def clear(self, slot: int) -> None:
        """Clear a slot, so that its settings no longer add work to the batch."""
        self._set(slot, EMPTY_SLOT)

    def move(self, source: int, target: int) -> None:
        """Move a slot with its state."""
        if source != target:
            self.copy(source, target)
            self.clear(source)

    def copy(self, source: int, target: int) -> None:
        """Copy a slot with its state, seed included."""
        for rows in self.tensors:
            rows[target] = rows[source]
        self._set(target, self._options[source])

    def metadata(self, n: int) -> SamplingMetadata:
        """Return what slots 0 to n - 1 need; it is the same until a slot changes."""
        if n not in self._metadata:
            self._metadata[n] = _make_metadata(self._options[:n], self.vocab_size)
        return self._metadata[n]

    def count_tokens(self, tokens: Tensor, kept: Tensor) -> None:
        """Count the first `kept[i]` tokens [n, T] of each row as generated; as `Sampler.sample` and `verify` do."""
        n, length = tokens.shape
        self.n_generated[:n] += kept
        if self.metadata(n).needs_token_counts:
            counted = torch.arange(length, device=tokens.device) < kept[:, None]
            self.tables["counts"][:n].scatter_add_(1, tokens, counted.int())

    def steps(self, n_positions: int, drafts: Tensor) -> Tensor:
        """Return the number of generated tokens before each position [n, P], drafts included."""
        n, n_drafts = drafts.shape
        steps = torch.arange(n_drafts + 1 - n_positions, n_drafts + 1, device=drafts.device)
        return self.n_generated[:n, None] + steps

    def token_counts(self, n_positions: int, drafts: Tensor) -> Tensor:
        """Return how often each token was generated before each position [n, P, V], drafts included."""
        n, n_drafts = drafts.shape
        counts = self.tables["counts"][:n, None]
        if n_drafts == 0:
            return counts
        before = torch.ones(n_positions, n_drafts, dtype=counts.dtype, device=drafts.device)
        before = before.tril(n_drafts - n_positions)
        index = drafts[:, None].expand(n, n_positions, n_drafts)
        return counts.repeat(1, n_positions, 1).scatter_add_(-1, index, before.expand_as(index))

    def _write_settings(self, slots: Sequence[int], options: Sequence[SamplingParams]) -> None:
        """Write the numeric parameters of slots."""
        index = copy_to_device(slots, self.device)
        reals = [
            (
                _clamp(one.temperature, MIN_FLOAT32, MAX_FLOAT32),
                _top_p(one),
                float(one.min_p or 0),
                _clamp(one.repetition_penalty, MIN_FLOAT32, MAX_FLOAT32),
                _clamp(one.frequency_penalty, -MOST_FREQUENCY, MOST_FREQUENCY),
                _clamp(one.presence_penalty, -MOST_FREQUENCY, MOST_FREQUENCY),
            )
            for one in options
        ]
        wholes = [
            (
                int(one.temperature == 0),
                _top_k(one, self.vocab_size),
                min(one.min_new_tokens, 2**62),
                seed_state(one.seed),
                0,
            )
            for one in options
        ]
        self._reals[index] = copy_to_device(reals, self.device, self._reals.dtype)
        self._wholes[index] = copy_to_device(wholes, self.device, self._wholes.dtype)

    def _set(self, slot: int, options: SamplingParams) -> None:
        self._options[slot] = options
        self._metadata.clear()

    def _table(self, name: str, dtype: torch.dtype) -> Tensor:
        if name not in self.tables:
            self.tables[name] = self._new(dtype, self.vocab_size)
        return self.tables[name]

    def _new(self, dtype: torch.dtype, width: int) -> Tensor:
        with torch.inference_mode(False):  # inference tensors cannot be written outside that mode
            self.tensors.append(torch.zeros(self.count, width, dtype=dtype, device=self.device))
        return self.tensors[-1]

    def _mark(self, row: Tensor, ids: Sequence[int]) -> None:
        """Set a row of a bool table to True at `ids` and False elsewhere."""
        # An id without a logit, possible in a source, can never be sampled.
        row.zero_()[self._ids(i for i in ids if 0 <= i < self.vocab_size)] = True

    def _ids(self, ids: Iterable[int]) -> Tensor:
        return torch.tensor(list(ids), dtype=torch.int64).to(self.device)


def _make_metadata(rows: Sequence[SamplingParams], vocab_size: int) -> SamplingMetadata:
    random = [row for row in rows if row.temperature > 0]
    tops = [k for row in random if (k := _top_k(row, vocab_size)) < vocab_size or _top_p(row) < 1]
    return SamplingMetadata(
        greedy=any(row.temperature == 0 for row in rows if row is not EMPTY_SLOT),
        random=bool(random),
        top=max(tops, default=0),
        top_p=any(_top_p(row) < 1 for row in random),
        min_p=any(row.min_p for row in random),
        repetition=any(row.repetition_penalty != 1 for row in rows),
        frequency=any(row.frequency_penalty or row.presence_penalty for row in rows),
        bias=any(row.logit_bias for row in rows),
        minimum=any(row.min_new_tokens for row in rows),
        candidates=min(max((row.candidates for row in rows), default=0), vocab_size),
        constrained=any(row.constraint is not None for row in rows),
    )


def _top_k(options: SamplingParams, vocab_size: int) -> int:
    return vocab_size if options.top_k is None else min(options.top_k, vocab_size)


def _top_p(options: SamplingParams) -> float:
    # A cumulative sum that rounds to 1 early would cut off the last tokens.
    return math.inf if options.top_p is None or options.top_p == 1 else float(options.top_p)


def _clamp(value: float, least: float, most: float) -> float:
    return float(min(max(value, least), most))
