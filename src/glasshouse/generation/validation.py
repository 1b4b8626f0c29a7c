"""Validation of models, sizes and prompts before anything is computed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from numbers import Integral

import torch

from glasshouse import device as machine
from glasshouse import spec
from glasshouse.errors import InputError
from glasshouse.generation.sampling import MAX_FLOAT32
from glasshouse.generation.sampling_params import SamplingParams
from glasshouse.inspection.hooks import hook_manager_of
from glasshouse.models import Decoder, Model, Seq2Seq
from glasshouse.text import Tokenizer

LOGITS_BYTES = 16  # per beam and id: float32 logits, log-probabilities, and processed ones
CANDIDATE_BYTES = 256  # per candidate, as Python objects
PAIR_BYTES = 16  # per pair of beams: length of their common prefix, before a step and after it
CPU = torch.device("cpu")


def check_model(model: Model) -> None:
    """Raise for a model that cannot generate, or has edits that depend on positions."""
    if not isinstance(model, Decoder | Seq2Seq):
        raise InputError(
            f"the model is of type {type(model).__name__}, which does not generate; give a decoder or an "
            "encoder-decoder."
        )
    if not isinstance(model.spec.head, spec.NextToken):
        raise InputError(f"the model's head is {type(model.spec.head).__name__}, but generation needs NextToken.")
    if isinstance(model, Seq2Seq) and model.spec.start_id is None:
        raise InputError("the spec has no start_id, which starts the target; set it.")
    if edited := next(
        (hook.selection.name for hook in hook_manager_of(model).hooks if hook.position_dependent), None
    ):
        raise InputError(
            f"the edit of {edited} depends on rows or positions, which change at each step of generation; edit "
            "whole sites, heads or dimensions."
        )


def check_count(name: str, value: int) -> int:
    """Return an integer; raise if it is below 1."""
    if not isinstance(value, Integral) or isinstance(value, bool) or int(value) < 1:
        raise InputError(f"{name} is {value!r}, but it must be a whole number of at least 1.")
    return int(value)


def check_length(s: spec.Spec, length: int | None, name: str = "max_len", owner: str = "the model") -> int:
    """Return the maximum sequence length, which only a table of learned positions limits."""
    if length is None:
        return s.max_len
    if s.position_limit is not None and check_count(name, length) > s.position_limit:
        raise InputError(f"{name} is {length}, but {owner} has positions for {s.position_limit}; reduce it.")
    return check_count(name, length)


def cache_bytes(s: spec.Spec, slots: int, max_len: int, source_len: int, element_size: int) -> int:
    """Return an upper bound on the size of the KV cache in bytes.

    >>> from glasshouse.spec import preset
    >>> cache_bytes(preset("gpt2"), slots=1, max_len=1024, source_len=0, element_size=4) / 2**20
    72.0703125
    """
    slot_bytes = 2 * s.n_layers * s.n_kv_heads * s.d_head * element_size
    return slots * (max_len + 1 + source_len) * slot_bytes


def check_memory(model: Model, slots: int, max_len: int, source_len: int, copied: int) -> None:
    """Raise if the slots do not fit in memory; `copied` bytes go to the inference copy of the weights."""
    weight = model.token_embedding.table.weight
    cached = cache_bytes(model.spec, slots, max_len, source_len, weight.element_size())
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
    s, weight = model.spec, model.token_embedding.table.weight
    weights = sum(one.numel() * one.element_size() for one in model.parameters())

    def fits(count: int) -> bool:
        if count > s.vocab_size:
            return False
        cached = cache_bytes(s, count, max_len, source_len, weight.element_size())
        on_device = 2 * weights + cached + LOGITS_BYTES * count * s.vocab_size
        on_host = CANDIDATE_BYTES * count * min(2 * count, s.vocab_size) + PAIR_BYTES * count**2
        if weight.is_cpu:
            return on_device + on_host <= machine.memory_bytes(weight.device)
        return on_device <= machine.memory_bytes(weight.device) and on_host <= machine.memory_bytes(CPU)

    if beams == 1 or fits(beams):
        return
    most, too_many = 1, beams
    while too_many - most > 1:
        middle = (most + too_many) // 2
        most, too_many = (middle, too_many) if fits(middle) else (most, middle)
    raise InputError(
        f"beams is {beams}, but at most {most} are possible here: there are {s.vocab_size} ids, and each beam needs "
        f"memory for {max_len} keys and values, {s.vocab_size} logits and {2 * most} candidates."
    )


def check_option_ids(options: SamplingParams, vocab_size: int) -> None:
    """Raise for ids outside the vocabulary."""
    for name in ("logit_bias", "stop_token_ids"):
        if (largest := max(getattr(options, name), default=0)) >= vocab_size:
            raise InputError(f"{name} names id {largest}, but ids go to vocab_size - 1 = {vocab_size - 1}.")


def check_allowed(options: SamplingParams, end_ids: Iterable[int], vocab_size: int) -> None:
    """Raise for settings that forbid every token."""
    forbidden = {token for token, bias in options.logit_bias.items() if bias < -MAX_FLOAT32}
    names = "logit_bias is -inf for"
    if options.min_new_tokens > 0 and len(forbidden) < vocab_size:
        forbidden |= set(end_ids)
        names = "logit_bias and min_new_tokens forbid"
    if len(forbidden) >= vocab_size:
        raise InputError(f"{names} all {vocab_size} ids, so no token can be generated; allow at least one.")


def encode_prompt(prompt: str | bytes | Iterable[int], tok: Tokenizer | None, s: spec.Spec) -> list[int]:
    """Return the ids of a prompt; an empty one becomes the model's start token, if it has one."""
    if isinstance(prompt, str | bytes):
        if tok is None:
            raise InputError("the prompt is a text, but there is no tokenizer; give ids, or a tokenizer.")
        ids = tok.encode(prompt)
        if isinstance(s, spec.Seq2SeqSpec) and s.end_ids and not (ids and ids[-1] in s.end_ids):
            ids.append(s.end_ids[0])  # as in training
    else:
        ids = ids_of(prompt, s.vocab_size)
    if not ids and s.start_id is not None:
        ids = [s.start_id]
    if not ids:
        raise InputError("the prompt is empty, and the model has no start_id; give at least one token.")
    return ids


def ids_of(prompt: object, vocab_size: int) -> list[int]:
    """Return ids as a list of ints; raise for ids outside the vocabulary."""
    tolist = getattr(prompt, "tolist", None)  # a tensor or an array
    values = prompt if tolist is None else tolist()
    if not isinstance(values, Sequence):
        raise InputError(f"the prompt is a {type(prompt).__name__}, but it must be a text or a list of ids.")
    # The common case, plain ints, is checked without a Python loop.
    if values and set(map(type, values)) == {int} and min(values) >= 0 and max(values) < vocab_size:
        return list(values)
    for value in values:
        if not isinstance(value, Integral) or isinstance(value, bool) or not 0 <= int(value) < vocab_size:
            raise InputError(
                f"the prompt contains {value!r}, but ids are whole numbers from 0 to vocab_size - 1 = "
                f"{vocab_size - 1}."
            )
    return [int(value) for value in values]
