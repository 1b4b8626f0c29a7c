"""Probes: figures of what goes on inside a model while it learns, always of the same few texts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from glasshouse.config import JsonDict
from glasshouse.data import Batch, Dataset
from glasshouse.errors import InputError
from glasshouse.evaluation.eval_loop import autocast
from glasshouse.inspection.geometry import residual_norms
from glasshouse.inspection.head_scoring import head_scores, repeated_tokens
from glasshouse.inspection.logit_lens import lens
from glasshouse.inspection.stack_input import make_stack_input
from glasshouse.models import Decoder, Model
from glasshouse.models.heads import LMHead
from glasshouse.training.run import PROBE_NAMES

ROWS, LONGEST = 4, 126  # texts, and tokens of each: less than what a GPU would compile a kernel for
DIGITS = 6


class Probes:
    """Looks into a model: at some texts it never learns from, and at random tokens said twice.

    "entropy" is how widely each head looks, in nats, and "induction" and "previous_token" how much weight it puts on what
    followed the same token before, and on the token just before, [layer][head]. "resid_norms" is the mean length of the
    stream's vectors and "logit_lens" the loss of what is read off them, embedded and after each layer, [layer + 1].

    >>> import glasshouse as gh
    >>> model = gh.build(gh.preset("tiny-decoder"))
    >>> ids = torch.tensor([[1, 2, 3, 4]])
    >>> figures = Probes(model, Batch(ids, targets=ids + 1, loss_mask=ids > 0)).take(model)
    >>> {name: len(values) for name, values in figures.items()}
    {'entropy': 2, 'induction': 2, 'previous_token': 2, 'resid_norms': 3, 'logit_lens': 3}
    """

    def __init__(
        self,
        model: Model,
        texts: Batch,
        *,
        names: Sequence[str] | None = None,  # None: all that fit the model
        length: int = LONGEST,  # that the model reads at most
        compute: torch.dtype = torch.float32,
    ) -> None:
        unfit = _unfit(model)
        for name in names or ():
            if name in unfit:
                raise InputError(f"train.probes names {name!r}, but {unfit[name]}; leave it out.")
        self.names = tuple(name for name in PROBE_NAMES if name not in unfit) if names is None else tuple(names)
        self.compute = compute
        self.device = model.token_embedding.table.weight.device
        self.texts = texts.to(self.device)
        length = min(length, LONGEST)
        # A row of odd length ends one token early.
        self.twice = repeated_tokens(model.spec.vocab_size, -(-length // 2), ROWS)[:, :length].to(self.device)

    def take(self, model: Model) -> JsonDict:
        """Return the figures by name, as JSON has them: of six digits, and None where a text says nothing."""
        batch, found = self.texts, {}
        if batch.source is None:
            inputs: tuple[Tensor, ...] = (batch.ids,)
            call: JsonDict = {"documents": batch.documents, "lengths": batch.lengths}
        else:
            inputs = (batch.source, batch.ids)
            call = {"lengths": batch.source_lengths, "target_lengths": batch.lengths}
        with autocast(self.device, self.compute):
            if "entropy" in self.names:
                found["entropy"] = head_scores(model, *inputs, **call).entropy
            if {"induction", "previous_token"} & set(self.names):
                scores = head_scores(model, self.twice)
                found |= {"induction": scores.induction, "previous_token": scores.previous}
            if "resid_norms" in self.names:
                real = make_stack_input(model, inputs, call).real
                found["resid_norms"] = residual_norms(model, *inputs, **call)[:, real].mean(1)
            if "logit_lens" in self.names:
                read = lens(model, *inputs, targets=batch.targets, top_k=1, **call)
                found["logit_lens"] = read.loss[:, batch.loss_mask].mean(1)
        return {name: _rounded(found[name].tolist()) for name in self.names}


def first_texts(held: Dataset) -> Batch:
    """Return the first of the samples held out, and of long ones the beginning."""
    batch = held.batch(range(min(ROWS, len(held))))
    given = {name: tensor for name, tensor in vars(batch).items() if tensor is not None}
    rows = {name: tensor[:, :LONGEST] for name, tensor in given.items() if tensor.dim() == 2}
    lengths = {name: tensor.clamp(max=LONGEST) for name, tensor in given.items() if name.endswith("lengths")}
    return replace(batch, **rows, **lengths)


def _unfit(model: Model) -> dict[str, str]:
    """Return the probes that make no sense for a model, and why."""
    unfit: dict[str, str] = {}
    if not isinstance(model, Decoder):
        why = f"that is of decoders, and the model is of kind {model.spec.kind}"
        unfit |= {"induction": why, "previous_token": why}
    if not isinstance(model.head, LMHead):
        unfit["logit_lens"] = f"that is of heads with a vocabulary, and the model's is {model.spec.head.kind}"
    return unfit


def _rounded(value: Any) -> Any:  # noqa: ANN401 - numbers in lists, in lists
    if isinstance(value, list):
        return [_rounded(one) for one in value]
    return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None
