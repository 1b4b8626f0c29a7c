"""Circuits: the smallest set of edges found that holds a behaviour, every other edge being corrupted."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from glasshouse.errors import InputError, StoreError, check_count
from glasshouse.inspection.display.html import Bars, Drawing, HtmlDisplay, Table
from glasshouse.inspection.inputs.forward_pass import eval_mode
from glasshouse.inspection.patching.activation_patching import Prompt, prompt_pair
from glasshouse.inspection.patching.edge_effects import Edge, ranked
from glasshouse.inspection.patching.edge_graph import EdgeGraph
from glasshouse.inspection.patching.edge_runner import EdgeRunner, EdgeScorer
from glasshouse.inspection.patching.metrics import Metric
from glasshouse.inspection.sites import unwrap_model
from glasshouse.inspection.steering import model_fingerprint
from glasshouse.text import Tokenizer

MAX_BARS = 60
N_SIZES = 12  # sizes tried at once
N_RANDOM = 10  # circuits of drawn edges to compare with
MAX_PATHS = 1000  # drawn for each
KIND = "circuit"


@dataclass(frozen=True, eq=False, repr=False)
class Circuit(HtmlDisplay):
    """Edges that hold a behaviour of one model, and how well.

    The model is run on the clean prompt with these edges alone: every other edge carries what its writer writes on
    the corrupted prompt.
    """

    edges: dict[Edge, float]  # (writer, reader): the estimated effect of the edge alone, the largest first
    faithfulness: float  # the effect of the edges together: 0 as the corrupted run, 1 as the clean run
    completeness: float  # 1 minus the effect of all other edges together: 1 if nothing is left of the behaviour
    random_faithfulness: float  # the median over circuits of as many edges, on paths drawn at random
    n_possible: int  # edges of the model
    fingerprint: str  # of the model

    @property
    def share(self) -> float:
        """The edges of the circuit as a share of all."""
        return len(self.edges) / self.n_possible

    @property
    def components(self) -> list[str]:
        """The writers of the circuit, in the order of the largest effect of their edges."""
        return list(dict.fromkeys(writer for writer, _ in self.edges))

    def run(
        self,
        model: nn.Module,
        corrupted: Prompt,
        clean: Prompt,
        *,
        tok: Tokenizer | None = None,
        **model_kwargs: Any,  # noqa: ANN401
    ) -> Tensor:
        """Return the output of the model run with nothing but the circuit, on any pair of prompts.

        >>> import glasshouse as gh
        >>> model = gh.build(gh.preset("tiny-decoder", init="normal"))
        >>> a, b = torch.tensor([[1, 2, 3]]), torch.tensor([[1, 2, 5]])
        >>> found = circuit(model, a, b, metric=lambda logits: logits[0, -1, 7])
        >>> found.run(model, a, b).shape
        torch.Size([1, 3, 256])
        """
        prompts = prompt_pair(model, corrupted, clean, model_kwargs, tok)
        with eval_mode(model):
            runner = EdgeRunner(model, *prompts)
            return runner.run(*_choice(runner.graph, self._mask(model, runner.graph)[None]))[0]

    def effect(
        self,
        model: nn.Module,
        corrupted: Prompt,
        clean: Prompt,
        *,
        metric: Metric | None = None,
        tok: Tokenizer | None = None,
        **model_kwargs: Any,  # noqa: ANN401
    ) -> float:
        """Return the faithfulness of the circuit on another pair of prompts, or by another metric."""
        prompts = prompt_pair(model, corrupted, clean, model_kwargs, tok)
        with eval_mode(model):
            scorer = EdgeScorer(model, *prompts, metric)
            return float(scorer.effects(*_choice(scorer.graph, self._mask(model, scorer.graph)[None]))[0])

    def _mask(self, model: nn.Module, graph: EdgeGraph) -> Tensor:
        """Return which edges of the model belong to the circuit, [reader, writer]."""
        if self.fingerprint != model_fingerprint(unwrap_model(model)):
            raise InputError("the circuit is that of another model, whose weights differ; find one for this model.")
        mask = torch.zeros_like(graph.exists)
        for edge in self.edges:
            mask[graph.place(*edge)] = True
        return mask

    def save(self, path: str | Path, *, caption: str = "") -> None:
        """Write it as .json, to be loaded again, or draw it as .svg or .html."""
        if Path(path).suffix.lower() != ".json":
            return super().save(path, caption=caption)
        values = {name: value for name, value in vars(self).items() if name != "edges"}
        edges = [[*edge, effect] for edge, effect in self.edges.items()]
        Path(path).write_text(json.dumps({"kind": KIND, **values, "edges": edges}, indent=1) + "\n", "utf-8")
        return None

    @classmethod
    def load(cls, path: str | Path) -> Circuit:
        """Read a file of `save`."""
        try:
            given = json.loads(Path(path).read_text("utf-8"))
            edges = {(str(writer), str(reader)): float(effect) for writer, reader, effect in given.pop("edges")}
            if given.pop("kind") != KIND:
                raise ValueError
            return cls(edges=edges, **{name: cls._types[name](value) for name, value in given.items()})
        except FileNotFoundError:
            raise StoreError(f"there is no {str(path)!r}; make it with save.") from None
        except (ValueError, KeyError, TypeError, AttributeError):
            raise StoreError(f"{str(path)!r} is no circuit; make one with gh.circuit(...).save.") from None

    _types: ClassVar[dict[str, Callable[[Any], Any]]] = {
        "faithfulness": float,
        "completeness": float,
        "random_faithfulness": float,
        "n_possible": int,
        "fingerprint": str,
    }

    def __repr__(self) -> str:
        return (
            f"Circuit({len(self.edges)} of {self.n_possible} edges, faithfulness {self.faithfulness:.3f}, "
            f"completeness {self.completeness:.3f}, random {self.random_faithfulness:.3f})"
        )

    def _drawings(self) -> list[Drawing]:
        some = list(self.edges.items())[:MAX_BARS]
        left = len(self.edges) - len(some)
        more = f"; {left} more edges are not shown" if left else ""
        facts = {
            "edges": f"{len(self.edges)} of {self.n_possible} ({self.share:.1%})",
            "faithfulness": f"{self.faithfulness:.3f}",
            "completeness": f"{self.completeness:.3f}",
            "as many edges on random paths": f"{self.random_faithfulness:.3f}",
        }
        names = [f"{writer} → {reader}" for (writer, reader), _ in some]
        values = torch.tensor([effect for _, effect in some])
        return [Table(facts, "circuit"), Bars(values, names, f"estimated effect of each edge alone{more}")]


def circuit(
    model: nn.Module,
    corrupted: Prompt,
    clean: Prompt,
    metric: Metric | None = None,
    *,
    faithfulness: float = 0.9,
    steps: int = 5,
    tok: Tokenizer | None = None,
    progress: Callable[[int, int], None] | None = None,
    **model_kwargs: Any,  # noqa: ANN401
) -> Circuit:
    """Find a small circuit: few edges that hold the behaviour in which `clean` and `corrupted` differ.

    Edges are ranked by `edge_attribution` with these `steps`; of the largest so many are kept that they are faithful,
    as few as a search over sizes finds, and of those each is dropped that can be. A circuit is faithful if the metric
    of the model run with it alone is at least this `faithfulness` of the way from that of the corrupted to that of
    the clean prompt, and not as far beyond. `metric`, `tok` and `model_kwargs` are as in `activation_patching`;
    `progress` is called with the number of edges decided and in all.

    >>> import glasshouse as gh
    >>> model = gh.build(gh.preset("tiny-decoder", init="normal"))
    >>> a, b = torch.tensor([[1, 2, 3]]), torch.tensor([[1, 2, 5]])
    >>> found = circuit(model, a, b, metric=lambda logits: logits[0, -1, 7], faithfulness=0.8)
    >>> found.faithfulness >= 0.8, 0 < len(found.edges) < found.n_possible
    (True, True)
    """
    if not 0 < faithfulness < 1:
        raise InputError(f"faithfulness is {faithfulness!r}, but it must be above 0 and below 1.")
    check_count("steps", steps)
    prompts = prompt_pair(model, corrupted, clean, model_kwargs, tok)
    with eval_mode(model):
        scorer = EdgeScorer(model, *prompts, metric)
        graph, attribution = scorer.graph, scorer.attribution(steps)
        order = ranked(attribution)

        def effects(masks: Tensor) -> Tensor:
            return scorer.effects(*_choice(graph, masks)).cpu()

        def is_faithful(masks: Tensor) -> Tensor:
            return (effects(masks) - 1).abs() <= 1 - faithfulness

        some = _first_faithful(graph, order, is_faithful)
        if progress is not None:
            progress(len(order) - int(some.sum()), len(order))
        some = _without_needless(graph, some, ranked(attribution.where(some, torch.nan)), is_faithful, progress)
        drawn = torch.stack([_drawn(graph, int(some.sum()), seed) for seed in range(N_RANDOM)])
        values = effects(torch.cat([some[None], (graph.exists & ~some)[None], drawn])).tolist()
    places = ranked(attribution.where(some, torch.nan)).tolist()
    return Circuit(
        edges={
            (graph.writer_names[col], graph.reader_names[row]): float(attribution[row, col]) for row, col in places
        },
        faithfulness=values[0],
        completeness=1 - values[1],
        random_faithfulness=float(torch.tensor(values[2:]).median()),
        n_possible=len(order),
        fingerprint=model_fingerprint(unwrap_model(model)),
    )


def _choice(graph: EdgeGraph, masks: Tensor) -> tuple[Tensor, Tensor]:
    """Return which edges carry what is computed, and which what is written on the clean prompt: the embeddings'."""
    is_embedding = torch.tensor([name.endswith("embed") for name in graph.writer_names])
    return masks, masks & is_embedding


def _first_faithful(graph: EdgeGraph, order: Tensor, is_faithful: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the edges of a short beginning of an order that is faithful, [reader, writer]."""

    def beginning(size: int) -> Tensor:
        mask = torch.zeros_like(graph.exists)
        mask[tuple(order[:size].T)] = True
        return mask

    def search(sizes: Sequence[int], low: int, high: int) -> tuple[int, int]:
        """Return the first size that is faithful, or `high`, and the size before it."""
        found = is_faithful(torch.stack([beginning(size) for size in sizes])).tolist()
        first = found.index(True) if True in found else len(sizes)
        return [low, *sizes][first], [*sizes, high][first]

    low, high = 0, len(order)  # all edges give the clean run
    # More edges are not always more faithful, so from few to many before the search narrows down.
    powers = [2**one for one in range(high.bit_length())]
    grid = sorted({size for two in powers for size in (two, two * 3 // 2) if size < high})
    for start in range(0, len(grid), N_SIZES):
        some = grid[start : start + N_SIZES]
        low, high = search(some, low, high)
        if high in some:
            break
    while high - low > 1:
        sizes = sorted({low + max(1, (high - low) * number // (N_SIZES + 1)) for number in range(1, N_SIZES + 1)})
        low, high = search(sizes, low, high)
    return graph.connected(beginning(high))


def _without_needless(
    graph: EdgeGraph,
    edges: Tensor,
    order: Tensor,
    is_faithful: Callable[[Tensor], Tensor],
    progress: Callable[[int, int], None] | None,
) -> Tensor:
    """Return the edges without those that can be dropped, tried in halves from the smallest effect on."""
    waiting, decided = [order.flip(0)], 0
    total = int(graph.exists.sum())
    while waiting:
        group = waiting.pop()
        fewer = edges.clone()
        fewer[tuple(group.T)] = False
        fewer = graph.connected(fewer)
        if torch.equal(fewer, edges) or is_faithful(fewer[None])[0]:
            edges = fewer
        elif len(group) > 1:
            half = len(group) // 2
            waiting += [group[half:], group[:half]]  # the smaller effects are tried first
            continue
        decided += len(group)
        if progress is not None:
            progress(total - len(order) + decided, total)
    return edges


def _drawn(graph: EdgeGraph, size: int, seed: int) -> Tensor:
    """Return at most as many edges on paths that are drawn at random, from the logits back to an embedding."""
    made = torch.Generator().manual_seed(seed)
    mask = torch.zeros_like(graph.exists)
    for _ in range(MAX_PATHS):
        longer = mask.clone()
        for edge in graph.drawn_path(made):
            longer[edge] = True
        if longer.sum() <= size:
            mask = longer
        if mask.sum() == size:
            break
    return mask
