"""Attribution patching: estimates of activation patching everywhere at once, by gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from glasshouse.errors import check_count
from glasshouse.inspection.editing import Edit, edit
from glasshouse.inspection.inputs.forward_pass import eval_mode
from glasshouse.inspection.patching.activation_patching import (
    ActivationPatching,
    Prompt,
    Sites,
    check_same_lengths,
    check_same_shape,
    check_sizes,
    labels_of,
    layer_labels,
    layers_at,
    metric_and_baselines,
    patched_axes,
    prompt_pair,
)
from glasshouse.inspection.patching.metrics import Metric, check_has_gradient, keep_last_logit
from glasshouse.inspection.recording import Recording, record
from glasshouse.inspection.sites import unwrap_model
from glasshouse.inspection.token_gradients import check_differentiable, midpoints
from glasshouse.text import Tokenizer


def attribution_patching(
    model: nn.Module,
    corrupted: Prompt,
    clean: Prompt,
    site: Sites,
    *,
    axis: str | Sequence[str] | None = None,
    metric: Metric | None = None,
    steps: int = 1,
    tok: Tokenizer | None = None,
    **model_kwargs: Any,  # noqa: ANN401
) -> ActivationPatching:
    """Estimate `activation_patching` for all layers and indices from two forward passes and one backward.

    The effect of a patch is estimated as the activation's difference between the prompts times the gradient of the
    metric on `corrupted` (Nanda 2023; Syed et al. 2023). With `steps` above 1 the gradient is the mean over that many
    prompts between both, whose token embeddings are interpolated (integrated gradients; Hanna et al. 2024): better
    where the metric saturates. Everything else is as in `activation_patching`.

    >>> import glasshouse as gh
    >>> model = gh.build(gh.preset("tiny-decoder", init="normal"))
    >>> a, b = torch.tensor([[1, 2, 3]]), torch.tensor([[1, 2, 5]])
    >>> attribution_patching(model, a, b, "z", axis=("head", "position"), metric=lambda x: x[0, -1, 7]).effect.shape
    torch.Size([2, 4, 3])
    """
    check_count("steps", steps)
    selections, axes = layers_at(model, site), patched_axes(model, site, axis)
    here, there = prompt_pair(model, corrupted, clean, model_kwargs, tok)
    if tok is not None:  # tensors may be padded as they are
        check_same_lengths(here, there)
    check_differentiable(unwrap_model(model))
    if metric is None:
        keep_last_logit(model, here, there)
    names = [one.site.name for one in selections]
    with eval_mode(model):
        with record(model, "*token_embed", *names) as wanted:
            clean_output = there.run(model)
        embeddings = [name for name in wanted if name.endswith("token_embed")]

        def run(given: Mapping[str, Edit]) -> tuple[Tensor, Recording]:
            with torch.enable_grad(), edit(model, given), record(model, *embeddings, *names, grad=True) as graph:
                return here.run(model), graph

        output, graph = run(dict.fromkeys(embeddings, _as_leaf))
        seen = {name: value.detach() for name, value in graph.items()}
        outputs = (output.detach(), clean_output)
        scalar, corrupted_baseline, clean_baseline = metric_and_baselines(model, (here, there), outputs, metric)
        for name in seen:
            check_same_shape(name, wanted[name], seen[name])
        if steps == 1:
            totals = _slopes(scalar, output, graph, names)
        else:  # midpoints of equal parts of the way between the prompts
            totals = [torch.zeros_like(seen[name]) for name in names]
            for share in midpoints(steps):
                output, graph = run({name: _as_leaf(seen[name].lerp(wanted[name], share)) for name in embeddings})
                slopes = _slopes(scalar, output, graph, names)
                totals = [total + slope / steps for total, slope in zip(totals, slopes, strict=True)]
    rows = []
    for one, total in zip(selections, totals, strict=True):
        # Scores of masked keys are -inf in both.
        difference = (wanted[one.site.name] - seen[one.site.name]).nan_to_num(nan=0.0)
        rows.append(_sum_over_others(one.part(difference * total), [one.site.axes.index(axis) for axis in axes]))
        check_sizes(one, tuple(rows[-1].shape), tuple(rows[0].shape))
    gain = torch.stack(rows).to(corrupted_baseline.dtype)
    sizes = gain.shape[1:]
    return ActivationPatching(
        effect=gain / (clean_baseline - corrupted_baseline),
        metric_values=corrupted_baseline + gain,
        corrupted_baseline=corrupted_baseline,
        clean_baseline=clean_baseline,
        site=site if isinstance(site, str) else ", ".join(site),
        axis=axes,
        layer_labels=layer_labels(selections),
        axis_labels=labels_of(selections[0], axes, sizes, (here, there), tok),
    )


def _as_leaf(x: Tensor) -> Tensor:
    """Return a tensor that gradients lead to, whether or not the weights take any."""
    return x.detach().requires_grad_()


def _slopes(
    scalar: Callable[[Tensor], Tensor], output: Tensor, graph: Recording, names: Sequence[str]
) -> list[Tensor]:
    with torch.enable_grad():
        value = check_has_gradient(scalar(output))
    return list(torch.autograd.grad(value, [graph[name] for name in names], materialize_grads=True))


def _sum_over_others(value: Tensor, dims: Sequence[int]) -> Tensor:
    """Return the sum over all axes but these, in their order."""
    moved = value.movedim(list(dims), list(range(len(dims))))
    return moved.flatten(len(dims)).sum(-1)
