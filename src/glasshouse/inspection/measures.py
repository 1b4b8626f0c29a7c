"""What is measured of an output where nothing else is asked for: a difference of logits, or the loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from glasshouse.errors import InputError
from glasshouse.inspection.calls import layout_of, next_tokens
from glasshouse.inspection.sites import plain
from glasshouse.models import Encoder
from glasshouse.models.heads import NoHead, Pool, Vocabulary, last_token

Measure = Callable[[Tensor], Tensor | float]  # of a model's output

IGNORED = -100  # what cross_entropy takes for a place that does not count


def number_by(measure: Measure) -> Callable[[Tensor], Tensor]:
    """Return a measure whose numbers are sure to be tensors of no axes, and of enough digits.

    >>> number_by(lambda output: output.sum())(torch.ones(2, dtype=torch.bfloat16))
    tensor(2.)
    """
    return partial(_number, measure)


def _number(measure: Measure, output: Tensor) -> Tensor:
    value = torch.as_tensor(measure(output))
    if value.dim():
        raise InputError(f"the measure gave shape {list(value.shape)}, but it must give one number; take its mean.")
    return value.to(torch.promote_types(value.dtype, torch.float32))


def difference(
    model: nn.Module, inputs: tuple[Tensor, ...], before: Tensor, after: Tensor, call: Mapping[str, Any]
) -> Measure:
    """Measure the logit of what output `after` finds likeliest at its end, less that of what `before` does.

    >>> import glasshouse as gh
    >>> model = gh.build(gh.preset("tiny-decoder"))
    >>> before, after = torch.tensor([[[0.0, 3.0]]]), torch.tensor([[[5.0, 1.0]]])
    >>> measure = difference(model, (torch.tensor([[1]]),), before, after, {})
    >>> measure(before), measure(after)
    (tensor(-3.), tensor(4.))
    """
    _check_logits(model)
    real = _real(model, inputs, call)

    def ending(output: Tensor) -> Tensor:
        if output.dim() == 2:  # one answer a row
            return output
        return output[:, -1] if real is None or "keep" in call else last_token(output, real)

    old, new = (ending(output).argmax(-1, keepdim=True) for output in (before, after))
    if torch.equal(old, new):
        raise InputError(
            f"on both prompts {int(old[0])} is the likeliest answer, so there is nothing to measure; give a measure "
            "or other prompts."
        )
    return lambda output: (ending(output).gather(1, new) - ending(output).gather(1, old)).mean()


def ending_alone(model: nn.Module, inputs: tuple[Tensor, ...], call: dict[str, Any]) -> dict[str, Any]:
    """Have logits made for the last position alone, where the model can do so and it is the same in each row."""
    home = plain(model)
    able = isinstance(home.head, Vocabulary) and not isinstance(home, Encoder)
    if not able or _real(model, inputs, call) is not None:
        return call
    return {"keep": torch.tensor([-1], device=inputs[-1].device), **call}


def loss(model: nn.Module, inputs: tuple[Tensor, ...], targets: Tensor | None, call: Mapping[str, Any]) -> Measure:
    """Measure the mean cross-entropy of the right answers: the targets, or else the next tokens."""
    _check_logits(model)
    right = _next_tokens(model, inputs, call) if targets is None else targets
    if not bool((right != IGNORED).any()):
        raise InputError("there is no token whose right answer is known; give a longer text, targets or a measure.")

    def of(output: Tensor) -> Tensor:
        if output.shape[:-1] != right.shape:
            raise InputError(
                f"targets has shape {list(right.shape)}, but the answers have {list(output.shape[:-1])}; "
                "give one for each, -100 where none counts."
            )
        exact = output.to(torch.promote_types(output.dtype, torch.float32))
        return F.cross_entropy(exact.flatten(0, -2), right.flatten().long(), ignore_index=IGNORED)

    return of


def _next_tokens(model: nn.Module, inputs: tuple[Tensor, ...], call: Mapping[str, Any]) -> Tensor:
    """Return the token after each, [B, S]; none after the last of a text, and none of padding."""
    home = plain(model)
    if isinstance(home, Encoder) or not isinstance(home.head, Vocabulary):
        raise InputError("the model does not foretell next tokens, so right answers are not known; give targets.")
    after = next_tokens(inputs[-1], layout_of(home, inputs[-1], call))
    following = after.masked_fill(after < 0, IGNORED)
    keep = call.get("keep")
    return following if keep is None else following[:, keep]


def _real(model: nn.Module, inputs: tuple[Tensor, ...], call: Mapping[str, Any]) -> Tensor | None:
    """Return which of the tokens that are answered are no padding, [B, S]; None where all are."""
    return layout_of(plain(model), inputs[-1], call).real


def _check_logits(model: nn.Module) -> None:
    if isinstance(plain(model).head, NoHead | Pool):
        raise InputError("the model gives vectors and no logits; say by a measure what is wanted of them.")
