"""Prefill: several prompts in one forward pass, where that is faster than one after the other."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from glasshouse.generation.engine.cuda_graphs import Graphs, bucket, copy_to_device
from glasshouse.generation.engine.step import PrefillChunk
from glasshouse.layers.cache import Cache, MixedBatch, PackedPrefill

# Tokens that take as long as loading the weights, which every pass does: so many may be padding to save a pass.
PASS_TOKENS, PASS_TOKENS_CUDA = 16, 256
# A batch has too many shapes for CUDA graphs, and its launches take as long as LAUNCH_TOKENS. Fewer end sooner with a
# graph for each prompt, which takes as long as GRAPH_TOKENS at least. Both are estimates, of a 1B model on an H200.
LAUNCH_TOKENS, GRAPH_TOKENS = 2048, 400

FOR_ANY_SHAPE = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
_choosing = threading.RLock()  # the choice of kernels is torch's, for all threads: two would restore each other's
Forward = Callable[..., Tensor]  # that of the model runner


@contextmanager
def for_any_shape(device: torch.device) -> Iterator[None]:
    """Attend without cuDNN, which torch prefers on a GPU: for a new shape its plan takes longer than the pass."""
    if device.type == "cuda":
        with _choosing, sdpa_kernel(FOR_ANY_SHAPE):
            yield
    else:
        yield


class NewPrompt(NamedTuple):
    """The first tokens of a prompt, and the slot that they go to."""

    slot: int
    ids: list[int]


class Prefill:
    """Writes the keys and values of prompts to their slots."""

    def __init__(self, cache: Cache, graphs: Graphs | None) -> None:
        self._cache, self._graphs = cache, graphs
        self._no_logits = cache.lengths[:0]
        self._graph_inputs: dict[int, tuple[Tensor, Tensor]] = {}  # by width

    def run(self, forward: Forward, chunks: Sequence[PrefillChunk], *, eager: bool = False) -> None:
        """Prefill chunks in few passes: new prompts of similar lengths in one, chunks that continue one in another.

        The latter need a model that supports mixed prefill. Passes with hooks are `eager`: no CUDA graphs.
        """
        new = [NewPrompt(chunk.seq.slot, chunk.ids) for chunk in chunks if chunk.start == 0]
        self._run_new(forward, new, None if eager else self._graphs)
        if continued := [chunk for chunk in chunks if chunk.start > 0]:
            tokens = [
                (token, chunk.seq.slot, position)
                for chunk in continued
                for position, token in enumerate(chunk.ids, chunk.start)
            ]
            ids, slots, positions = copy_to_device(tokens, self._cache.lengths.device).T.contiguous()
            forward(ids[None], MixedBatch(self._cache, slots, positions), logits_to_keep=self._no_logits)

    def _run_new(self, forward: Forward, prompts: Sequence[NewPrompt], graphs: Graphs | None) -> None:
        for group in self.group(prompts):
            tokens = len(group) * max(GRAPH_TOKENS, len(group[0].ids))
            if graphs is not None and (len(group) == 1 or tokens < LAUNCH_TOKENS):
                for prompt in group:
                    self.run_alone(forward, prompt)
            else:
                self._run_batch(forward, group)

    def group(self, prompts: Sequence[NewPrompt], max_tokens: float = math.inf) -> list[list[NewPrompt]]:
        """Group prompts of similar lengths, the longest first; a group of several has at most `max_tokens`."""
        return group_by_length(prompts, max_padding(self._cache.lengths.device), max_tokens)

    def run_alone(self, forward: Forward, prompt: NewPrompt, *, eager: bool = False) -> None:
        """Prefill one prompt; `eager` where its pass is read, as a CUDA graph's is not."""
        if self._graphs is None or eager:
            self._run_batch(forward, [prompt])
        else:
            self._run_graph(forward, self._graphs, prompt)

    def _run_batch(self, forward: Forward, prompts: Sequence[NewPrompt]) -> None:
        ids, lengths, slots = self.stack(prompts)
        with for_any_shape(ids.device):
            forward(ids, PackedPrefill(self._cache, slots), lengths=lengths, logits_to_keep=self._no_logits)

    def stack(self, prompts: Sequence[NewPrompt]) -> tuple[Tensor, Tensor | None, Tensor]:
        """Return ids [B, S], lengths [B] if any is padded, and slots [B, 1] of prompts, the longest first."""
        width, device = len(prompts[0].ids), self._cache.lengths.device
        slots = copy_to_device([[prompt.slot] for prompt in prompts], device)
        ids = copy_to_device([prompt.ids + [0] * (width - len(prompt.ids)) for prompt in prompts], device)
        lengths = None
        if any(len(prompt.ids) < width for prompt in prompts):
            lengths = copy_to_device([len(prompt.ids) for prompt in prompts], device)
        return ids, lengths, slots

    def _run_graph(self, forward: Forward, graphs: Graphs, prompt: NewPrompt) -> None:
        slot, ids = prompt
        width = bucket(len(ids))
        if width not in self._graph_inputs:
            zeros = self._cache.lengths.new_zeros
            self._graph_inputs[width] = zeros(2, width), zeros(1)
        inputs, length = self._graph_inputs[width]
        inputs.copy_(copy_to_device([ids + [0] * (width - len(ids)), [slot] * width], inputs.device))
        length.fill_(len(ids))
        view = PackedPrefill(self._cache, inputs[1:])
        graphs.run(
            ("prefill", width),
            lambda: (forward(inputs[:1], view, lengths=length, logits_to_keep=self._no_logits),),
        )


def max_padding(device: torch.device) -> int:
    """Return how many tokens of padding take less time than a pass of their own."""
    return PASS_TOKENS_CUDA if device.type == "cuda" else PASS_TOKENS


def group_by_length(
    prompts: Sequence[NewPrompt], max_padding: int, max_tokens: float = math.inf
) -> list[list[NewPrompt]]:
    """Group prompts by length, the longest first in each group, which is padded by at most `max_padding` tokens.

    With padding, a group of several prompts has at most `max_tokens` tokens.

    >>> prompts = [NewPrompt(slot, [0] * length) for slot, length in enumerate((3, 90, 5, 4))]
    >>> [[prompt.slot for prompt in group] for group in group_by_length(prompts, max_padding=3)]
    [[1], [2, 3, 0]]
    >>> [[prompt.slot for prompt in group] for group in group_by_length(prompts, max_padding=3, max_tokens=14)]
    [[1], [2, 3], [0]]
    """
    groups: list[list[NewPrompt]] = []
    left = 0
    for prompt in sorted(prompts, key=lambda prompt: -len(prompt.ids)):
        width = len(groups[-1][0].ids) if groups else 0
        padding = width - len(prompt.ids)
        if groups and padding <= left and (len(groups[-1]) + 1) * width <= max_tokens:
            groups[-1].append(prompt)
            left -= padding
        else:
            groups.append([prompt])
            left = max_padding
    return groups
