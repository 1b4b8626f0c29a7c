"""Path patching: the effect of one component on later ones, directly through the residual stream."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from glasshouse.errors import InputError
from glasshouse.inspection.display.html import Bars, Drawing, HtmlDisplay
from glasshouse.inspection.editing import Change, edit
from glasshouse.inspection.inputs.call_arguments import CallArguments
from glasshouse.inspection.inputs.forward_pass import eval_mode, final_stack
from glasshouse.inspection.patching.activation_patching import (
    Prompt,
    metric_and_baselines,
    patches_of,
    prompt_pair,
    stem_of,
)
from glasshouse.inspection.patching.metrics import Metric
from glasshouse.inspection.recording import record
from glasshouse.inspection.sites import select, sites, unwrap_model
from glasshouse.text import Tokenizer

WRITERS = ("embed", "z", "cross_z", "ffn_out")  # the sites that determine everything added to the residual stream
HEADS = ("q", "k", "v", "cross_q", "cross_k", "cross_v")  # readers, besides ffn and logits
NEURONS = ("gate", "hidden_pre", "hidden")  # what a feed-forward layer makes of what it reads: the first it has


@dataclass(frozen=True, eq=False, repr=False)
class PathEffect(HtmlDisplay):
    """The output with one path patched, and the effect on a metric.

    >>> one = torch.tensor(1.0)
    >>> path = ("z.0[head=1]", "q.1[head=0]")
    >>> PathEffect(torch.zeros(1, 1, 2), one / 2, one / 2, 0 * one, one, path).effect
    tensor(0.5000)
    """

    axes: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "output": ("batch", "position", "logit"),  # or the axes of another head's output
        "effect": (),
        "metric_value": (),
        "corrupted_baseline": (),
        "clean_baseline": (),
    }
    output: Tensor
    effect: Tensor  # 0: the metric is that of the corrupted run; 1: that of the clean run
    metric_value: Tensor  # with the patch
    corrupted_baseline: Tensor  # the metric on `corrupted`
    clean_baseline: Tensor  # the metric on `clean`
    path: tuple[str, ...]

    def _drawings(self) -> list[Drawing]:
        values = torch.stack([self.corrupted_baseline, self.metric_value, self.clean_baseline])
        caption = f"{' through '.join(self.path)}: effect {self.effect.item():.3f}"
        return [Bars(values, ["corrupted", "path patched", "clean"], caption)]


def path_patching(
    model: nn.Module,
    corrupted: Prompt,
    clean: Prompt,
    *path: str | Sequence[str],
    metric: Metric | None = None,
    tok: Tokenizer | None = None,
    **model_kwargs: Any,  # noqa: ANN401
) -> PathEffect:
    """Patch a path: from a writer, directly through the residual stream, into a later reader, and on from there.

    The first of `path` is what a component writes: `embed`, a head such as `z.1[head=3]`, `ffn_out.0`. Each further
    one is what a later component reads: queries, keys or values such as `q.4[head=2]`, keys and values by KV head,
    `ffn.2`, or `logits`. Several in one place, as a list, are patched together: from one head through the keys of two
    into the logits is `"z.0[head=1]", ["k.2[head=0]", "k.2[head=3]"], "logits"`.

    What a reader is given is computed with the writers before it on the path patched, and every other head and
    feed-forward layer frozen as on `corrupted`. The last readers are then patched into a run on `corrupted`. Norms on
    the path are not frozen. With post-norm the residual stream itself passes a norm after every layer, so the path
    includes what a writer does to the scale of the rest. `metric` is that of `activation_patching`, `model_kwargs`
    and `tok` are those of `patch`.

    >>> import glasshouse as gh
    >>> model = gh.build(gh.preset("tiny-decoder", init="normal"))
    >>> a, b = torch.tensor([[1, 2, 3]]), torch.tensor([[1, 5, 3]])
    >>> found = path_patching(model, a, b, "z.0[head=1]", "q.1[head=2]", metric=lambda logits: logits[0, -1, 7])
    >>> found.output.shape, found.effect.shape
    (torch.Size([1, 3, 256]), torch.Size([]))
    """
    here, there = prompt_pair(model, corrupted, clean, model_kwargs, tok)
    if len(path) < 2:
        raise InputError(f"path is {path!r}, but it leads from a writer into a reader; give both, or more readers.")
    first, *rest = ([place] if isinstance(place, str) else list(place) for place in path)
    if not all((first, *rest)):
        raise InputError(f"path is {path!r}, in which a place is empty; name a writer or reader at each.")
    writers = [_writer(model, name) for name in first]
    places = [[_reader(model, name) for name in place] for place in rest]
    with eval_mode(model):
        with record(model, *(name for name in sites(model) if _kind(name) in WRITERS[1:])) as unpatched:
            corrupted_output = here.run(model)
        with record(model, *writers) as sent:
            clean_output = there.run(model)
        outputs = (corrupted_output, clean_output)
        scalar, corrupted_baseline, clean_baseline = metric_and_baselines(model, (here, there), outputs, metric)
        frozen, patches = patches_of(unpatched), patches_of(sent)
        for readers in places:
            _check_order(model, writers, readers)
            # The path's patches come last: of a layer they override some heads, whose other heads stay frozen.
            received = _received(model, here, frozen | patches, readers)
            if readers is not places[-1]:
                patches = _written(model, here, received, readers)
                writers = list(patches)
        with edit(model, received):
            output = here.run(model)
        value = scalar(output)
    return PathEffect(
        output=output,
        effect=(value - corrupted_baseline) / (clean_baseline - corrupted_baseline),
        metric_value=value,
        corrupted_baseline=corrupted_baseline,
        clean_baseline=clean_baseline,
        path=tuple(place if isinstance(place, str) else " and ".join(place) for place in path),
    )


class _Reader(NamedTuple):
    """A reader: the sites at which what it is given is patched, and what its component writes."""

    name: str
    sites: list[str]  # with an index
    writes: list[str]  # z of its heads, or ffn_out; nothing for the logits


def _writer(model: nn.Module, name: str) -> str:
    """Return the name of a site that writes to the residual stream."""
    found = select(model, name)
    if len(found) > 1 or _kind(found[0].site.name) not in WRITERS:
        raise InputError(f"the writer is {name!r}, but it must be one site of {', '.join(WRITERS)}; name its layer.")
    return found[0].name


def _reader(model: nn.Module, name: str) -> _Reader:
    """Return a reader by its name."""
    known = sites(model)
    stem, _, layer = name.rpartition(".")
    if name == "logits":
        return _Reader(name, [f"{final_stack(unwrap_model(model))[0]}final"], [])
    if stem.rpartition(".")[2] == "ffn" and f"{name[: -len(layer) - 4]}ffn_out.{layer}" in known:
        prefix = stem.removesuffix("ffn")
        neurons = [f"{prefix}{one}.{layer}" for one in NEURONS if f"{prefix}{one}.{layer}" in known]
        before = [one for one in neurons if _kind(one) != "hidden"]
        return _Reader(name, before or neurons, [f"{prefix}ffn_out.{layer}"])
    found = [] if stem.rpartition(".")[2] == "ffn" else select(model, name)
    if len(found) != 1 or _kind(found[0].site.name) not in HEADS:
        known_kinds = ", ".join(HEADS)
        raise InputError(
            f"the reader is {name!r}, but it must be one site of {known_kinds}, or ffn with its layer, or logits."
        )
    (one,) = found
    stem, _, layer = one.site.name.rpartition(".")
    n_heads, n_kv_heads = (getattr(unwrap_model(model).spec, size) for size in ("n_heads", "n_kv_heads"))
    group = 1 if stem.endswith("q") else n_heads // n_kv_heads
    number = one.index[1]
    if isinstance(number, int) and not -(n_heads // group) <= number < n_heads // group:
        kind = "heads" if group == 1 else "KV heads"
        raise InputError(f"the reader is {name!r}, but there are {n_heads // group} {kind}, counted from 0.")
    chosen = range(n_heads // group)[number]
    heads = [
        head * group + each for head in ([chosen] if isinstance(chosen, int) else chosen) for each in range(group)
    ]
    return _Reader(one.name, [one.name], [f"{stem[:-1]}z.{layer}[head={head}]" for head in heads])


def _check_order(model: nn.Module, writers: Sequence[str], readers: Sequence[_Reader]) -> None:
    """Raise InputError unless each writer comes before a reader of its stream, and each reader after a writer."""
    order = list(sites(model))

    def leads(writer: str, reader: _Reader) -> bool:
        into = reader.sites[0]
        # Cross-attention reads its keys and values from the encoder's stream.
        stream = "encoder." if _kind(into) in ("cross_k", "cross_v") else _stack(into)
        return _stack(writer) == stream and order.index(_whole(writer)) < order.index(_whole(into))

    for one in writers:
        if not any(leads(one, reader) for reader in readers):
            raise _no_path(one, readers[0].name)
    for reader in readers:
        if not any(leads(one, reader) for one in writers):
            raise _no_path(writers[0], reader.name)


def _no_path(writer: str, reader: str) -> InputError:
    return InputError(
        f"there is no path through the residual stream from {writer} to {reader}; "
        "give a writer before the reader, in the same stack."
    )


def _received(
    model: nn.Module, here: CallArguments, edits: Mapping[str, Change], readers: Sequence[_Reader]
) -> dict[str, Change]:
    """Return the patches of what readers are given under some edits."""
    with edit(model, edits), record(model, *(site for one in readers for site in one.sites), stop=True) as received:
        here.run(model)
    return patches_of(received)


def _written(
    model: nn.Module, here: CallArguments, received: Mapping[str, Change], readers: Sequence[_Reader]
) -> dict[str, Change]:
    """Return the patches of what the components of readers write, each run with its own readers alone."""
    found: dict[str, Change] = {}
    for site in dict.fromkeys(_whole(name) for one in readers for name in one.writes):
        its = [one for one in readers if site in map(_whole, one.writes)]
        names = dict.fromkeys(name for one in its for name in one.writes)
        given = {name: received[name] for one in its for name in one.sites}
        with edit(model, given), record(model, *names, stop=True) as seen:
            here.run(model)
        found |= patches_of(seen)
    return found


def _whole(name: str) -> str:
    """Return a site's name without its index."""
    return name.partition("[")[0]


def _kind(name: str) -> str:
    """Return a site's name without its stack, layer and index."""
    return (stem_of(_whole(name)) or _whole(name)).rpartition(".")[2]


def _stack(name: str) -> str:
    """Return the prefix of the stack of a site: that before its kind."""
    return _whole(name).partition(_kind(name))[0]
