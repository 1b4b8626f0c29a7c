"""What a live page runs: the stacks and the head of a model as graphs, and its weights, rounded to float16."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.export import Dim

from glasshouse.config import JsonDict
from glasshouse.errors import InputError
from glasshouse.inspection import attribution, edit, sites
from glasshouse.inspection.derived_sites import DERIVED
from glasshouse.inspection.inputs.forward_pass import eval_mode, final_stack
from glasshouse.inspection.logit_lens import has_position_logits
from glasshouse.layers import lora
from glasshouse.layers.attend.layout import make_layout
from glasshouse.layers.attention import ProjectionNorm
from glasshouse.layers.cache import ConcatenatedCache
from glasshouse.layers.norm import Norm
from glasshouse.models import Decoder, Encoder, Model, Seq2Seq
from glasshouse.models.heads import LMHead, NoHead, Pooler
from glasshouse.page.live.graph import Graph, export_graph, mark

LENGTH = 5  # of the example that is exported; another length in each place, none 0 or 1, which would be fixed
PAST, SOURCE = 7, 11


@dataclass(frozen=True)
class Program:
    """The graphs by name, and the weights that they refer to by the name of the parameter."""

    graphs: dict[str, Graph]
    weights: dict[str, Tensor]
    axes: dict[str, tuple[str, ...]]  # of each site

    def packed_weights(self) -> bytes:
        """Return all weights one after the other, in float16."""
        return b"".join(one.half().contiguous().numpy().tobytes() for one in self.weights.values())

    def to_json(self) -> JsonDict:
        """Return it as the interpreter reads it, besides the values of the weights."""
        return {
            "graphs": {name: one.to_json() for name, one in self.graphs.items()},
            "weights": {name: list(one.shape) for name, one in self.weights.items()},
            "axes": {name: list(one) for name, one in self.axes.items()},
        }


def rounded(model: Model) -> Model:
    """Return a copy of a model on the CPU in float32, its weights rounded to float16."""
    large = {name: float(one.abs().max()) for name, one in model.named_parameters() if one.abs().max() > 65504}
    for name, most in large.items():
        raise InputError(f"{name} has a weight of {most:.4g}, but float16 ends at 65504; save a snapshot instead.")
    copied = copy.deepcopy(model).cpu().float()
    if lora.lora_layers(copied):
        lora.merge(copied)
    return copied.half().float().eval()


def export_program(model: Model) -> Program:
    """Return the graphs of a model whose weights are rounded already."""
    marked = {name: site for name, site in sites(model).items() if site.hook_point not in DERIVED}
    with eval_mode(model):
        plain = _head_graphs(model)
        with edit(model, {name: mark(name) for name in marked}), _marked_modules(model):
            graphs = _stack_graphs(model) | plain
    names = dict.fromkeys(name for graph in graphs.values() for name in graph.weights)
    state = model.state_dict()
    weights = {name: state[name] for name in names}
    return Program(graphs, weights, {name: site.axes for name, site in marked.items()})


class _Whole(nn.Module):
    """A function of a model's modules as a module, by whose name for them its weights are known."""

    def __init__(self, model: Model, call: Callable[..., object]) -> None:
        super().__init__()
        self.model, self.call = model, call

    def forward(self, inputs: dict[str, object]) -> object:
        return self.call(**inputs)


def _stack_graphs(model: Model) -> dict[str, Graph]:
    """Return the graph of the stack that feeds the head, with the head, and that of the source before it."""
    s = model.spec
    length, past, source = Dim("length", min=2), Dim("past", min=2), Dim("source", min=2)
    ids = torch.zeros(1, LENGTH, dtype=torch.long)
    if isinstance(model, Encoder):
        return {
            "final": export_graph(
                _Whole(model, lambda ids: (model(ids),)), {"ids": ids}, {"ids": {1: length}}, ["logits"]
            )
        }
    stack = final_stack(model)[1]
    shapes = stack.kv_shapes()
    cache: dict[str, object] = {
        name: [torch.zeros(1, shape.n_kv_heads, PAST, shape.d_head) for shape in shapes]
        for name in ("keys", "values")
    }
    dynamic: dict[str, object] = {"ids": {1: length}, **{name: [{2: past}] * len(shapes) for name in cache}}
    outputs = ["logits", "keys", "values"]
    if isinstance(model, Decoder):

        def decode(ids: Tensor, keys: list[Tensor], values: list[Tensor]) -> tuple[object, ...]:
            view = ConcatenatedCache(keys, values)
            return model(ids, cache=view), view.keys, view.values

        return {"final": export_graph(_Whole(model, decode), {"ids": ids, **cache}, dynamic, outputs)}

    def encode(ids: Tensor) -> tuple[Tensor]:
        return (model.encoder(model.token_embedding(ids, "source"), make_layout(ids)),)

    def write(ids: Tensor, keys: list[Tensor], values: list[Tensor], memory: Tensor) -> tuple[object, ...]:
        view = ConcatenatedCache(keys, values)
        layout = make_layout(ids, start=view.start_positions())
        read = make_layout(torch.zeros(1, memory.shape[1], dtype=torch.long))
        final = model.decoder(model.token_embedding(ids, "target"), layout, view, memory, read)
        return model.head(final, layout, model.token_embedding.table.weight), view.keys, view.values

    memory = torch.zeros(1, SOURCE, s.d_model)
    return {
        "source": export_graph(_Whole(model, encode), {"ids": ids}, {"ids": {1: length}}, ["memory"]),
        "final": export_graph(
            _Whole(model, write), {"ids": ids, **cache, "memory": memory}, {**dynamic, "memory": {1: source}}, outputs
        ),
    }


def _head_graphs(model: Model) -> dict[str, Graph]:
    """Return the graphs of the head alone, of the logit lens, and of the attribution of a logit, where they apply."""
    _, stack = final_stack(model)
    vectors, length = torch.zeros(1, LENGTH, model.spec.d_model), Dim("length", min=2)

    def unembed(x: Tensor) -> tuple[Tensor]:
        return (model.head(x, make_layout(x[..., 0].long()), model.token_embedding.table.weight),)

    def lens(x: Tensor) -> tuple[Tensor]:
        return unembed(stack.norm(x))

    graphs = {}
    if not isinstance(model.head, NoHead | Pooler):
        graphs["unembed"] = export_graph(_Whole(model, unembed), {"x": vectors}, {"x": {1: length}}, ["logits"])
    if has_position_logits(model):
        graphs["lens"] = export_graph(_Whole(model, lens), {"x": vectors}, {"x": {1: length}}, ["logits"])
    if isinstance(model.head, LMHead):
        graphs["attribution"] = _attribution_graph(model)
    return graphs


def _attribution_graph(model: Model) -> Graph:
    """Return the graph that splits the logit of a token at one position."""
    s, depth = model.spec, len(final_stack(model)[1].blocks)
    widths = {"z": (s.n_heads, s.d_head), "cross_z": (s.n_heads, s.d_head), "hidden": (s.d_ff,)}
    seen: dict[str, object] = {}
    for name in attribution.attribution_sites(model):
        shape = widths.get(name.partition(".")[0], (s.d_model,))
        each = [name.replace("*", str(layer)) for layer in range(depth)] if "*" in name else [name]
        seen |= {one: torch.zeros(1, *shape) for one in each}
    names = list(seen)

    def split(token: Tensor, seen: list[Tensor]) -> tuple[Tensor, ...]:
        at = dict(zip(names, seen, strict=True))
        found = attribution.attribute_logit(model, at.__getitem__, torch.zeros(1, dtype=torch.long), token)
        cross = [] if found.cross_heads is None else [found.cross_heads]
        return (found.logit, found.embedding, found.bias, found.heads, found.feedforward, *cross)

    outputs = ["logit", "embedding", "bias", "heads", "feedforward"]
    outputs += ["cross_heads"] if isinstance(model, Seq2Seq) else []
    inputs: dict[str, object] = {"token": torch.zeros(1, dtype=torch.long), "seen": [*seen.values()]}
    graph = export_graph(_Whole(model, split), inputs, {"token": None, "seen": [None] * len(seen)}, outputs)
    by_name = dict(zip(names, graph.inputs["seen"], strict=True))  # type: ignore[call-overload]
    return replace(graph, inputs={"token": graph.inputs["token"], **by_name})


def _marked_modules(model: Model) -> ExitStack:
    """Mark the outputs of projections and norms by the paths of their modules, which Step through shows besides."""
    hooks = ExitStack()
    for path, module in model.named_modules():
        if (
            isinstance(module, nn.Linear | Norm | ProjectionNorm)
            or path.endswith("position.table")
            or path == "head.transform.1"
        ):
            hooks.callback(module.register_forward_hook(partial(_mark_output, path)).remove)
    return hooks


def _mark_output(path: str, module: nn.Module, args: object, output: Tensor) -> Tensor:
    return mark(path)(output)
