"""Ablation: how much the loss increases without one attention head, or without one feed-forward layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from glasshouse.config import did_you_mean
from glasshouse.errors import InputError
from glasshouse.inspection.display.html import Drawing, HtmlDisplay
from glasshouse.inspection.editing import BatchedEdits
from glasshouse.inspection.inputs.call_arguments import CallArguments
from glasshouse.inspection.inputs.forward_pass import eval_mode
from glasshouse.inspection.inputs.stack_input import make_stack_input
from glasshouse.inspection.inputs.text_input import Input, encode_inputs
from glasshouse.inspection.patching.activation_patching import draw_rows, layers_of
from glasshouse.inspection.patching.metrics import Metric, cross_entropy_metric, scalar_metric
from glasshouse.inspection.sites import unwrap_model
from glasshouse.models import Seq2Seq
from glasshouse.text import Tokenizer

COMPONENTS = {"head": "z", "cross_head": "cross_z", "feedforward": "ffn_out"}  # and the site of each
METHODS = ("zero", "mean")


@dataclass(frozen=True, eq=False, repr=False)
class Ablation(HtmlDisplay):
    """How much the loss, or another metric, increases when one component is ablated.

    >>> Ablation(torch.tensor([[0.5, 0.0]]), torch.tensor(2.0), "head").metric_increase.argmax()
    tensor(0)
    """

    axes: ClassVar[Mapping[str, tuple[str, ...]]] = {"metric_increase": ("layer", "component"), "baseline": ()}
    metric_increase: Tensor
    baseline: Tensor  # the metric without ablation
    component: str  # head, cross_head or feedforward, of which there is one per layer

    def _drawings(self) -> list[Drawing]:
        caption = f"increase over {self.baseline.item():.4g} when each {self.component} is ablated"
        rows, columns = ([str(number) for number in range(size)] for size in self.metric_increase.shape)
        return draw_rows(self.metric_increase, [f"layer {row}" for row in rows], columns, self.component, caption)


def ablation_effects(
    model: nn.Module,
    *inputs: Input,
    metric: Metric | None = None,
    targets: Tensor | None = None,
    component: Literal["head", "cross_head", "feedforward"] = "head",
    to: Literal["zero", "mean"] = "zero",
    stack: Literal["decoder", "encoder"] = "decoder",
    progress: Callable[[int, int], None] | None = None,
    tok: Tokenizer | None = None,
    **model_kwargs: Any,  # noqa: ANN401
) -> Ablation:
    """Ablate each head, or each feed-forward layer, alone, and return how much the loss increases.

    The default `metric` is the mean cross-entropy of each next token, or of `targets` [B, S], for a sequence
    classifier [B], with -100 for positions to ignore. Zero ablation replaces a component's output by zeros, mean
    ablation by its mean over the batch and the positions that are not padding. `stack` chooses the stack of an
    encoder-decoder. With `tok` the input may be a text, or several.

    >>> import glasshouse as gh
    >>> model = gh.build(gh.preset("tiny-decoder"))
    >>> ablation_effects(model, torch.tensor([[1, 2, 3, 4]])).metric_increase.shape
    torch.Size([2, 4])
    """
    for name, given, known in (
        ("to", to, METHODS),
        ("component", component, COMPONENTS),
        ("stack", stack, ("decoder", "encoder")),
    ):
        if given not in known:
            raise InputError(f"{name} is {given!r}, which is unknown; {did_you_mean(given, known)}")
    unwrapped = unwrap_model(model)
    given_ids, kwargs = encode_inputs(unwrapped, inputs, model_kwargs, tok)
    names, axes = layers_of(model, (f"{stack}." if isinstance(unwrapped, Seq2Seq) else "") + COMPONENTS[component])
    per_layer = unwrapped.spec.n_heads if "head" in axes else 1

    in_encoder = names[0].startswith("encoder.")
    full_kwargs = {**kwargs, "logits_to_keep": None}
    real = (
        make_stack_input(unwrapped, given_ids, full_kwargs, "encoder" if in_encoder else None).real
        if to == "mean"
        else None
    )

    def ablate(value: Tensor, number: int) -> None:
        part = value[:, number] if "head" in axes else value
        part.copy_(part.new_zeros(()) if real is None else part[real].mean(0))

    rows: list[Tensor] = []
    with eval_mode(model):
        scalar = scalar_metric(metric or cross_entropy_metric(model, given_ids, targets, kwargs))
        output = model(*given_ids, **kwargs)
        edits = BatchedEdits(model, CallArguments(given_ids, kwargs), scalar, output.numel())
        baseline = scalar(output)
        for name in names:
            rows.append(edits.metric_per_edit(name, ablate, per_layer, n_elements=0))
            if progress is not None:
                progress(len(rows) * per_layer, len(names) * per_layer)
    return Ablation(torch.stack(rows) - baseline, baseline, component)
