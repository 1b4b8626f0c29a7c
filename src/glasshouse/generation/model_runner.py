"""The passes of an engine: the model, arranged for the machine, over the slots of a cache; on a GPU as graphs."""

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
from glasshouse.layers.cache import Cache
from glasshouse.models import Decoder, Seq2Seq

MIXED_PREFILL_TOKENS = (
    128  # tokens of a prompt that are read along with a step: so few more cost a large GPU next to nothing
)


@dataclass
class MixedPrefill:
    """Tokens of a prompt that are read along with a step."""

    slot: int
    start: int  # their first position
    ids: list[int]


class StepOutput(NamedTuple):
    """What a step gave the first n rows."""

    logits: Tensor  # [n, V]
    tokens: Tensor  # [n]
    logprobs: Tensor  # [n]


class ModelRunner:
    """Reads tokens into the slots of a cache, and lets the first rows write."""

    def __init__(
        self,
        model: Decoder | Seq2Seq,
        cache: Cache,
        sampler: Sampler,
        *,
        weights: Weights,
        compile: bool,  # noqa: A002 (torch's word)
        recording: bool,  # someone records: no graphs, in which no module is called, and no riders
    ) -> None:
        slots, device = len(cache.lengths), cache.lengths.device
        self.cache, self.sampler = cache, sampler
        self.next_input_ids = torch.zeros(slots, 1, dtype=torch.long, device=device)  # what each row reads next
        self.model = prepare_for_inference(model, weights, slots)
        self._compiled = compile_decode(self.model, slots) if compile else None
        mixes = isinstance(model, Decoder) and model.stack.supports_mixed_prefill(model.token_embedding.table.weight)
        self.supports_mixed_prefill = mixes and not recording  # takes riders
        self._in_use = torch.zeros(slots, dtype=torch.long, device=device)  # 1 for rows that write
        self._numbers = torch.arange(slots, device=device)
        self._seats = self.next_input_ids.new_zeros(
            4, MIXED_PREFILL_TOKENS
        )  # of riders: ids, slots, positions, and 1 for those taken
        self._given: dict[int, tuple[Tensor, Tensor]] = {}  # what the graphs of prompts read, by their width
        by_graph = device.type == "cuda" and not recording
        self._graphs = Graphs(lambda: [cache.lengths, self.next_input_ids, *sampler.state]) if by_graph else None

    def encode_source(self, source: list[int], slot: int) -> None:
        """Let a slot remember an encoder's source."""
        assert isinstance(self.model, Seq2Seq)
        self.model.encode_source(self._row(source), self.cache.narrow(slice(slot, slot + 1)))

    def prefill(self, ids: list[int], slot: int, start: int) -> None:
        """Read tokens of a prompt, which stand from `start` on, into a slot."""
        if start > 0 or isinstance(self.model, Seq2Seq):  # they see what is there already, or a source
            view = self.cache.narrow(slice(slot, slot + 1), start + len(ids))
            self._forward(self._row(ids), view, logits_to_keep=self._in_use[:0])
        elif self._graphs is None:
            view = self.cache.for_packed_prefill(torch.full((len(ids),), slot, device=self.next_input_ids.device))
            self._forward(self._row(ids), view, logits_to_keep=self._in_use[:0])
        else:
            self._read_by_graph(ids, slot)

    def _read_by_graph(self, ids: list[int], slot: int) -> None:
        width = bucket(len(ids))
        if width not in self._given:
            self._given[width] = self.next_input_ids.new_zeros(2, width), self.next_input_ids.new_zeros(1)
        given, length = self._given[width]
        given.copy_(torch.tensor([ids + [0] * (width - len(ids)), [slot] * width]).pin_memory(), non_blocking=True)
        length.fill_(len(ids))
        view = self.cache.for_packed_prefill(given[1])
        self._run(("prefill", width), lambda: (self._forward(given[:1], view, lengths=length, logits_to_keep=self._in_use[:0]),))

    def decode(self, n: int, longest: int, source_len: int, riders: MixedPrefill | None = None) -> StepOutput:
        """Give the first n rows a token each and read what rides along.

        With the new tokens, no row has more than `longest`, and no source more than `source_len`.
        """
        if riders is None and self._graphs is None:
            view = self.cache.narrow(slice(0, n), longest, source_len)
            return self._choose(self._forward(self.next_input_ids[:n], view, step=True)[:, 0])
        width = len(self.next_input_ids) if self._compiled is not None else min(bucket(n), len(self.next_input_ids))
        self._in_use[:n], self._in_use[n:] = 1, 0
        if riders is not None:
            self._stage_mixed_prefill(riders)
        what, work = ("decode", self._decode_batch) if riders is None else ("mixed", self._decode_mixed)
        key = (what, width, self.sampler.metadata(width))
        return StepOutput(*(one[:n] for one in self._run(key, lambda: work(width))))

    def _decode_batch(self, width: int) -> StepOutput:
        view, in_use = self.cache.narrow(slice(0, width)), self._in_use[:width]
        return self._choose(self._forward(self.next_input_ids[:width], view, lengths=in_use, step=True)[:, 0])

    def _decode_mixed(self, width: int) -> StepOutput:
        """Let tokens of all rows, and those that ride, stand in one row of a call."""
        ids, slots, positions, taken = self._seats
        view = self.cache.for_mixed_batch(
            torch.cat([self._numbers[:width], slots]), torch.cat([self.cache.lengths[:width], positions])
        )
        real = torch.cat([self._in_use[:width], taken]) > 0
        ids = torch.cat([self.next_input_ids[:width, 0], ids])[None]
        return self._choose(self._forward(ids, view, mask=real[None], logits_to_keep=self._numbers[:width], step=True)[0])

    def _stage_mixed_prefill(self, riders: MixedPrefill) -> None:
        """Put riders where a graph finds them."""
        n = len(riders.ids)
        rest = [0] * (MIXED_PREFILL_TOKENS - n)
        positions = range(riders.start, riders.start + n)
        seats = torch.tensor([riders.ids + rest, [riders.slot] * n + rest, [*positions, *rest], [1] * n + rest])
        self._seats.copy_(seats.pin_memory() if self._seats.is_cuda else seats, non_blocking=True)

    def _choose(self, logits: Tensor) -> StepOutput:
        """Choose what follows by logits [n, V], and let the next step read it."""
        tokens = self.sampler.sample(logits)
        if self.sampler.metadata(len(logits)).idle:  # searches choose for themselves
            return StepOutput(logits, tokens, torch.zeros_like(tokens, dtype=logits.dtype))
        self.next_input_ids[: len(tokens), 0] = tokens
        return StepOutput(logits, tokens, token_logprobs(logits, tokens))

    def verify_drafts(self, drafts: Tensor, counts: Tensor, longest: int, source_len: int) -> Tensor:
        """Return the logits [n, k + 1, V] of the first rows before their first draft [n, k] and after each."""
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
        cache: Cache,
        *,
        lengths: Tensor | None = None,
        mask: Tensor | None = None,
        logits_to_keep: Tensor | None = None,
        step: bool = False,  # prompts come in too many lengths to compile
    ) -> Tensor:
        run: Callable[..., Tensor] = self._compiled if step and self._compiled is not None else self.model
        if isinstance(self.model, Seq2Seq):
            return run(None, ids, target_lengths=lengths, cache=cache, logits_to_keep=logits_to_keep)
        return run(ids, lengths=lengths, mask=mask, cache=cache, logits_to_keep=logits_to_keep)
