"""Which predictions a tool explains: where they are made, and of which token or label."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from glasshouse.config import did_you_mean
from glasshouse.errors import InputError
from glasshouse.inspection.inputs.call_arguments import CallArguments
from glasshouse.inspection.inputs.forward_pass import columns_of, layout_of, per_sequence, resolve_indices, token_id
from glasshouse.inspection.logit_lens import has_position_logits, label_names, n_logits, target_tokens
from glasshouse.inspection.sites import unwrap_compiled
from glasshouse.models import Model
from glasshouse.models.heads import Classifier, LMHead
from glasshouse.text import Tokenizer

Named = int | str | Tensor  # a token or label: one for the batch, or one per sequence [B]


class Targets(NamedTuple):
    """Some predictions of each sequence."""

    columns: Tensor | None  # [B, T] where they are made; None: one per sequence, by a head that pools
    chosen: Tensor  # [B, T] the predicted token or label; -1 for the top prediction
    incorrect: Tensor | None  # [B, T] the token whose logit is subtracted
    exists: Tensor  # [B, T] bool; False where a sequence has fewer targets than another


def choose_targets(
    model: Model,
    call: CallArguments,
    positions: Sequence[int] | None = None,
    token: Named | None = None,
    incorrect_token: Named | None = None,
    label: Named | None = None,
    tok: Tokenizer | None = None,
) -> Targets:
    """Return the predictions at some positions, by default of each next token, or with other heads at all of them.

    The target is the next token, in an encoder the token itself, unless it is named; of a classifier the top label.

    >>> import torch, glasshouse as gh
    >>> model = gh.build(gh.preset("tiny-decoder"))
    >>> call = CallArguments((torch.tensor([[5, 6, 7]]),), {})
    >>> choose_targets(model, call).chosen, choose_targets(model, call, [-1]).chosen
    (tensor([[6, 7]]), tensor([[-1]]))
    """
    ids, head = call.inputs[-1], unwrap_compiled(model.head)
    if not isinstance(head, LMHead | Classifier):
        raise InputError(f"the head is {model.spec.head.kind!r}, which has no logits; use a model whose head has.")
    named = _ids_of("token", token, model, ids, tok) if label is None else _ids_of("label", label, model, ids, None)
    incorrect = _ids_of("incorrect_token", incorrect_token, model, ids, tok)
    columns: Tensor | None
    if not has_position_logits(model):
        if positions is not None:
            raise InputError(
                f"positions was given, but the head {model.spec.head.kind!r} has one prediction per sequence; leave "
                "it out."
            )
        columns, chosen = None, torch.full_like(ids[:, :1], -1) if named is None else named[:, None]
        exists = torch.ones_like(chosen, dtype=torch.bool)
    else:
        layout = layout_of(model, ids, call.model_kwargs)
        known = target_tokens(model, ids, layout) if named is None else named[:, None].expand(ids.shape)
        if positions is None:
            real = torch.ones_like(ids, dtype=torch.bool) if layout.real is None else layout.real
            has_target = known >= 0 if named is None and isinstance(head, LMHead) else real
            columns = has_target.any(0).nonzero()[:, 0].expand(len(ids), -1)
            exists = has_target.gather(1, columns)
        else:
            resolve_indices(positions, ids.shape[1], "positions")
            columns = torch.tensor(positions, dtype=torch.long, device=ids.device).expand(len(ids), -1)
            columns = columns_of(columns, layout, "positions") if len(positions) else columns
            exists = torch.ones_like(columns, dtype=torch.bool)
        chosen = known.gather(1, columns)
    if not chosen.numel():
        raise InputError("there is no prediction to explain; give a text of two tokens or more, or positions.")
    return Targets(columns, chosen, None if incorrect is None else incorrect[:, None].expand_as(chosen), exists)


def _ids_of(name: str, given: Named | None, model: Model, ids: Tensor, tok: Tokenizer | None) -> Tensor | None:
    """Return a token or label that the caller named as an id for each sequence, [B]."""
    if given is None:
        return None
    kind, needed = (Classifier, "classification") if name == "label" else (LMHead, "language-model")
    if not isinstance(unwrap_compiled(model.head), kind):
        raise InputError(f"{name} was given, but the head is {model.spec.head.kind!r}; it needs a {needed} head.")
    if name != "label":
        given = token_id(given, name, tok)
    elif isinstance(given, str):
        names = label_names(model)
        if given not in names:
            raise InputError(f"label is {given!r}, which the model does not have; {did_you_mean(given, names)}")
        given = names.index(given)
    return per_sequence(given, name, ids, 0, n_logits(model))
