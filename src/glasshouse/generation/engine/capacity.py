"""The size of an engine: the lengths that its prompts need, and the slots and beams that fit in memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from glasshouse import device as machine
from glasshouse.errors import InputError
from glasshouse.generation.engine.inference_model import Weights
from glasshouse.generation.sampling_params import SamplingParams
from glasshouse.models import Decoder, Seq2Seq
from glasshouse.models.generation_config import read_token_rules

MAX_SLOTS = 64  # default maximum batch size
# Prompt tokens per step: so many that a pass is bound by its FLOPs, so few that decoding does not wait long.
PREFILL_CHUNK, PREFILL_CHUNK_CUDA = 256, 4096
WORTH_A_COPY = 100  # steps; in fewer, a CPU does not regain the time of copying the weights
MEMORY_SHARE = 4  # the cache takes at most 1 / MEMORY_SHARE of the memory
LOGITS_BYTES = 16  # per beam and id: float32 logits, log-probabilities, and processed ones
CANDIDATE_BYTES = 256  # per candidate, as Python objects
PAIR_BYTES = 16  # per pair of beams: length of their common prefix, before a step and after it
CPU = torch.device("cpu")


def required_lengths(
    model: Decoder | Seq2Seq, prompt_ids: Sequence[Sequence[int]], options: SamplingParams
) -> tuple[int, int | None]:
    """Return the sequence length and the source length that the cache must have."""
    longest = max(map(len, prompt_ids))
    limit = model.spec.position_limit
    if isinstance(model, Seq2Seq):
        target = 1 + len(read_token_rules(model).forced_prefix) + options.max_new_tokens
        return target if limit is None else min(limit, target), longest
    if limit is not None and longest > limit:
        raise InputError(f"a prompt has {longest} tokens, but max_len is {limit}; shorten it.")
    length = longest + options.max_new_tokens
    return length if limit is None else min(limit, length), None


def choose_weights(steps: int) -> Weights:
    """Return whether an engine should copy the weights for a number of steps.

    >>> choose_weights(8), choose_weights(256)
    ('own', 'copy')
    """
    return "copy" if steps >= WORTH_A_COPY else "own"


def choose_prefill_chunk(model: Decoder | Seq2Seq) -> int:
    """Return how many prompt tokens an engine prefills in one step."""
    return PREFILL_CHUNK_CUDA if model.token_embedding.table.weight.is_cuda else PREFILL_CHUNK


def choose_slots(model: Decoder | Seq2Seq, max_len: int, source_len: int | None, n_sequences: int) -> int:
    """Return the number of slots: `n_sequences`, within MAX_SLOTS and the memory."""
    device = model.token_embedding.table.weight.device
    each = cache_bytes(model, 1, max_len, source_len or 0)
    return max(1, min(n_sequences, MAX_SLOTS, machine.memory_bytes(device) // MEMORY_SHARE // each))


def cache_bytes(model: Decoder | Seq2Seq, slots: int, max_len: int, source_len: int) -> int:
    """Return an upper bound on the size of the KV cache in bytes.

    >>> from glasshouse.models import build
    >>> from glasshouse.spec import preset
    >>> cache_bytes(build(preset("gpt2"), device="meta"), slots=1, max_len=1024, source_len=0) / 2**20
    72.0703125
    """
    if isinstance(model, Seq2Seq):
        own, cross = model.decoder.kv_shapes(), model.decoder.kv_shapes("cross")
    else:
        own, cross = model.stack.kv_shapes(), []
    keys = sum(one.n_kv_heads * one.d_head for one in own) * (max_len + 1)  # numbers per slot
    keys += sum(one.n_kv_heads * one.d_head for one in cross) * source_len
    return slots * 2 * keys * model.token_embedding.table.weight.element_size()


def check_memory(model: Decoder | Seq2Seq, slots: int, max_len: int, source_len: int, copied: int) -> None:
    """Raise if the slots do not fit in memory; `copied` bytes go to the inference copy of the weights."""
    weight = model.token_embedding.table.weight
    cached = cache_bytes(model, slots, max_len, source_len)
    weights = sum(one.numel() * one.element_size() for one in model.parameters())
    available = machine.memory_bytes(weight.device)
    if cached + weights + copied > available:
        raise InputError(
            f"{slots} slots of {max_len} tokens need {cached / 2**30:,.1f} GiB in addition to the model's "
            f"{weights / 2**30:,.1f} and {copied / 2**30:,.1f} for a copy of it, but the memory of "
            f"{weight.device.type!r} is {available / 2**30:,.1f} GiB; use fewer slots or a smaller max_len."
        )


def check_beams(model: Decoder | Seq2Seq, beams: int, max_len: int, source_len: int = 0) -> None:
    """Raise for more beams than the vocabulary has ids, or than fit in memory."""
    if beams == 1:  # as for most requests, which must not count all parameters
        return
    s, weight = model.spec, model.token_embedding.table.weight
    weights = sum(one.numel() * one.element_size() for one in model.parameters())

    def fits(count: int) -> bool:
        if count > s.vocab_size:
            return False
        cached = cache_bytes(model, count, max_len, source_len)
        on_device = 2 * weights + cached + LOGITS_BYTES * count * s.vocab_size
        on_host = CANDIDATE_BYTES * count * min(2 * count, s.vocab_size) + PAIR_BYTES * count**2
        if weight.is_cpu:
            return on_device + on_host <= machine.memory_bytes(weight.device)
        return on_device <= machine.memory_bytes(weight.device) and on_host <= machine.memory_bytes(CPU)

    if fits(beams):
        return
    most, too_many = 1, beams
    while too_many - most > 1:
        middle = (most + too_many) // 2
        most, too_many = (middle, too_many) if fits(middle) else (most, middle)
    raise InputError(
        f"beams is {beams}, but at most {most} are possible here: there are {s.vocab_size} ids, and each beam needs "
        f"memory for {max_len} keys and values, {s.vocab_size} logits and {2 * most} candidates."
    )
