"""Activation patching: run a corrupted prompt with activations from a clean one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple, cast

import torch
from torch import Tensor, nn

from glasshouse.config import did_you_mean
from glasshouse.errors import InputError
from glasshouse.inspection.display.html import MAX_COLUMNS, Drawing, Heatmap, HtmlDisplay, labels
from glasshouse.inspection.editing import BatchedEdits, Change, edit
from glasshouse.inspection.inputs.forward_pass import check_full_sequence, eval_mode
from glasshouse.inspection.inputs.text_input import Input, encode_inputs
from glasshouse.inspection.patching.metrics import Metric, logit_diff_metrics, scalar_metric, supports_last_logit_only
from glasshouse.inspection.recording import Recording, record
from glasshouse.inspection.sites import sites, unwrap_model
from glasshouse.models import Model, Seq2Seq
from glasshouse.text import Tokenizer

Prompt = Input | Sequence[Input]  # ids [B, S] or texts; of an encoder-decoder a pair: source and target


def patch(
    model: nn.Module,
    corrupted: Prompt,
    clean: Prompt,
    *names: str,
    tok: Tokenizer | None = None,
    **model_kwargs: Any,  # noqa: ANN401
) -> Tensor:
    """Return the output on the prompt `corrupted` with the named activations patched from the prompt `clean`.

    Names are those of `record`, with `*` and indices; `model_kwargs` are further arguments of the model for both
    prompts, or as a pair, such as `lengths=(of_corrupted, of_clean)`, for each. With `tok` a prompt may be a text, or
    several. Patching a whole layer gives the clean output:

    >>> import glasshouse as gh
    >>> model = gh.build(gh.preset("tiny-decoder"))
    >>> a, b = torch.tensor([[1, 2, 3]]), torch.tensor([[1, 5, 3]])
    >>> torch.allclose(patch(model, a, b, "resid_post.1"), model(b))
    True
    """
    here, there = prompt_pair(model, corrupted, clean, model_kwargs, tok)
    with eval_mode(model):
        with record(model, *names, stop=True) as seen:
            there.run(model)
        with edit(model, patches_of(seen)):
            return here.run(model)


class _Prompt(NamedTuple):
    """The positional and keyword arguments of a model."""

    inputs: tuple[Tensor, ...]
    model_kwargs: dict[str, Any]

    def run(self, model: nn.Module) -> Tensor:
        output: Tensor = model(*self.inputs, **self.model_kwargs)
        return output


def prompt_pair(
    model: nn.Module, corrupted: Prompt, clean: Prompt, model_kwargs: Mapping[str, Any], tok: Tokenizer | None = None
) -> tuple[_Prompt, _Prompt]:
    """Return both prompts, each with its keyword arguments: of a pair, the first is for `corrupted`."""
    check_full_sequence({"cache": model_kwargs.get("cache")})
    for name, given in model_kwargs.items():
        if isinstance(given, tuple) and len(given) != 2:
            raise InputError(
                f"{name} is a tuple of {len(given)}, but there are two prompts; give a tensor, or a pair of them."
            )
    of_corrupted, of_clean = (
        {name: given[which] if isinstance(given, tuple) else given for name, given in model_kwargs.items()}
        for which in (0, 1)
    )
    whole = unwrap_model(model)
    return (
        _Prompt(*encode_inputs(whole, _inputs(whole, corrupted), of_corrupted, tok)),
        _Prompt(*encode_inputs(whole, _inputs(whole, clean), of_clean, tok)),
    )


@dataclass(frozen=True, eq=False, repr=False)
class ActivationPatching(HtmlDisplay):
    """The effect on a metric of patching each position or head of each layer alone.

    >>> half = torch.tensor([[0.5]])
    >>> ActivationPatching(half, 2 * half, torch.tensor(0.0), torch.tensor(2.0), "z", "head", ("0",)).effect
    tensor([[0.5000]])
    """

    axes: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "effect": ("layer", "axis"),
        "metric_values": ("layer", "axis"),
        "corrupted_baseline": (),
        "clean_baseline": (),
    }
    effect: Tensor  # 0: the metric is that of the corrupted run; 1: that of the clean run
    metric_values: Tensor  # with each patch
    corrupted_baseline: Tensor  # the metric on `corrupted`
    clean_baseline: Tensor  # the metric on `clean`
    site: str
    axis: str  # the axis patched along: position, head
    axis_labels: tuple[str, ...]  # tokens, or numbers

    def _drawings(self) -> list[Drawing]:
        caption = f"effect of patching {self.site} at each {self.axis}: 0 as corrupted, 1 as clean"
        return draw_layers(self.effect, self.axis_labels, self.axis, caption)


def activation_patching(
    model: nn.Module,
    corrupted: Prompt,
    clean: Prompt,
    site: str,
    *,
    axis: str | None = None,
    metric: Metric | None = None,
    tok: Tokenizer | None = None,
    progress: Callable[[int, int], None] | None = None,
    **model_kwargs: Any,  # noqa: ANN401
) -> ActivationPatching:
    """Patch a site in each layer at each index of an axis alone, and return the effect on a metric.

    `site` is a name without its layer: `resid_post`, `z`, `decoder.cross_z`. `axis` is the axis to patch along: by
    default heads if the site has them, else positions. `metric` maps an output to a scalar; by default it is the
    logit difference at the last token between the top prediction on `clean` and that on `corrupted`. `model_kwargs`
    and `tok` are as in `patch`. After each layer `progress` is called with the number of patches done and in all.

    >>> import glasshouse as gh
    >>> model = gh.build(gh.preset("tiny-decoder", init="normal"))
    >>> a, b = torch.tensor([[1, 2, 3]]), torch.tensor([[1, 2, 5]])
    >>> found = activation_patching(model, a, b, "resid_post", metric=lambda logits: logits[0, -1, 7])
    >>> found.effect.shape, found.effect[1].round(decimals=3).abs()  # the metric depends on the last position alone
    (torch.Size([2, 3]), tensor([0., 0., 1.]))
    """
    names, axes = layers_of(model, site)
    axis = axis or axes[1]  # head or position
    if axis not in axes[1:]:
        raise InputError(f"{site} has no axis {axis!r} to patch along; {did_you_mean(axis, axes[1:])}")
    dim, (here, there) = axes.index(axis), prompt_pair(model, corrupted, clean, model_kwargs, tok)
    if metric is None and supports_last_logit_only(model, *here) and supports_last_logit_only(model, *there):
        for prompt in (here, there):
            prompt.model_kwargs.setdefault("logits_to_keep", torch.tensor([-1], device=prompt.inputs[-1].device))
    rows: list[Tensor] = []
    with eval_mode(model):
        outputs = here.run(model), there.run(model)
        scalar, corrupted_baseline, clean_baseline = metric_and_baselines(model, (here, there), outputs, metric)
        edits = BatchedEdits(model, here.inputs, here.model_kwargs, scalar, outputs[0].numel())
        for name in names:  # one at a time: the patterns of all layers may not fit in memory
            with record(model, name, stop=True) as seen:
                there.run(model)
            value = seen[name]
            rows.append(
                edits.metric_per_edit(name, partial(_patch_at, name, value, dim), value.shape[dim], value.numel())
            )
            if progress is not None:
                progress(len(rows) * value.shape[dim], len(names) * value.shape[dim])
    values = torch.stack(rows)
    axis_labels = _token_labels(site, axis, here.inputs, there.inputs, tok) or tuple(map(str, range(values.shape[1])))
    return ActivationPatching(
        effect=(values - corrupted_baseline) / (clean_baseline - corrupted_baseline),
        metric_values=values,
        corrupted_baseline=corrupted_baseline,
        clean_baseline=clean_baseline,
        site=site,
        axis=axis,
        axis_labels=axis_labels,
    )


def layers_of(model: nn.Module, site: str) -> tuple[list[str], tuple[str, ...]]:
    """Return the names of a site in each layer, and its axes.

    >>> import glasshouse as gh
    >>> layers_of(gh.build(gh.preset("tiny-decoder")), "ffn_out")
    (['ffn_out.0', 'ffn_out.1'], ('batch', 'position', 'width'))
    """
    known = sites(model)
    names = [name for name in known if stem_of(name) == site]
    if not names:
        stems = dict.fromkeys(stem for stem in map(stem_of, known) if stem)
        raise InputError(f"the layers have no site {site!r}, named without the layer; {did_you_mean(site, stems)}")
    return names, known[names[0]].axes


def draw_layers(values: Tensor, axis_labels: Sequence[str], axis: str, caption: str) -> list[Drawing]:
    """Draw values [layer, axis], with at most MAX_COLUMNS columns."""
    left = len(axis_labels) - MAX_COLUMNS
    caption += f"; {left} more {axis}s are not shown" if left > 0 else ""
    rows = [f"layer {layer}" for layer in range(len(values))]
    return [Heatmap(values[:, :MAX_COLUMNS], rows, axis_labels[:MAX_COLUMNS], caption)]


def _inputs(model: Model, prompt: Prompt) -> tuple[Input, ...]:
    """Return a prompt as the inputs of a model: a list of texts is a batch, but of an encoder-decoder a pair."""
    if isinstance(prompt, Tensor | str):
        return (prompt,)
    if isinstance(model, Seq2Seq) or any(isinstance(one, Tensor) for one in prompt):
        return tuple(prompt)
    return (cast(Sequence[str], prompt),)


def patches_of(seen: Recording) -> dict[str, Change]:
    """Return the edits that patch in recorded activations."""

    def put(name: str, value: Tensor, old: Tensor) -> Tensor:
        _check_same_shape(name, value, old)
        return value

    return {name: partial(put, name, value) for name, value in seen.items()}


def _patch_at(name: str, value: Tensor, dim: int, old: Tensor, index: int) -> None:
    """Patch one index of an activation, in place."""
    _check_same_shape(name, value, old)
    old.select(dim, index).copy_(value.select(dim, index))


def _check_same_shape(name: str, value: Tensor, old: Tensor) -> None:
    if value.shape != old.shape:
        raise InputError(
            f"{name} has shape {list(value.shape)} on clean, but {list(old.shape)} on corrupted; give prompts of the "
            "same length."
        )


def metric_and_baselines(
    model: nn.Module, prompts: tuple[_Prompt, _Prompt], outputs: tuple[Tensor, Tensor], metric: Metric | None
) -> tuple[Callable[[Tensor], Tensor], Tensor, Tensor]:
    """Return the metric of outputs on `corrupted`, and its value on either prompt."""
    if metric is None:
        on_corrupted, on_clean = (scalar_metric(one) for one in logit_diff_metrics(model, *prompts, *outputs))
    else:
        on_corrupted = on_clean = scalar_metric(metric)
    corrupted, clean = on_corrupted(outputs[0]), on_clean(outputs[1])
    if not bool((clean - corrupted).abs() > 0):
        raise InputError(
            f"the metric is {corrupted.item():.6g} on corrupted and {clean.item():.6g} on clean, so there is no "
            "difference to explain; give another metric or other prompts."
        )
    return on_corrupted, corrupted, clean


def stem_of(name: str) -> str:
    """Return a site's name without its layer; empty if it has none."""
    stem, _, layer = name.rpartition(".")
    return stem if layer.isdigit() else ""


def _token_labels(
    site: str, axis: str, here: tuple[Tensor, ...], there: tuple[Tensor, ...], tok: Tokenizer | None
) -> tuple[str, ...]:
    """Return the tokens along an axis, both where the prompts differ; none for other axes or for a batch."""
    if axis not in ("position", "query", "key") or len(here[-1]) > 1:
        return ()
    of_source = site.startswith("encoder.") or site.endswith(("cross_k", "cross_v"))
    which = 0 if of_source or (axis == "key" and "cross" in site) else -1
    pairs = zip(labels(here[which][0], tok), labels(there[which][0], tok), strict=True)
    return tuple(old if old == new else f"{old} → {new}" for old, new in pairs)
