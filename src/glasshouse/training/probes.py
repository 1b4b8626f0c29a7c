"""Probes: metrics of activations and attention during training, always on the same few texts."""

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
from glasshouse.inspection.geometry import residual_norms
from glasshouse.inspection.head_scoring import head_scores, repeated_tokens
from glasshouse.inspection.logit_lens import lens
from glasshouse.inspection.stack_input import make_stack_input
from glasshouse.models import Decoder, Model
from glasshouse.models.heads import LMHead
from glasshouse.objectives.loss import autocast
from glasshouse.training.run import PROBE_NAMES

ROWS, LONGEST = 4, 126  # texts, and tokens of each: short enough that a GPU compiles no kernel for them
DIGITS = 6


class Probes:
    """Metrics of a model on some validation texts, and on repeated random tokens.

    "entropy" is the attention entropy of each head in nats, "induction" and "previous_token" its attention to the
    token after an earlier copy of the current one and to the previous token, [layer][head]. "resid_norms" is the mean
    norm of the residual stream and "logit_lens" the loss of the logit lens, after the embedding and each layer,
    [layer + 1].

    >>> import glasshouse as gh
    >>> model = gh.build(gh.preset("tiny-decoder"))
    >>> ids = torch.tensor([[1, 2, 3, 4]])
    >>> metrics = Probes(model, Batch(ids, targets=ids + 1, loss_mask=ids > 0)).take(model)
    >>> {name: len(values) for name, values in metrics.items()}
    {'entropy': 2, 'induction': 2, 'previous_token': 2, 'resid_norms': 3, 'logit_lens': 3}
    """

    def __init__(
        self,
        model: Model,
        texts: Batch,
        *,
        names: Sequence[str] | None = None,  # None: all that apply to the model
        length: int = LONGEST,  # sequence length, at most
        autocast_dtype: torch.dtype = torch.float32,
    ) -> None:
        unsupported = _unsupported(model)
        for name in names or ():
            if name in unsupported:
                raise InputError(f"train.probes has {name!r}, but {unsupported[name]}; leave it out.")
        self.names = tuple(name for name in PROBE_NAMES if name not in unsupported) if names is None else tuple(names)
        self.autocast_dtype = autocast_dtype
        self.device = model.token_embedding.table.weight.device
        self.texts = texts.to(self.device)
        length = min(length, LONGEST)
        # An odd length ends one token early.
        self.repeated = repeated_tokens(model.spec.vocab_size, -(-length // 2), ROWS)[:, :length].to(self.device)

    def take(self, model: Model) -> JsonDict:
        """Return the metrics by name, as JSON values: six digits, and None where not finite."""
        batch, found = self.texts, {}
        if batch.source is None:
            inputs: tuple[Tensor, ...] = (batch.ids,)
            call: JsonDict = {"documents": batch.documents, "lengths": batch.lengths}
        else:
            inputs = (batch.source, batch.ids)
            call = {"lengths": batch.source_lengths, "target_lengths": batch.lengths}
        with autocast(self.device, self.autocast_dtype):
            if "entropy" in self.names:
                found["entropy"] = head_scores(model, *inputs, **call).entropy
            if {"induction", "previous_token"} & set(self.names):
                scores = head_scores(model, self.repeated)
                found |= {"induction": scores.induction, "previous_token": scores.previous}
            if "resid_norms" in self.names:
                real = make_stack_input(model, inputs, call).real
                found["resid_norms"] = residual_norms(model, *inputs, **call)[:, real].mean(1)
            if "logit_lens" in self.names:
                output = lens(model, *inputs, targets=batch.targets, top_k=1, **call)
                found["logit_lens"] = output.loss[:, batch.loss_mask].mean(1)
        return {name: _rounded(found[name].tolist()) for name in self.names}


def first_texts(val_samples: Dataset) -> Batch:
    """Return the first validation samples, truncated to `LONGEST` tokens."""
    batch = val_samples.batch(range(min(ROWS, len(val_samples))))
    present = {name: tensor for name, tensor in vars(batch).items() if tensor is not None}
    rows = {name: tensor[:, :LONGEST] for name, tensor in present.items() if tensor.dim() == 2}
    lengths = {name: tensor.clamp(max=LONGEST) for name, tensor in present.items() if name.endswith("lengths")}
    return replace(batch, **rows, **lengths)


def _unsupported(model: Model) -> dict[str, str]:
    """Return the probes that do not apply to a model, and why."""
    unsupported: dict[str, str] = {}
    if not isinstance(model, Decoder):
        why = f"it needs a decoder, and the model is of kind {model.spec.kind}"
        unsupported |= {"induction": why, "previous_token": why}
    if not isinstance(model.head, LMHead):
        unsupported["logit_lens"] = f"it needs a language-model head, and the model's is {model.spec.head.kind}"
    return unsupported


def _rounded(value: Any) -> Any:  # noqa: ANN401 - numbers in lists, in lists
    if isinstance(value, list):
        return [_rounded(one) for one in value]
    return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None
