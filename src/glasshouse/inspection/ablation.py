"""Silencing: what a model loses without one of its heads, or without a feed-forward layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from glasshouse.config import did_you_mean
from glasshouse.errors import InputError
from glasshouse.inspection.batched_edits import BatchedEdits
from glasshouse.inspection.forward_pass import eval_mode
from glasshouse.inspection.html_display import HtmlDisplay
from glasshouse.inspection.metrics import Metric, cross_entropy_metric, scalar_metric
from glasshouse.inspection.patching import draw_layers, layers_of
from glasshouse.inspection.sites import unwrap_model
from glasshouse.inspection.stack_input import make_stack_input
from glasshouse.models import Seq2Seq

PARTS = {"head": "z", "cross_head": "cross_z", "feedforward": "ffn_out"}
WAYS = ("zero", "mean")


@dataclass(frozen=True, eq=False)
class Ablation(HtmlDisplay):
    """How much the loss, or another measure, grows when one part is silenced.

    >>> Ablation(torch.tensor([[0.5, 0.0]]), torch.tensor(2.0), "head").growth.argmax()
    tensor(0)
    """

    axes: ClassVar[Mapping[str, tuple[str, ...]]] = {"growth": ("layer", "place"), "before": ()}
    metric_increase: Tensor
    baseline: Tensor  # with nothing silenced
    component: str  # what a place is: a head; of feed-forward layers there is one a layer

    def _drawing(self) -> str:
        caption = f"what each {self.component} adds to {self.baseline.item():.4g} when it is silenced"
        return draw_layers(
            self.metric_increase,
            [str(place) for place in range(self.metric_increase.shape[1])],
            self.component,
            caption,
        )


def ablation_effects(
    model: nn.Module,
    *inputs: Tensor,
    metric: Metric | None = None,
    targets: Tensor | None = None,
    component: Literal["head", "cross_head", "feedforward"] = "head",
    to: Literal["zero", "mean"] = "zero",
    stack: Literal["decoder", "encoder"] = "decoder",
    progress: Callable[[int, int], None] | None = None,
    **call: Any,  # noqa: ANN401
) -> Ablation:
    """Silence each head, or each feed-forward layer, alone, and see how much the loss grows.

    Left out, `measure` is the mean cross-entropy: of each next token, or of `targets` [B, S], for labels [B], with
    -100 where no answer counts. A silenced part gives zeros, or always its mean over the real positions of the
    call. `stack` is which one of an encoder-decoder is meant.

    >>> import glasshouse as gh
    >>> model = gh.build(gh.preset("tiny-decoder"))
    >>> ablation(model, torch.tensor([[1, 2, 3, 4]])).growth.shape
    torch.Size([2, 4])
    """
    for name, given, known in (("to", to, WAYS), ("by", component, PARTS), ("stack", stack, ("decoder", "encoder"))):
        if given not in known:
            raise InputError(f"{name} is {given!r}, which is unknown; {did_you_mean(given, known)}")
    home = unwrap_model(model)
    names, axes = layers_of(model, (f"{stack}." if isinstance(home, Seq2Seq) else "") + PARTS[component])
    n_places = home.spec.n_heads if "head" in axes else 1

    inner = names[0].startswith("encoder.")
    real = (
        make_stack_input(home, inputs, {**call, "keep": None}, "encoder" if inner else None).real
        if to == "mean"
        else None
    )

    def silence(value: Tensor, place: int) -> None:
        part = value[:, place] if "head" in axes else value
        part.copy_(part.new_zeros(()) if real is None else part[real].mean(0))

    rows: list[Tensor] = []
    with eval_mode(model):
        measured = scalar_metric(metric or cross_entropy_metric(model, inputs, targets, call))
        output = model(*inputs, **call)
        copies = BatchedEdits(model, inputs, call, measured, output.numel())
        before = measured(output)
        for name in names:
            rows.append(copies.metric_per_edit(name, silence, n_places, n_values=0))
            if progress is not None:
                progress(len(rows) * n_places, len(names) * n_places)
    return Ablation(torch.stack(rows) - before, before, component)
