"""Runs the model of an engine over the slots of its KV cache: prefill, decode and draft verification."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from glasshouse.generation.cuda_graphs import Graphs, bucket
from glasshouse.generation.inference_model import Weights, compile_decode, prepare_for_inference
from glasshouse.generation.logits_kernels import token_logprobs
from glasshouse.generation.sampling import Sampler
from glasshouse.layers.cache import Cache, CacheView, MixedBatch, PackedPrefill
from glasshouse.models import Decoder, Seq2Seq

MIXED_PREFILL_TOKENS = 128  # prompt tokens added to one decode step; so few cost a large GPU almost nothing


@dataclass
class MixedPrefill:
    """A chunk of a prompt that is prefilled within a decode step."""

    slot: int
    start: int  # position of the first token
    ids: list[int]


class StepOutput(NamedTuple):
    """The output of a decode step for the first n slots."""

    logits: Tensor  # [n, V]
    tokens: Tensor  # [n]
    logprobs: Tensor  # [n]


class ModelRunner:
    """Runs prefill and decode over cache slots, as CUDA graphs on a GPU."""

    def __init__(
        self,
        model: Decoder | Seq2Seq,
        cache: Cache,
        sampler: Sampler,
        *,
        weights: Weights,
        compile: bool,  # noqa: A002 (torch's word)
        recording: bool,  # activations are recorded: no CUDA graphs, which bypass module hooks, and no mixed prefill
    ) -> None:
        slots, device = len(cache.lengths), cache.lengths.device
        self.cache, self.sampler = cache, sampler
        self.next_input_ids = torch.zeros(slots, 1, dtype=torch.long, device=device)  # the input of the next step
        self.model = prepare_for_inference(model, weights, slots)
        self._compiled = compile_decode(self.model, slots) if compile else None
        can_mix = isinstance(model, Decoder) and model.stack.supports_mixed_prefill(
            model.token_embedding.table.weight
        )
        self.supports_mixed_prefill = can_mix and not recording
        self._in_use = torch.zeros(slots, dtype=torch.long, device=device)  # 1 for slots that decode
        self._slot_ids = torch.arange(slots, device=device)
        # The mixed prefill chunk: ids, slots, positions, and 1 for tokens in use.
        self._staged = self.next_input_ids.new_zeros(4, MIXED_PREFILL_TOKENS)
        self._prefill_inputs: dict[int, tuple[Tensor, Tensor]] = {}  # inputs of the prefill graphs, by width
        use_graphs = device.type == "cuda" and not recording
        self._graphs = Graphs(lambda: [cache.lengths, self.next_input_ids, *sampler.state]) if use_graphs else None

    def encode_source(self, source: list[int], slot: int) -> None:
        """Run the encoder and store the cross-attention keys and values of a slot."""
        assert isinstance(self.model, Seq2Seq)
        self.model.encode_source(self._row(source), self.cache.narrow(slice(slot, slot + 1)))

    def prefill(self, ids: list[int], slot: int, start: int) -> None:
        """Write the keys and values of prompt tokens at positions from `start` on to a slot."""
        if start > 0 or isinstance(self.model, Seq2Seq):  # they attend to cached tokens, or to a source
            view = self.cache.narrow(slice(slot, slot + 1), start + len(ids))
            self._forward(self._row(ids), view, logits_to_keep=self._in_use[:0])
        elif self._graphs is None:
            rows = torch.full((len(ids),), slot, device=self.next_input_ids.device)
            self._forward(self._row(ids), PackedPrefill(self.cache, rows), logits_to_keep=self._in_use[:0])
        else:
            self._prefill_with_graph(ids, slot)

    def _prefill_with_graph(self, ids: list[int], slot: int) -> None:
        width = bucket(len(ids))
        if width not in self._prefill_inputs:
            self._prefill_inputs[width] = self.next_input_ids.new_zeros(2, width), self.next_input_ids.new_zeros(1)
        inputs, length = self._prefill_inputs[width]
        inputs.copy_(torch.tensor([ids + [0] * (width - len(ids)), [slot] * width]).pin_memory(), non_blocking=True)
        length.fill_(len(ids))
        view = PackedPrefill(self.cache, inputs[1])
        self._run(
            ("prefill", width),
            lambda: (self._forward(inputs[:1], view, lengths=length, logits_to_keep=self._in_use[:0]),),
        )

    def decode(self, n: int, longest: int, source_len: int, mixed_prefill: MixedPrefill | None = None) -> StepOutput:
        """Run one decode step for the first n slots, together with a chunk of a prompt if one is given.

        With the new tokens, no sequence is longer than `longest`, and no source than `source_len`.
        """
        if mixed_prefill is None and self._graphs is None:
            view = self.cache.narrow(slice(0, n), longest, source_len)
            return self._sample(self._forward(self.next_input_ids[:n], view, step=True)[:, 0])
        width = len(self.next_input_ids) if self._compiled is not None else min(bucket(n), len(self.next_input_ids))
        self._in_use[:n], self._in_use[n:] = 1, 0
        if mixed_prefill is not None:
            self._stage_mixed_prefill(mixed_prefill)
        name, work = ("decode", self._decode_batch) if mixed_prefill is None else ("mixed", self._decode_mixed)
        key = (name, width, self.sampler.metadata(width))
        return StepOutput(*(one[:n] for one in self._run(key, lambda: work(width))))

    def _decode_batch(self, width: int) -> StepOutput:
        view, in_use = self.cache.narrow(slice(0, width)), self._in_use[:width]
        return self._sample(self._forward(self.next_input_ids[:width], view, lengths=in_use, step=True)[:, 0])

    def _decode_mixed(self, width: int) -> StepOutput:
        """Run the decode tokens of all slots and the prefill tokens as one packed sequence."""
        ids, slots, positions, in_use = self._staged
        view = MixedBatch(
            self.cache, torch.cat([self._slot_ids[:width], slots]), torch.cat([self.cache.lengths[:width], positions])
        )
        real = torch.cat([self._in_use[:width], in_use]) > 0
        ids = torch.cat([self.next_input_ids[:width, 0], ids])[None]
        return self._sample(
            self._forward(ids, view, mask=real[None], logits_to_keep=self._slot_ids[:width], step=True)[0]
        )

    def _stage_mixed_prefill(self, mixed_prefill: MixedPrefill) -> None:
        """Copy a prefill chunk into the tensors that CUDA graphs read."""
        n = len(mixed_prefill.ids)
        padding = [0] * (MIXED_PREFILL_TOKENS - n)
        positions = range(mixed_prefill.start, mixed_prefill.start + n)
        staged = torch.tensor(
            [
                mixed_prefill.ids + padding,
                [mixed_prefill.slot] * n + padding,
                [*positions, *padding],
                [1] * n + padding,
            ]
        )
        self._staged.copy_(staged.pin_memory() if self._staged.is_cuda else staged, non_blocking=True)

    def _sample(self, logits: Tensor) -> StepOutput:
        """Sample the next tokens from logits [n, V] and make them the next step's input."""
        tokens = self.sampler.sample(logits)
        if self.sampler.metadata(len(logits)).idle:  # beam search chooses its own tokens
            return StepOutput(logits, tokens, torch.zeros_like(tokens, dtype=logits.dtype))
        self.next_input_ids[: len(tokens), 0] = tokens
        return StepOutput(logits, tokens, token_logprobs(logits, tokens))

    def verify_drafts(self, drafts: Tensor, counts: Tensor, longest: int, source_len: int) -> Tensor:
        """Return the logits [n, k + 1, V] of the first n slots, before their first draft [n, k] and after each."""
        ids = torch.cat([self.next_input_ids[: len(drafts)], drafts], 1)
        view = self.cache.narrow(slice(0, len(drafts)), longest, source_len)
        return self._forward(ids, view, lengths=counts + 1)

    def _row(self, ids: list[int]) -> Tensor:
        return torch.tensor([ids], device=self.next_input_ids.device)

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
