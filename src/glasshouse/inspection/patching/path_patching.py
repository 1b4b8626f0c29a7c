"""Path patching: the effect of one head on another, directly through the residual stream."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from glasshouse.errors import InputError
from glasshouse.inspection.display.html import Bars, Drawing, HtmlDisplay
from glasshouse.inspection.editing import edit
from glasshouse.inspection.inputs.forward_pass import eval_mode
from glasshouse.inspection.patching.activation_patching import (
    Prompt,
    metric_and_baselines,
    patches_of,
    prompt_pair,
    stem_of,
)
from glasshouse.inspection.patching.metrics import Metric
from glasshouse.inspection.recording import record
from glasshouse.inspection.sites import Selection, select, sites
from glasshouse.text import Tokenizer

SENDERS, RECEIVERS = ("z", "cross_z"), ("q", "k", "v", "cross_q")
WRITERS = (*SENDERS, "ffn_out")  # the sites that determine everything added to the residual stream


@dataclass(frozen=True, eq=False, repr=False)
class PathEffect(HtmlDisplay):
    """The output with one path patched, and the effect on a metric.

    >>> one = torch.tensor(1.0)
    >>> PathEffect(torch.zeros(1, 1, 2), one / 2, one / 2, 0 * one, one, "z.0[head=1]", "q.1[head=0]").effect
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
    sender: str
    receiver: str

    def _drawings(self) -> list[Drawing]:
        values = torch.stack([self.corrupted_baseline, self.metric_value, self.clean_baseline])
        caption = f"{self.sender} through {self.receiver}: effect {self.effect.item():.3f}"
        return [Bars(values, ["corrupted", "path patched", "clean"], caption)]


def path_patching(
    model: nn.Module,
    corrupted: Prompt,
    clean: Prompt,
    sender: str,
    receiver: str,
    *,
    metric: Metric | None = None,
    tok: Tokenizer | None = None,
    **model_kwargs: Any,  # noqa: ANN401
) -> PathEffect:
    """Patch one path: from a head, directly through the residual stream, into queries, keys or values of a later one.

    `sender` is a head's output such as `z.1[head=3]`, `receiver` an input of a later head, such as `q.4[head=2]`;
    keys and values are indexed by KV head. The receiver's activation is computed with the sender patched from `clean`
    and all other heads and feed-forward layers between them frozen as on `corrupted`; then the receiver alone is
    patched into a run on `corrupted`. Norms on the path are not frozen. With post-norm the residual stream itself
    passes a norm after every layer, so the path includes what the sender does to the scale of the rest. `metric` is
    that of `activation_patching`, `model_kwargs` and `tok` are those of `patch`.

    >>> import glasshouse as gh
    >>> model = gh.build(gh.preset("tiny-decoder", init="normal"))
    >>> a, b = torch.tensor([[1, 2, 3]]), torch.tensor([[1, 5, 3]])
    >>> found = path_patching(model, a, b, "z.0[head=1]", "q.1[head=2]", metric=lambda logits: logits[0, -1, 7])
    >>> found.output.shape, found.effect.shape
    (torch.Size([1, 3, 256]), torch.Size([]))
    """
    here, there = prompt_pair(model, corrupted, clean, model_kwargs, tok)
    sending, receiving, between = _ends(model, sender, receiver)
    with eval_mode(model):
        with record(model, *between) as unpatched:
            corrupted_output = here.run(model)
        with record(model, sending.name) as sent:
            clean_output = there.run(model)
        outputs = (corrupted_output, clean_output)
        scalar, corrupted_baseline, clean_baseline = metric_and_baselines(model, (here, there), outputs, metric)
        # The sender's patch comes last: it overrides one head of its layer, whose other heads stay frozen.
        with (
            edit(model, patches_of(unpatched) | patches_of(sent)),
            record(model, receiving.name, stop=True) as received,
        ):
            here.run(model)
        with edit(model, patches_of(received)):
            output = here.run(model)
        value = scalar(output)
    return PathEffect(
        output=output,
        effect=(value - corrupted_baseline) / (clean_baseline - corrupted_baseline),
        metric_value=value,
        corrupted_baseline=corrupted_baseline,
        clean_baseline=clean_baseline,
        sender=sending.name,
        receiver=receiving.name,
    )


def _ends(model: nn.Module, sender: str, receiver: str) -> tuple[Selection, Selection, list[str]]:
    """Return both ends of a path, and every site between them that writes to the residual stream."""
    ends: list[Selection] = []
    for what, name, kinds in (("sender", sender, SENDERS), ("receiver", receiver, RECEIVERS)):
        found = select(model, name)
        if len(found) > 1 or stem_of(found[0].site.name).rpartition(".")[2] not in kinds:
            raise InputError(
                f"the {what} is {name!r}, but it must be one site of {', '.join(kinds)}; name its layer."
            )
        ends += found
    sending, receiving = ends
    known = list(sites(model))
    first, last = (known.index(end.site.name) for end in ends)
    stacks = {stem_of(end.site.name).rpartition(".")[0] for end in ends}
    if len(stacks) > 1 or first > last:
        raise InputError(
            f"there is no path through the residual stream from {sending.name} to {receiving.name}; give a sender in "
            "an earlier layer of the same stack."
        )
    return sending, receiving, [name for name in known[first:last] if stem_of(name).rpartition(".")[2] in WRITERS]
