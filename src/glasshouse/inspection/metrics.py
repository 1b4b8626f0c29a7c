"""What is measured of an output where nothing else is asked for: a difference of logits, or the loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from glasshouse.errors import InputError
from glasshouse.inspection.forward_pass import layout_of, next_tokens
from glasshouse.inspection.sites import unwrap_model
from glasshouse.models import Encoder
from glasshouse.models.heads import LMHead, NoHead, Pooler, last_token

Metric = Callable[[Tensor], Tensor | float]  # of a model's output
Called = tuple[tuple[Tensor, ...], Mapping[str, Any]]  # what a model is given, and what else it is told

IGNORE_INDEX = -100  # what cross_entropy takes for a place that does not count


def scalar_metric(measure: Metric) -> Callable[[Tensor], Tensor]:
    """Return a measure whose numbers are sure to be tensors of no axes, and of enough digits.

    >>> scalar_metric(lambda output: output.sum())(torch.ones(2, dtype=torch.bfloat16))
    tensor(2.)
    """
    return partial(_number, measure)


def _number(measure: Metric, output: Tensor) -> Tensor:
    value = torch.as_tensor(measure(output))
    if value.dim():
        raise InputError(f"the measure gave shape {list(value.shape)}, but it must give one number; take its mean.")
    return value.to(torch.promote_types(value.dtype, torch.float32))


def logit_diff_metrics(
    model: nn.Module, into: Called, clean: Called, before: Tensor, after: Tensor
) -> tuple[Metric, Metric]:
    """Measure the logit of what output `after` finds likeliest at its end, less that of what `before` does.

    The first measure is for outputs on `into`, the second for those on `clean`, which may end elsewhere.

    >>> import glasshouse as gh
    >>> model = gh.build(gh.preset("tiny-decoder"))
    >>> before, after = torch.tensor([[[0.0, 3.0]]]), torch.tensor([[[5.0, 1.0]]])
    >>> prompt = ((torch.tensor([[1]]),), {})
    >>> one, other = differences(model, prompt, prompt, before, after)
    >>> one(before), other(after)
    (tensor(-3.), tensor(4.))
    """
    _check_logits(model)
    first, second = _ending(model, *into), _ending(model, *clean)
    old, new = first(before).argmax(-1, keepdim=True), second(after).argmax(-1, keepdim=True)
    if torch.equal(old, new):
        raise InputError(
            f"on both prompts {int(old[0])} is the likeliest answer, so there is nothing to measure; give a measure "
            "or other prompts."
        )

    def less(ending: Callable[[Tensor], Tensor], output: Tensor) -> Tensor:
        return (ending(output).gather(1, new) - ending(output).gather(1, old)).mean()

    return partial(less, first), partial(less, second)


def _ending(model: nn.Module, inputs: tuple[Tensor, ...], call: Mapping[str, Any]) -> Callable[[Tensor], Tensor]:
    """Return what takes the answers at the end of each row, [B, ...], out of an output."""
    real = _real(model, inputs, call)

    def ending(output: Tensor) -> Tensor:
        if output.dim() == 2:  # one answer a row
            return output
        return output[:, -1] if real is None or "keep" in call else last_token(output, real)

    return ending


def supports_last_logit_only(model: nn.Module, inputs: tuple[Tensor, ...], call: Mapping[str, Any]) -> bool:
    """Whether logits can be made for the last position alone: the model can do so and it is the same in each row."""
    home = unwrap_model(model)
    able = isinstance(home.head, LMHead) and not isinstance(home, Encoder)
    return able and _real(model, inputs, call) is None


def cross_entropy_metric(
    model: nn.Module, inputs: tuple[Tensor, ...], targets: Tensor | None, call: Mapping[str, Any]
) -> Metric:
    """Measure the mean cross-entropy of the right answers: the targets, or else the next tokens."""
    _check_logits(model)
    right = _next_tokens(model, inputs, call) if targets is None else targets
    if not bool((right != IGNORE_INDEX).any()):
        raise InputError("there is no token whose right answer is known; give a longer text, targets or a measure.")

    def of(output: Tensor) -> Tensor:
        if output.shape[:-1] != right.shape:
            raise InputError(
                f"targets has shape {list(right.shape)}, but the answers have {list(output.shape[:-1])}; "
                "give one for each, -100 where none counts."
            )
        exact = output.to(torch.promote_types(output.dtype, torch.float32))
        return F.cross_entropy(exact.flatten(0, -2), right.flatten().long(), ignore_index=IGNORE_INDEX)

    return of


def _next_tokens(model: nn.Module, inputs: tuple[Tensor, ...], call: Mapping[str, Any]) -> Tensor:
    """Return the token after each, [B, S]; none after the last of a text, and none of padding."""
    home = unwrap_model(model)
    if isinstance(home, Encoder) or not isinstance(home.head, LMHead):
        raise InputError("the model does not foretell next tokens, so right answers are not known; give targets.")
    after = next_tokens(inputs[-1], layout_of(home, inputs[-1], call))
    following = after.masked_fill(after < 0, IGNORE_INDEX)
    keep = call.get("keep")
    return following if keep is None else following[:, keep]


def _real(model: nn.Module, inputs: tuple[Tensor, ...], call: Mapping[str, Any]) -> Tensor | None:
    """Return which of the tokens that are answered are no padding, [B, S]; None where all are."""
    return layout_of(unwrap_model(model), inputs[-1], call).real


def _check_logits(model: nn.Module) -> None:
    if isinstance(unwrap_model(model).head, NoHead | Pooler):
        raise InputError("the model gives vectors and no logits; say by a measure what is wanted of them.")
