"""Default metrics of a model's output for patching and ablation: logit difference and cross-entropy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from glasshouse.errors import InputError
from glasshouse.inspection.inputs.call_arguments import CallArguments
from glasshouse.inspection.inputs.forward_pass import layout_of, next_tokens
from glasshouse.inspection.sites import unwrap_model
from glasshouse.models import Encoder
from glasshouse.models.heads import LMHead, NoHead, Pooler, last_token

Metric = Callable[[Tensor], Tensor | float]  # of a model's output

IGNORE_INDEX = -100  # the default ignore_index of cross_entropy


def scalar_metric(metric: Metric) -> Callable[[Tensor], Tensor]:
    """Return a metric checked to be a scalar, in float32 at least.

    >>> scalar_metric(lambda output: output.sum())(torch.ones(2, dtype=torch.bfloat16))
    tensor(2.)
    """
    return partial(_scalar, metric)


def _scalar(metric: Metric, output: Tensor) -> Tensor:
    value = torch.as_tensor(metric(output))
    if value.dim():
        raise InputError(f"the metric gave shape {list(value.shape)}, but it must be a scalar; take its mean.")
    return value.to(torch.promote_types(value.dtype, torch.float32))


def check_has_gradient(value: Tensor) -> Tensor:
    """Return the value of a metric, or raise InputError if no gradient leads to the output."""
    if not value.requires_grad:
        raise InputError(
            "the metric gave a value without a gradient, which estimates need; return a tensor computed from the "
            "output, without .item() or .detach()."
        )
    return value


def logit_diff_metrics(
    model: nn.Module, corrupted: CallArguments, clean: CallArguments, corrupted_output: Tensor, clean_output: Tensor
) -> tuple[Metric, Metric]:
    """Return the logit difference at the last token: the clean run's top prediction minus the corrupted run's.

    The first metric is for outputs on `corrupted`, the second for outputs on `clean`, which may have another length.

    >>> import glasshouse as gh
    >>> model = gh.build(gh.preset("tiny-decoder"))
    >>> corrupted, clean = torch.tensor([[[0.0, 3.0]]]), torch.tensor([[[5.0, 1.0]]])
    >>> prompt = CallArguments((torch.tensor([[1]]),), {})
    >>> on_corrupted, on_clean = logit_diff_metrics(model, prompt, prompt, corrupted, clean)
    >>> on_corrupted(corrupted), on_clean(clean)
    (tensor(-3.), tensor(4.))
    """
    _check_logits(model)
    last_corrupted, last_clean = _last_logits(model, *corrupted), _last_logits(model, *clean)
    wrong = last_corrupted(corrupted_output).argmax(-1, keepdim=True)
    right = last_clean(clean_output).argmax(-1, keepdim=True)
    if torch.equal(wrong, right):
        raise InputError(
            f"the top prediction is {int(wrong[0])} on both prompts, so there is no logit difference; give a metric "
            "or other prompts."
        )

    def logit_diff(last_logits: Callable[[Tensor], Tensor], output: Tensor) -> Tensor:
        return (last_logits(output).gather(1, right) - last_logits(output).gather(1, wrong)).mean()

    return partial(logit_diff, last_corrupted), partial(logit_diff, last_clean)


def _last_logits(
    model: nn.Module, inputs: tuple[Tensor, ...], model_kwargs: Mapping[str, Any]
) -> Callable[[Tensor], Tensor]:
    """Return a function that takes the logits at the last token of each sequence, [B, ...], from an output."""
    real = _real(model, inputs, model_kwargs)

    def last_logits(output: Tensor) -> Tensor:
        if output.dim() == 2:  # one prediction per sequence
            return output
        return output[:, -1] if real is None or "logits_to_keep" in model_kwargs else last_token(output, real)

    return last_logits


def keep_last_logit(model: nn.Module, *prompts: CallArguments) -> None:
    """Let prompts compute the last logits alone, where the model can and the last token of each sequence is there."""
    home = unwrap_model(model)
    able = isinstance(home.head, LMHead) and not isinstance(home, Encoder)
    if able and all(_real(model, *prompt) is None for prompt in prompts):
        for inputs, model_kwargs in prompts:
            model_kwargs.setdefault("logits_to_keep", torch.tensor([-1], device=inputs[-1].device))


def cross_entropy_metric(
    model: nn.Module, inputs: tuple[Tensor, ...], targets: Tensor | None, model_kwargs: Mapping[str, Any]
) -> Metric:
    """Return the mean cross-entropy of the targets, by default the next tokens."""
    _check_logits(model)
    labels = _next_tokens(model, inputs, model_kwargs) if targets is None else targets
    if not bool((labels != IGNORE_INDEX).any()):
        raise InputError("no token has a target; give a longer text, targets or a metric.")

    def cross_entropy(output: Tensor) -> Tensor:
        if output.shape[:-1] != labels.shape:
            raise InputError(
                f"targets has shape {list(labels.shape)}, but the logits have {list(output.shape[:-1])}; "
                "give one for each, -100 to ignore a position."
            )
        exact = output.to(torch.promote_types(output.dtype, torch.float32))
        return F.cross_entropy(exact.flatten(0, -2), labels.flatten().long(), ignore_index=IGNORE_INDEX)

    return cross_entropy


def _next_tokens(model: nn.Module, inputs: tuple[Tensor, ...], model_kwargs: Mapping[str, Any]) -> Tensor:
    """Return the next token of each, [B, S]; IGNORE_INDEX at the last token of a document and at padding."""
    home = unwrap_model(model)
    if isinstance(home, Encoder) or not isinstance(home.head, LMHead):
        raise InputError("the model does not predict next tokens, so the targets are unknown; give targets.")
    after = next_tokens(inputs[-1], layout_of(home, inputs[-1], model_kwargs))
    following = after.masked_fill(after < 0, IGNORE_INDEX)
    logits_to_keep = model_kwargs.get("logits_to_keep")
    return following if logits_to_keep is None else following[:, logits_to_keep]


def _real(model: nn.Module, inputs: tuple[Tensor, ...], model_kwargs: Mapping[str, Any]) -> Tensor | None:
    """Return which tokens with logits are not padding, [B, S]; None if there is no padding."""
    return layout_of(unwrap_model(model), inputs[-1], model_kwargs).real


def _check_logits(model: nn.Module) -> None:
    if isinstance(unwrap_model(model).head, NoHead | Pooler):
        raise InputError("the model outputs vectors, not logits; give a metric.")
