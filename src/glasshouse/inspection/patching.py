"""Patching: what changes in the answer when one place holds what it held on another prompt."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from glasshouse.config import did_you_mean
from glasshouse.errors import InputError
from glasshouse.inspection.batched_edits import BatchedEdits
from glasshouse.inspection.editing import Change, edit
from glasshouse.inspection.forward_pass import check_full_sequence, eval_mode
from glasshouse.inspection.html_display import MOST_COLUMNS, HtmlDisplay, bars, heatmap, labels
from glasshouse.inspection.metrics import Metric, logit_diff_metrics, scalar_metric, supports_last_logit_only
from glasshouse.inspection.recording import Recording, record
from glasshouse.inspection.sites import Selection, select, sites
from glasshouse.text import Tokenizer

Prompt = Tensor | Sequence[Tensor]  # ids [B, S], or all that the model takes: source and target

SENDERS, RECEIVERS = ("z", "cross_z"), ("q", "k", "v", "cross_q")
WRITERS = (*SENDERS, "ffn_out")  # what decides all that is added to the stream


def patch(model: nn.Module, corrupted: Prompt, clean: Prompt, *names: str, **call: Any) -> Tensor:  # noqa: ANN401
    """Return the output on the prompt `into` while the named sites hold what they held on the prompt `clean`.

    Names are those of `record`, with `*` and indices; `call` is what else the model is to be told of both prompts, or
    as a pair, such as `lengths=(of_into, of_out_of)`, of each. Whoever takes over a whole layer takes over the
    answer:

    >>> import glasshouse as gh
    >>> model = gh.build(gh.preset("tiny-decoder"))
    >>> a, b = torch.tensor([[1, 2, 3]]), torch.tensor([[1, 5, 3]])
    >>> torch.allclose(patch(model, a, b, "resid_post.1"), model(b))
    True
    """
    here, there = _prompts(corrupted, clean, call)
    with eval_mode(model):
        with record(model, *names, stop=True) as seen:
            there.run(model)
        with edit(model, _as_seen(seen)):
            return here.run(model)


class _Prompt(NamedTuple):
    """What a model is given, and what else it is told."""

    inputs: tuple[Tensor, ...]
    call: dict[str, Any]

    def run(self, model: nn.Module) -> Tensor:
        output: Tensor = model(*self.inputs, **self.call)
        return output


def _prompts(corrupted: Prompt, clean: Prompt, call: Mapping[str, Any]) -> tuple[_Prompt, _Prompt]:
    """Return both prompts, each with what was said of it: of a pair, the first is of `into`."""
    check_full_sequence({"cache": call.get("cache")})
    for name, given in call.items():
        if isinstance(given, tuple) and len(given) != 2:
            raise InputError(
                f"{name} is a tuple of {len(given)}, but there are two prompts; give a tensor, or a pair of them."
            )
    mine, its = (
        {name: given[which] if isinstance(given, tuple) else given for name, given in call.items()}
        for which in (0, 1)
    )
    return _Prompt(_inputs(corrupted), mine), _Prompt(_inputs(clean), its)


@dataclass(frozen=True, eq=False)
class ActivationPatching(HtmlDisplay):
    """What patching each place of each layer alone does to a measure.

    >>> half = torch.tensor([[0.5]])
    >>> Sweep(half, 2 * half, torch.tensor(0.0), torch.tensor(2.0), "z", "head", ("0",)).effect
    tensor([[0.5000]])
    """

    axes: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "effect": ("layer", "place"),
        "values": ("layer", "place"),
        "before": (),
        "after": (),
    }
    effect: Tensor  # 0: the measure is that on `into`; 1: that on `clean`
    metric_values: Tensor  # the measure itself, with each patch
    corrupted_baseline: Tensor  # the measure on `into`
    clean_baseline: Tensor  # the measure on `clean`
    site: str
    axis: str  # what a place is: a position, a head
    axis_labels: tuple[str, ...]  # their names: tokens, or numbers

    def _drawing(self) -> str:
        caption = f"{self.site} of clean put into each {self.axis}: 0 changes nothing, 1 gives what clean gives"
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
    **call: Any,  # noqa: ANN401
) -> ActivationPatching:
    """Patch each place of a site in each layer alone, and measure what comes of it.

    `site` is a name without its layer: `resid_post`, `z`, `decoder.cross_z`. `by` is the axis whose places are taken
    in turn: heads where the site has them, else positions. `measure` makes one number of an output; left out, it is
    the logit of the token that is likeliest after `clean` less that of the one likeliest after `into`, both at the
    end of the prompt. `call` is as in `patch`. After each layer `progress` is told how many patches are done, and of
    how many.

    >>> import glasshouse as gh
    >>> model = gh.build(gh.preset("tiny-decoder", init="normal"))
    >>> a, b = torch.tensor([[1, 2, 3]]), torch.tensor([[1, 2, 5]])
    >>> found = sweep(model, a, b, "resid_post", measure=lambda logits: logits[0, -1, 7])
    >>> found.effect.shape, found.effect[1].round(decimals=3).abs()  # only the last vector of the last layer is read
    (torch.Size([2, 3]), tensor([0., 0., 1.]))
    """
    names, axes = layers_of(model, site)
    axis = axis or axes[1]  # a head or a position
    if axis not in axes[1:]:
        raise InputError(f"{site} has no {axis!r} to sweep over; {did_you_mean(axis, axes[1:])}")
    dim, (here, there) = axes.index(axis), _prompts(corrupted, clean, call)
    if metric is None and supports_last_logit_only(model, *here) and supports_last_logit_only(model, *there):
        for prompt in (here, there):
            prompt.call.setdefault("keep", torch.tensor([-1], device=prompt.inputs[-1].device))
    rows: list[Tensor] = []
    with eval_mode(model):
        outputs = here.run(model), there.run(model)
        measured, before, after = _measured(model, (here, there), outputs, metric)
        copies = BatchedEdits(model, here.inputs, here.call, measured, outputs[0].numel())
        for name in names:  # recorded one by one, as the patterns of all layers would be too much
            with record(model, name, stop=True) as seen:
                there.run(model)
            value = seen[name]
            rows.append(
                copies.metric_per_edit(name, partial(_put, name, value, dim), value.shape[dim], value.numel())
            )
            if progress is not None:
                progress(len(rows) * value.shape[dim], len(names) * value.shape[dim])
    values = torch.stack(rows)
    places = _names_of(site, axis, here.inputs, there.inputs, tok) or tuple(map(str, range(values.shape[1])))
    return ActivationPatching((values - before) / (after - before), values, before, after, site, axis, places)


@dataclass(frozen=True, eq=False)
class PathEffect(HtmlDisplay):
    """The output with one path patched, and what that does to a measure.

    >>> one = torch.tensor(1.0)
    >>> PathEffect(torch.zeros(1, 1, 2), one / 2, one / 2, 0 * one, one, "z.0[head=1]", "q.1[head=0]").effect
    tensor(0.5000)
    """

    axes: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "output": ("batch", "position", "logit"),  # or what else the model's head gives
        "effect": (),
        "value": (),
        "before": (),
        "after": (),
    }
    output: Tensor
    effect: Tensor  # 0: the measure is that on `into`; 1: that on `clean`
    metric_value: Tensor  # the measure itself, with the patch
    corrupted_baseline: Tensor  # the measure on `into`
    clean_baseline: Tensor  # the measure on `clean`
    sender: str
    receiver: str

    def _drawing(self) -> str:
        figures = torch.stack([self.corrupted_baseline, self.metric_value, self.clean_baseline])
        caption = f"{self.sender} through {self.receiver}: effect {self.effect.item():.3f}"
        return bars(figures, names=["on into", "with the path patched", "on clean"], caption=caption)


def path_patching(
    model: nn.Module,
    corrupted: Prompt,
    clean: Prompt,
    sender: str,
    receiver: str,
    *,
    metric: Metric | None = None,
    **call: Any,  # noqa: ANN401
) -> PathEffect:
    """Patch one path alone: from a head, straight along the stream, into the queries, keys or values of a later one.

    `sender` is a head's output such as `z.1[head=3]`, `receiver` what a later head reads, such as `q.4[head=2]`;
    keys and values are counted by the heads that have their own. What the receiver would get is found with the sender
    as on `clean` while everything between them that writes to the stream, all heads and feed-forward layers, is held
    as on `into`; then that alone is put into a plain run on `into`. Norms on the way are not held: they belong to the
    path. With the norm after each sum, the stream itself passes one after every layer between, so that there a path
    is what is left of the sender after all of these, and what it does to the scale of the rest. `measure` is that of
    `sweep`, `call` that of `patch`.

    >>> import glasshouse as gh
    >>> model = gh.build(gh.preset("tiny-decoder", init="normal"))
    >>> a, b = torch.tensor([[1, 2, 3]]), torch.tensor([[1, 5, 3]])
    >>> found = path(model, a, b, "z.0[head=1]", "q.1[head=2]", measure=lambda logits: logits[0, -1, 7])
    >>> found.output.shape, found.effect.shape
    (torch.Size([1, 3, 256]), torch.Size([]))
    """
    here, there = _prompts(corrupted, clean, call)
    sending, receiving, between = _ends(model, sender, receiver)
    with eval_mode(model):
        with record(model, *between) as unpatched:
            on_into = here.run(model)
        with record(model, sending.name) as sent:
            on_out_of = there.run(model)
        measured, before, after = _measured(model, (here, there), (on_into, on_out_of), metric)
        # The sender comes last and has the last word on its own layer, whose other heads stay as they were.
        with edit(model, _as_seen(unpatched) | _as_seen(sent)), record(model, receiving.name, stop=True) as received:
            here.run(model)
        with edit(model, _as_seen(received)):
            output = here.run(model)
        value = measured(output)
    effect = (value - before) / (after - before)
    return PathEffect(output, effect, value, before, after, sending.name, receiving.name)


def layers_of(model: nn.Module, site: str) -> tuple[list[str], tuple[str, ...]]:
    """Return the names of a site in each layer, and its axes.

    >>> import glasshouse as gh
    >>> layers_of(gh.build(gh.preset("tiny-decoder")), "ffn_out")
    (['ffn_out.0', 'ffn_out.1'], ('batch', 'position', 'width'))
    """
    known = sites(model)
    names = [name for name in known if _stem(name) == site]
    if not names:
        stems = dict.fromkeys(stem for stem in map(_stem, known) if stem)
        raise InputError(f"the layers have no site {site!r}, named without a number; {did_you_mean(site, stems)}")
    return names, known[names[0]].axes


def draw_layers(values: Tensor, places: Sequence[str], axis: str, caption: str) -> str:
    """Draw values [layer, place], of which only the first are shown where there are too many."""
    left = len(places) - MOST_COLUMNS
    caption += f"; {left} more {axis}s are not shown" if left > 0 else ""
    rows = [f"layer {layer}" for layer in range(len(values))]
    return heatmap(values[:, :MOST_COLUMNS], rows=rows, columns=places[:MOST_COLUMNS], caption=caption)


def _inputs(prompt: Prompt) -> tuple[Tensor, ...]:
    return (prompt,) if isinstance(prompt, Tensor) else tuple(prompt)


def _as_seen(seen: Recording) -> dict[str, Change]:
    """Return the edits that put what was recorded back where it stood."""

    def put(name: str, value: Tensor, old: Tensor) -> Tensor:
        _check_alike(name, value, old)
        return value

    return {name: partial(put, name, value) for name, value in seen.items()}


def _put(name: str, value: Tensor, axis: int, old: Tensor, place: int) -> None:
    """Put one place of a value where it belongs in another."""
    _check_alike(name, value, old)
    old.select(axis, place).copy_(value.select(axis, place))


def _check_alike(name: str, value: Tensor, old: Tensor) -> None:
    if value.shape != old.shape:
        raise InputError(
            f"{name} has shape {list(value.shape)} on clean, but {list(old.shape)} on into; give prompts that have "
            "the same there."
        )


def _measured(
    model: nn.Module, prompts: tuple[_Prompt, _Prompt], outputs: tuple[Tensor, Tensor], metric: Metric | None
) -> tuple[Callable[[Tensor], Tensor], Tensor, Tensor]:
    """Return what measures an output on `into`, and what is measured on either prompt."""
    if metric is None:
        measured, other = (scalar_metric(one) for one in logit_diff_metrics(model, *prompts, *outputs))
    else:
        measured = other = scalar_metric(metric)
    before, after = measured(outputs[0]), other(outputs[1])
    if not bool((after - before).abs() > 0):
        raise InputError(
            f"the measure is {before.item():.6g} on into and {after.item():.6g} on clean, so there is no difference "
            "to explain; give another measure or other prompts."
        )
    return measured, before, after


def _stem(name: str) -> str:
    """Return a site's name without its layer; nothing where it has none."""
    stem, _, layer = name.rpartition(".")
    return stem if layer.isdigit() else ""


def _ends(model: nn.Module, sender: str, receiver: str) -> tuple[Selection, Selection, list[str]]:
    """Return both ends of a path, and every site that writes to the stream from the sender on to the receiver."""
    ends: list[Selection] = []
    for what, name, kinds in (("sender", sender, SENDERS), ("receiver", receiver, RECEIVERS)):
        found = select(model, name)
        if len(found) > 1 or _stem(found[0].site.name).rpartition(".")[2] not in kinds:
            raise InputError(
                f"the {what} is {name!r}, but it must be one site of {', '.join(kinds)}; name its layer."
            )
        ends += found
    sending, receiving = ends
    known = list(sites(model))
    first, last = (known.index(end.site.name) for end in ends)
    stacks = {_stem(end.site.name).rpartition(".")[0] for end in ends}
    if len(stacks) > 1 or first > last:
        raise InputError(
            f"nothing leads along the stream from {sending.name} to {receiving.name}; take a sender from an earlier "
            "layer of the same stack."
        )
    return sending, receiving, [name for name in known[first:last] if _stem(name).rpartition(".")[2] in WRITERS]


def _names_of(
    site: str, axis: str, here: tuple[Tensor, ...], there: tuple[Tensor, ...], tok: Tokenizer | None
) -> tuple[str, ...]:
    """Return the tokens of the places, both where the prompts differ; none where places are no tokens of one row."""
    if axis not in ("position", "query", "key") or len(here[-1]) > 1:
        return ()
    of_source = site.startswith("encoder.") or site.endswith(("cross_k", "cross_v"))
    which = 0 if of_source or (axis == "key" and "cross" in site) else -1
    pairs = zip(labels(here[which][0], tok), labels(there[which][0], tok), strict=True)
    return tuple(old if old == new else f"{old} → {new}" for old, new in pairs)
