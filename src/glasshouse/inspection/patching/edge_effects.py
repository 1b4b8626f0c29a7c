"""The effect of every edge between the components of a model, estimated by gradients or patched one by one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from glasshouse.errors import InputError, check_count
from glasshouse.inspection.display.html import Bars, Drawing, HtmlDisplay, Picture
from glasshouse.inspection.inputs.forward_pass import eval_mode
from glasshouse.inspection.patching.activation_patching import Prompt, prompt_pair
from glasshouse.inspection.patching.edge_runner import EdgeScorer
from glasshouse.inspection.patching.metrics import Metric
from glasshouse.text import Tokenizer

Edge = tuple[str, str]  # the names of a writer and of a reader

MAX_BARS = 30
AT_ONCE = 64  # edges whose masks are in memory


@dataclass(frozen=True, eq=False, repr=False)
class EdgeEffects(HtmlDisplay):
    """The effect of edges on a metric: 0 as on the corrupted prompt, 1 as on the clean one; NaN where not known.

    >>> one = torch.tensor(1.0)
    >>> effect = torch.tensor([[0.25, torch.nan], [0.5, -1.0]])
    >>> found = EdgeEffects(effect, ("q", "logits"), ("embed", "z"), 0 * one, one)
    >>> found.top(2)
    [('z', 'logits'), ('embed', 'logits')]
    """

    axes: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "effect": ("reader", "writer"),
        "corrupted_baseline": (),
        "clean_baseline": (),
    }
    effect: Tensor
    readers: tuple[str, ...]
    writers: tuple[str, ...]
    corrupted_baseline: Tensor  # the metric on `corrupted`
    clean_baseline: Tensor  # the metric on `clean`

    def top(self, n: int) -> list[Edge]:
        """Return the n edges with the largest effects, positive or negative, largest first."""
        return [(self.writers[column], self.readers[row]) for row, column in ranked(self.effect)[:n].tolist()]

    def __getitem__(self, edge: Edge) -> float:
        """Return the effect of an edge from a writer into a reader."""
        writer, reader = edge
        if writer not in self.writers or reader not in self.readers:
            raise InputError(f"there is no edge {edge!r}; give a writer and a reader, such as {self.top(1)[0]!r}.")
        return float(self.effect[self.readers.index(reader), self.writers.index(writer)])

    def _drawings(self) -> list[Drawing]:
        edges = self.top(MAX_BARS)
        values = torch.tensor([self[edge] for edge in edges])
        names = [f"{writer} → {reader}" for writer, reader in edges]
        left = int(self.effect.isfinite().sum()) - len(edges)
        more = f"; {left} more edges are not shown" if left > 0 else ""
        caption = f"effect of each edge: 0 as corrupted, 1 as clean{more}"
        return [Bars(values, names, caption), Picture(self.effect, "effect of each edge, reader by writer")]


def edge_attribution(
    model: nn.Module,
    corrupted: Prompt,
    clean: Prompt,
    *,
    metric: Metric | None = None,
    steps: int = 5,
    tok: Tokenizer | None = None,
    **model_kwargs: Any,  # noqa: ANN401
) -> EdgeEffects:
    """Estimate the effect of patching each edge alone from `clean` into a run on `corrupted`.

    An edge leads from a writer to the residual stream (`embed`, a head such as `z.0[head=1]`, `ffn_out.0`) directly
    into a later reader (`q.1[head=2]`, `k`, `v`, `ffn.1`, `logits`). Its effect is estimated as the difference of
    what its writer writes, times the gradient of the metric by what its reader is given: the mean over `steps`
    prompts between both, whose embeddings are interpolated (edge attribution patching with integrated gradients,
    Hanna et al. 2024), or with 1 step the gradient on `corrupted` itself (Syed et al. 2023). `metric`, `tok` and
    `model_kwargs` are as in `activation_patching`.

    >>> import glasshouse as gh
    >>> model = gh.build(gh.preset("tiny-decoder", init="normal"))
    >>> a, b = torch.tensor([[1, 2, 3]]), torch.tensor([[1, 2, 5]])
    >>> found = edge_attribution(model, a, b, metric=lambda logits: logits[0, -1, 7])
    >>> found.effect.shape, len(found.top(3))
    (torch.Size([19, 11]), 3)
    """
    check_count("steps", steps)
    prompts = prompt_pair(model, corrupted, clean, model_kwargs, tok)
    with eval_mode(model):
        scorer = EdgeScorer(model, *prompts, metric)
        return edge_effects(scorer, scorer.attribution(steps))


def edge_attribution_by_position(
    model: nn.Module,
    corrupted: Prompt,
    clean: Prompt,
    edge: Edge,
    *,
    metric: Metric | None = None,
    steps: int = 5,
    tok: Tokenizer | None = None,
    **model_kwargs: Any,  # noqa: ANN401
) -> Tensor:
    """Estimate the effect of patching one edge at each position alone: where in the text it matters.

    The positions, [S], sum to the effect of `edge_attribution`, whose arguments these are. They are those of the
    stream that the reader reads: of keys and values the positions attended to, and in cross-attention those of the
    source.

    >>> import glasshouse as gh
    >>> model = gh.build(gh.preset("tiny-decoder", init="normal"))
    >>> a, b = torch.tensor([[1, 2, 3]]), torch.tensor([[1, 2, 5]])
    >>> edge = ("z.0[head=1]", "logits")
    >>> found = edge_attribution_by_position(model, a, b, edge, metric=lambda logits: logits[0, -1, 7])
    >>> found.shape, found[:2].abs().sum()  # the metric depends on the last position alone
    (torch.Size([3]), tensor(0.))
    """
    check_count("steps", steps)
    prompts = prompt_pair(model, corrupted, clean, model_kwargs, tok)
    with eval_mode(model):
        return EdgeScorer(model, *prompts, metric).attribution_by_position(*edge, steps)


def edge_patching(
    model: nn.Module,
    corrupted: Prompt,
    clean: Prompt,
    edges: Sequence[Edge] | None = None,
    *,
    metric: Metric | None = None,
    tok: Tokenizer | None = None,
    progress: Callable[[int, int], None] | None = None,
    **model_kwargs: Any,  # noqa: ANN401
) -> EdgeEffects:
    """Patch each edge alone from `clean` into a run on `corrupted`, and return its effect.

    `edges` are pairs of names such as `("z.0[head=1]", "k.1[head=2]")`, by default all. Each takes a forward pass, so
    take the largest of `edge_attribution`, which estimates them all in a few passes. `metric`, `tok` and
    `model_kwargs` are as in `activation_patching`.

    >>> import glasshouse as gh
    >>> model = gh.build(gh.preset("tiny-decoder", init="normal"))
    >>> a, b = torch.tensor([[1, 2, 3]]), torch.tensor([[1, 2, 5]])
    >>> metric = lambda logits: logits[0, -1, 7]
    >>> estimated = edge_attribution(model, a, b, metric=metric)
    >>> exact = edge_patching(model, a, b, estimated.top(2), metric=metric)
    >>> int(exact.effect.isfinite().sum())
    2
    """
    if edges is not None and (not len(edges) or any(isinstance(one, str) or len(one) != 2 for one in edges)):
        raise InputError(f"edges is {edges!r}, but it must be a list of pairs of a writer and a reader.")
    prompts = prompt_pair(model, corrupted, clean, model_kwargs, tok)
    with eval_mode(model):
        scorer = EdgeScorer(model, *prompts, metric)
        exists = scorer.graph.exists
        places = exists.nonzero() if edges is None else torch.tensor([scorer.graph.place(*edge) for edge in edges])
        effect = torch.full(exists.shape, torch.nan, dtype=scorer.clean_baseline.dtype)
        done = 0
        for rows, columns in (some.unbind(1) for some in places.split(AT_ONCE)):
            patched = torch.zeros(len(rows), *exists.shape)
            patched[torch.arange(len(rows)), rows, columns] = 1
            effect[rows, columns] = scorer.effects(exists.expand_as(patched), patched).cpu()
            done += len(rows)
            if progress is not None:
                progress(done, len(places))
        return edge_effects(scorer, effect)


def edge_effects(scorer: EdgeScorer, effect: Tensor) -> EdgeEffects:
    """Return effects [reader, writer] with their names and baselines."""
    names = tuple(scorer.graph.reader_names), tuple(scorer.graph.writer_names)
    return EdgeEffects(effect, *names, scorer.corrupted_baseline, scorer.clean_baseline)


def ranked(effect: Tensor) -> Tensor:
    """Return the row and column of each effect that is known, the largest, positive or negative, first, [n, 2].

    >>> ranked(torch.tensor([[1.0, torch.nan], [-3.0, 2.0]])).tolist()
    [[1, 0], [1, 1], [0, 0]]
    """
    places = effect.isfinite().nonzero()
    return places[effect[tuple(places.T)].abs().argsort(descending=True, stable=True)]
