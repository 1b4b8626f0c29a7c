"""Activation patching: run a corrupted prompt with activations from a clean one."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from glasshouse.config import did_you_mean
from glasshouse.errors import InputError
from glasshouse.inspection.display.html import MAX_COLUMNS, Drawing, Heatmap, HtmlDisplay, labels
from glasshouse.inspection.editing import BatchedEdits, Change, edit
from glasshouse.inspection.inputs.call_arguments import CallArguments
from glasshouse.inspection.inputs.forward_pass import check_full_sequence, eval_mode
from glasshouse.inspection.inputs.text_input import Input, encode_inputs
from glasshouse.inspection.patching.metrics import Metric, keep_last_logit, logit_diff_metrics, scalar_metric
from glasshouse.inspection.recording import Recording, record
from glasshouse.inspection.sites import Selection, exact_advice, select, sites, unwrap_model
from glasshouse.models import Model, Seq2Seq
from glasshouse.text import Tokenizer

Sites = str | Sequence[str]
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


def prompt_pair(
    model: nn.Module, corrupted: Prompt, clean: Prompt, model_kwargs: Mapping[str, Any], tok: Tokenizer | None = None
) -> tuple[CallArguments, CallArguments]:
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
        CallArguments(*encode_inputs(whole, _inputs(whole, corrupted), of_corrupted, tok)),
        CallArguments(*encode_inputs(whole, _inputs(whole, clean), of_clean, tok)),
    )


@dataclass(frozen=True, eq=False, repr=False)
class ActivationPatching(HtmlDisplay):
    """The effect on a metric of patching each position or head of each layer alone, or each pair of two such axes.

    >>> half = torch.tensor([[0.5]])
    >>> zero, two = torch.tensor(0.0), torch.tensor(2.0)
    >>> ActivationPatching(half, 2 * half, zero, two, "z", ("head",), ("layer 0",), (("0",),)).effect
    tensor([[0.5000]])
    """

    effect: Tensor  # [layer, *axis]; 0: the metric is that of the corrupted run; 1: that of the clean run
    metric_values: Tensor  # with each patch
    corrupted_baseline: Tensor  # the metric on `corrupted`
    clean_baseline: Tensor  # the metric on `clean`
    site: str
    axis: tuple[str, ...]  # the axes patched along, such as head, position
    layer_labels: tuple[str, ...]
    axis_labels: tuple[tuple[str, ...], ...]  # of each axis: tokens, or numbers

    @property
    def axes(self) -> dict[str, tuple[str, ...]]:
        """The names of the axes of each tensor."""
        each = ("layer", *self.axis)
        return {"effect": each, "metric_values": each, "corrupted_baseline": (), "clean_baseline": ()}

    def _drawings(self) -> list[Drawing]:
        caption = f"effect of patching {self.site} at each {' and '.join(self.axis)}: 0 as corrupted, 1 as clean"
        rows = list(self.layer_labels)
        for axis, names in zip(self.axis[:-1], self.axis_labels[:-1], strict=True):
            rows = [f"{row}, {axis} {name}" for row in rows for name in names]
        return draw_rows(self.effect.flatten(0, -2), rows, self.axis_labels[-1], self.axis[-1], caption)


def activation_patching(
    model: nn.Module,
    corrupted: Prompt,
    clean: Prompt,
    site: Sites,
    *,
    axis: str | Sequence[str] | None = None,
    metric: Metric | None = None,
    tok: Tokenizer | None = None,
    progress: Callable[[int, int], None] | None = None,
    **model_kwargs: Any,  # noqa: ANN401
) -> ActivationPatching:
    """Patch a site in each layer at each index of an axis alone, and return the effect on a metric.

    `site` is a name without its layer, which stands for all layers: `resid_post`, `decoder.cross_z`; or one of
    `record`: `embed`, `z.3`. With an index only that part is patched: `z[head=1]`. Of a list of sites with the
    same axes, `["z.2[head=2]", "z.3[head=1]"]`, each has a row. `axis` is the axis to patch along, or several, such
    as `("head", "position")`: by default heads if the site has them, else positions. `metric` maps an output to a
    scalar; by default it is the logit difference at the last token between the top prediction on `clean` and that on
    `corrupted`. `model_kwargs` and `tok` are as in `patch`. After each layer `progress` is called with the number of
    patches done and in all.

    >>> import glasshouse as gh
    >>> model = gh.build(gh.preset("tiny-decoder", init="normal"))
    >>> a, b = torch.tensor([[1, 2, 3]]), torch.tensor([[1, 2, 5]])
    >>> found = activation_patching(model, a, b, "resid_post", metric=lambda logits: logits[0, -1, 7])
    >>> found.effect.shape, found.effect[1].round(decimals=3).abs()  # the metric depends on the last position alone
    (torch.Size([2, 3]), tensor([0., 0., 1.]))
    >>> by_both = activation_patching(model, a, b, "z", axis=("head", "position"), metric=lambda logits: logits.sum())
    >>> by_both.effect.shape
    torch.Size([2, 4, 3])
    """
    selections, axes = layers_at(model, site), patched_axes(model, site, axis)
    here, there = prompt_pair(model, corrupted, clean, model_kwargs, tok)
    if tok is not None:  # tensors may be padded as they are
        check_same_lengths(here, there)
    if metric is None:
        keep_last_logit(model, here, there)
    rows: list[Tensor] = []
    sizes: tuple[int, ...] = ()
    with eval_mode(model):
        outputs = here.run(model), there.run(model)
        scalar, corrupted_baseline, clean_baseline = metric_and_baselines(model, (here, there), outputs, metric)
        edits = BatchedEdits(model, here, scalar, outputs[0].numel())
        for one in selections:  # one at a time: the patterns of all layers may not fit in memory
            name = one.site.name
            with record(model, name, stop=True) as seen:
                there.run(model)
            value, dims = seen[name], [one.site.axes.index(axis) for axis in axes]
            sizes, before = tuple(one.part(value).shape[dim] for dim in dims), sizes
            check_sizes(one, sizes, before)
            put = partial(_patch_at, one, value, dims, sizes)
            rows.append(edits.metric_per_edit(name, put, math.prod(sizes), value.numel()).view(sizes))
            if progress is not None:
                progress(len(rows) * rows[0].numel(), len(selections) * rows[0].numel())
    values = torch.stack(rows)
    return ActivationPatching(
        effect=(values - corrupted_baseline) / (clean_baseline - corrupted_baseline),
        metric_values=values,
        corrupted_baseline=corrupted_baseline,
        clean_baseline=clean_baseline,
        site=site if isinstance(site, str) else ", ".join(site),
        axis=axes,
        layer_labels=layer_labels(selections),
        axis_labels=labels_of(selections[0], axes, sizes, (here, there), tok),
    )


def layers_at(model: nn.Module, site: Sites) -> list[Selection]:
    """Return the selections of a site named without its layer, or with it, and perhaps with an index; or of several.

    >>> import glasshouse as gh
    >>> model = gh.build(gh.preset("tiny-decoder"))
    >>> [one.name for one in layers_at(model, "z[head=1]")], [one.name for one in layers_at(model, "embed")]
    (['z.0[head=1]', 'z.1[head=1]'], ['embed'])
    """
    if not isinstance(site, str):
        found = [one for name in site for one in layers_at(model, name)]
        if len({one.axes for one in found}) != 1:
            raise InputError(f"the sites {list(site)} have not the same axes; give those that do, one or more.")
        return found
    stem, bracket, index = site.partition("[")
    known = sites(model)
    stems = dict.fromkeys(found for found in map(stem_of, known) if found)
    if stem not in stems and stem not in known:
        stems |= dict.fromkeys(name for name in known if not stem_of(name))
        said = exact_advice(stem, known) or did_you_mean(stem, stems)
        raise InputError(f"the layers have no site {stem!r}; {said}")
    names = [name + bracket + index for name in known if stem_of(name) == stem] if stem in stems else [site]
    selections = [one for name in names for one in select(model, name)]
    if selections[0].span is not None:
        raise InputError(
            f"{site} selects positions of a request, but both prompts are given here; give numbers, as in "
            f"{stem}[position=3:5]."
        )
    return selections


def patched_axes(model: nn.Module, site: Sites, axis: str | Sequence[str] | None) -> tuple[str, ...]:
    """Return the axes to patch along; by default the first after the batch that is not indexed."""
    one = layers_at(model, site)[0]
    free = [name for name in one.axes if name != "batch"]
    axes = (axis,) if isinstance(axis, str) else tuple(axis or free[:1])
    if wrong := [name for name in axes if name not in free]:
        raise InputError(f"{site} has no axis {wrong[0]!r} to patch along; {did_you_mean(wrong[0], free)}")
    if not axes or len({*axes}) < len(axes):
        raise InputError(f"axis is {axis!r}, but it must be one or several different of {', '.join(free) or 'none'}.")
    return axes


def layer_labels(selections: Sequence[Selection]) -> tuple[str, ...]:
    """Return a label for each: its layer, or its name where they differ in more than the layer."""
    names = [one.site.name for one in selections]
    kinds = {(stem_of(one.site.name), one.index_text) for one in selections}
    if len(kinds) > 1 or len({*names}) < len(names):
        return tuple(one.name for one in selections)
    return tuple(f"layer {name.rpartition('.')[2]}" if stem_of(name) else name for name in names)


def layers_of(model: nn.Module, site: str) -> tuple[list[str], tuple[str, ...]]:
    """Return the names of a site in each layer, and its axes.

    >>> import glasshouse as gh
    >>> layers_of(gh.build(gh.preset("tiny-decoder")), "ffn_out")
    (['ffn_out.0', 'ffn_out.1'], ('batch', 'position', 'width'))
    """
    found = layers_at(model, site)
    return [one.site.name for one in found], found[0].site.axes


def draw_rows(values: Tensor, rows: Sequence[str], columns: Sequence[str], axis: str, caption: str) -> list[Drawing]:
    """Draw values [row, column], with at most MAX_COLUMNS columns."""
    left = len(columns) - MAX_COLUMNS
    caption += f"; {left} more {axis}s are not shown" if left > 0 else ""
    return [Heatmap(values[:, :MAX_COLUMNS], rows, columns[:MAX_COLUMNS], caption)]


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
        check_same_shape(name, value, old)
        return value

    return {name: partial(put, name, value) for name, value in seen.items()}


def _patch_at(
    one: Selection, value: Tensor, dims: Sequence[int], sizes: tuple[int, ...], old: Tensor, number: int
) -> None:
    """Patch an activation at one index of each axis, in place; `number` counts all of them."""
    check_same_shape(one.name, value, old)
    old, value = one.part(old), one.part(value)
    for dim, size, stride in zip(
        dims, sizes, [math.prod(sizes[place + 1 :]) for place in range(len(sizes))], strict=True
    ):
        index = number // stride % size
        old, value = old.narrow(dim, index, 1), value.narrow(dim, index, 1)
    old.copy_(value)


def check_same_shape(name: str, value: Tensor, old: Tensor) -> None:
    """Raise InputError if an activation of `clean` has another shape than that of `corrupted`."""
    if value.shape != old.shape:
        raise InputError(
            f"{name} has shape {list(value.shape)} on clean, but {list(old.shape)} on corrupted; give prompts of the "
            "same length."
        )


def check_sizes(one: Selection, sizes: tuple[int, ...], before: tuple[int, ...]) -> None:
    """Raise InputError if a site has no index to patch at, or not as many as the sites before."""
    if 0 in sizes:
        raise InputError(f"{one.name} selects nothing of these prompts; give an index within their tokens.")
    if before and sizes != before:
        raise InputError(
            f"{one.name} is patched at {list(sizes)} indices, but the sites before it at {list(before)}; patch them "
            "in two calls."
        )


def check_same_lengths(here: CallArguments, there: CallArguments) -> None:
    """Raise InputError if texts of `clean` have other lengths than those of `corrupted`, by their padding."""
    for name in ("lengths", "target_lengths", "mask", "target_mask"):
        corrupted, clean = here.model_kwargs.get(name), there.model_kwargs.get(name)
        if corrupted is None and clean is None:
            continue
        if corrupted is None or clean is None or not torch.equal(corrupted, clean):
            raise InputError(
                f"{name} is {_listed(clean)} on clean, but {_listed(corrupted)} on corrupted; give prompts of which "
                "each has as many tokens as its pair."
            )


def _listed(given: Tensor | None) -> str:
    return "not given" if given is None else str(given.tolist())


def metric_and_baselines(
    model: nn.Module,
    prompts: tuple[CallArguments, CallArguments],
    outputs: tuple[Tensor, Tensor],
    metric: Metric | None,
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


def labels_of(
    one: Selection,
    axes: Sequence[str],
    sizes: Sequence[int],
    prompts: tuple[CallArguments, CallArguments],
    tok: Tokenizer | None,
) -> tuple[tuple[str, ...], ...]:
    """Return a label for each index of each axis: its token, both where the prompts differ, or its number."""
    site, index = one.site, dict(zip(one.site.axes, one.index, strict=True))
    here, there = (prompt.inputs for prompt in prompts)
    found: list[tuple[str, ...]] = []
    for axis, size in zip(axes, sizes, strict=True):
        chosen = index[axis]
        assert isinstance(chosen, slice)  # an axis with a single index is not patched along
        names = [str(number) for number in range(chosen.start or 0, (chosen.start or 0) + size)]
        if axis in ("position", "query", "key") and len(here[-1]) == 1:
            stem = stem_of(site.name) or site.name
            of_source = stem.startswith("encoder.") or stem.endswith(("cross_k", "cross_v"))
            which = 0 if of_source or (axis == "key" and "cross" in stem) else -1
            pairs = list(zip(labels(here[which][0], tok), labels(there[which][0], tok), strict=True))[chosen]
            names = [old if old == new else f"{old} → {new}" for old, new in pairs]
        found.append(tuple(names))
    return tuple(found)
