"""Validation of models and sampling parameters before anything is computed."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from glasshouse import spec
from glasshouse.config import did_you_mean
from glasshouse.errors import InputError
from glasshouse.generation.sampling_params import SamplingParams
from glasshouse.inspection.hooks import hook_manager_of
from glasshouse.models import Decoder, Model, Seq2Seq
from glasshouse.models.generation_config import TokenRules
from glasshouse.models.prompt import check_ids
from glasshouse.text import Tokenizer

HOOKED = ("record", "probes", "rules", "edits", "lens", "attended")  # parameters that hook the passes of a request


def check_model(model: Model) -> Decoder | Seq2Seq:
    """Return a model that can generate; raise for another, or one with edits that depend on positions."""
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
            f"the edit of {edited} depends on rows, or on positions in a way that changes at each step of "
            "generation; edit whole sites, heads or dimensions, or positions such as [position=3:5] or "
            "[position=new]."
        )
    return model


def check_compile(compile_: bool, *, recorded: bool) -> bool:
    """Return whether an engine compiles its decode steps; raise if it also records.

    >>> check_compile(True, recorded=False)
    True
    """
    if compile_ not in (True, False):
        raise InputError(f"compile is {compile_!r}, but it must be True or False.")
    if compile_ and recorded:
        raise InputError("record and compile were both given; compiled code cannot be recorded; leave one out.")
    return compile_


def check_option_names(
    options: SamplingParams,
    tok: Tokenizer | None,
    vocab_size: int,
    vectors: Collection[str],
    probes: Collection[str],
) -> None:
    """Raise for stop strings without a tokenizer, ids outside the vocabulary, and names that are not registered."""
    if options.stop and tok is None:
        raise InputError(f"stop is {options.stop!r}, but there is no tokenizer; give stop_token_ids instead.")
    for kind, names, known in (("steering vector", options.vectors, vectors), ("probe", options.scored, probes)):
        if unknown := next((name for name in names if name not in known), None):
            advice = did_you_mean(unknown, known) if known else "none is registered."
            raise InputError(f"there is no {kind} {unknown!r}; {advice}")
    for name in ("logit_bias", "stop_token_ids"):
        if (largest := max(getattr(options, name), default=0)) >= vocab_size:
            raise InputError(f"{name} names id {largest}, but ids go to vocab_size - 1 = {vocab_size - 1}.")


def check_allowed(options: SamplingParams, end_ids: Collection[int], vocab_size: int) -> None:
    """Raise for settings that forbid every token."""
    forbidden = options.forbidden_ids
    names = "logit_bias is -inf for"
    if options.min_new_tokens > 0 and len(forbidden) < vocab_size:
        forbidden |= set(end_ids)
        names = "logit_bias and min_new_tokens forbid"
    if len(forbidden) >= vocab_size:
        raise InputError(f"{names} all {vocab_size} ids, so no token can be generated; allow at least one.")


def check_engine_options(options: SamplingParams, n_best: int, slots: int, *, recorded: bool, drafts: bool) -> None:
    """Raise for parameters that an engine with `slots` slots cannot run, recorded or with a speculator."""
    if options.beams > slots:
        raise InputError(f"beams is {options.beams}, but the engine has {slots} slots; make more.")
    if options.beams > 1 and recorded:
        raise InputError(f"beams is {options.beams}, but beam search cannot be recorded; leave one of them out.")
    for name in ("top_logprobs", "candidates", *HOOKED):
        if getattr(options, name) and drafts:
            raise InputError(f"{name} and speculator were both given; drafts take none; leave one out.")
    if options.constraint is not None and drafts:
        raise InputError("constraint and speculator were both given; drafts are not constrained; leave one out.")
    check_n_best(n_best, options.beams)


def check_speculator(drafts: bool, *, recorded: bool, batch_invariant: bool) -> None:
    """Raise for a speculator together with settings that do not support draft tokens."""
    if drafts and recorded:
        raise InputError("record and speculator were both given; drafts cannot be recorded; leave one out.")
    if drafts and batch_invariant:
        raise InputError("batch_invariant and speculator were both given; drafts vary a batch; leave one out.")


def check_n_best(n_best: int, beams: int) -> None:
    """Raise for more results than a search of `beams` beams has."""
    if not 1 <= n_best <= beams:
        raise InputError(f"n_best is {n_best}, but a search of {beams} beams returns 1 to {beams}.")


def split_source(
    ids: list[int],
    s: spec.Spec,
    rules: TokenRules,
    target_prefix: Sequence[int],
    *,
    max_len: int,
    source_len: int,
) -> tuple[list[int], list[int]]:
    """Return what the decoder continues, and the source of an encoder-decoder; raise where one is too long."""
    source: list[int] = []
    if isinstance(s, spec.Seq2SeqSpec):
        if len(ids) > source_len:
            raise InputError(f"the source has {len(ids)} tokens, but source_len is {source_len}; shorten it.")
        assert s.start_id is not None
        prefix = check_ids(target_prefix, s.vocab_size)
        ids, source = [s.start_id, *rules.forced_prefix, *prefix], ids
    elif target_prefix:
        raise InputError(
            f"target_prefix has {len(target_prefix)} tokens, but the model has no encoder; use the prompt."
        )
    if len(ids) > max_len:
        raise InputError(f"the prompt has {len(ids)} tokens, but max_len is {max_len}; shorten it.")
    return ids, source
