"""Figures of the cards: numbers of one forward pass, or of a formula, as pieces that the page draws."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import cache
from typing import Any

import torch
from torch import Tensor

from glasshouse import hub, models, pretrained, spec
from glasshouse.config import JsonDict
from glasshouse.layers.residual import NoNorm, OutputNorm, PostNorm, SandwichNorm
from glasshouse.models import Decoder, Encoder, Model, Seq2Seq
from glasshouse.models.stack import Stack
from glasshouse.page import serialization
from glasshouse.page.forward_pass import ForwardPass, PagePrompt
from glasshouse.page.model_loader import LoadedModel, ModelLoader
from glasshouse.page.trace import Trace, TraceCache
from glasshouse.text import Tokenizer

LIMIT = 40  # tokens of a text that a figure shows
WIDE = 48  # coordinates of a vector that a figure shows
STRONGEST = 16  # bars of many


@dataclass(frozen=True)
class Control:
    """A slider of a card."""

    label: str
    start: float
    low: float
    high: float
    step: float = 1
    labels: tuple[str, ...] = ()  # of its positions, where they are not the values themselves

    def positions(self) -> list[float]:
        """Return all values of the slider, in decimals as a browser counts them.

        >>> Control("rate", 0.1, 0, 0.3, 0.1).positions()
        [0.0, 0.1, 0.2, 0.3]
        """
        low, high, step = (Decimal(str(one)) for one in (self.low, self.high, self.step))
        return [float(low + number * step) for number in range(int((high - low) / step) + 1)]


@dataclass(frozen=True)
class Scene:
    """What a figure is drawn from: a forward pass, the selection, and the card's slider."""

    trace: Trace
    layer: int
    head: int
    position: int
    value: float

    @property
    def model(self) -> Model:
        """The model that is open."""
        return self.trace.model

    @property
    def stack(self) -> Stack:
        """The stack that the head is on: the only one, or the decoder."""
        return self.trace.stack

    @property
    def length(self) -> int:
        """How many tokens the figure shows."""
        return min(LIMIT, len(self.trace.ids))

    @property
    def place(self) -> int:
        """The selected position, among those shown."""
        return min(self.position, self.length - 1)

    @property
    def labels(self) -> list[str]:
        """The tokens that the figure shows."""
        return token_labels(self.trace.ids[: self.length], self.trace.tok)

    @property
    def attention(self) -> Any:  # noqa: ANN401 - a module of the model's own kind
        """The self-attention of the selected layer."""
        return self.stack.attention_layers("attention")[self.layer]

    def site(self, name: str, layer: int | None = None) -> Tensor:
        """Return the activation at a site of a layer, of the tokens shown."""
        at = self.layer if layer is None else layer
        return self.trace.activation(f"{self.trace.prefix}{name}.{at}").float()[..., : self.length, :]

    def stream(self, layer: int) -> Tensor:
        """Return the residual stream before a layer, [S, D]."""
        if layer == 0:
            return self.trace.activation(f"{self.trace.prefix}embed").float()[: self.length]
        return self.site("resid_post", layer - 1)

    def attention_input(self, layer: int) -> Tensor:
        """Return what the projections of a layer get, [S, D]."""
        part: Any = self.stack.blocks[layer].attention
        x = self.stream(layer)
        return (
            x
            if isinstance(part, NoNorm | PostNorm | OutputNorm)
            else part.norm(x.to(next(part.norm.parameters()).dtype)).float()
        )

    def weights(self, layer: int | None = None) -> Tensor:
        """Return the attention weights of the tokens shown, [H, S, S]."""
        return self._map(layer).weights(query=slice(self.length), key=slice(self.length))[0].float()

    def scores(self, layer: int | None = None) -> Tensor:
        """Return what the softmax gets, [H, S, S]."""
        return self._map(layer).scores(query=slice(self.length), key=slice(self.length))[0].float()

    def kernel(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the queries [H, S, d], keys and values [H_kv, S, d] as the kernel got them."""
        call = self._map(None).kernel
        q, k, v = (one[0].float()[:, : self.length] for one in (call.q, call.k, call.v))
        return q, k, v

    def _map(self, layer: int | None) -> Any:  # noqa: ANN401
        return self.trace.attention_map(f"{self.trace.prefix}pattern.{self.layer if layer is None else layer}")


@dataclass(frozen=True)
class Figure:
    """How a card is drawn."""

    draw: Callable[[Scene], list[JsonDict]]
    reads: tuple[str, ...] = ()  # of "pass", "layer", "head" and "position": what it depends on
    control: Control | None = None
    limit: Callable[[Scene], int] | None = None  # the last position of the slider that differs on this text


# Pieces


def matrix(
    title: str,
    values: Tensor,
    *,
    rows: Sequence[str] = (),
    columns: Sequence[str] = (),
    signed: bool = False,
    row: int | None = None,
    along: tuple[str, str] = ("", ""),
) -> JsonDict:
    """Return a matrix drawn in colours, with its shape; infinite entries are masked."""
    shown = values.detach().float()
    return {
        "kind": "matrix",
        "title": title,
        "values": serialization.encode_tensor(shown),
        "rows": list(rows),
        "columns": list(columns),
        "signed": signed,
        "row": row,
        "along": list(along),
    }


def bars(title: str, rows: Iterable[tuple[str, float]], *, most: float = 0.0, unit: str = "") -> JsonDict:
    """Return named bars; the longest has the value `most`, or the largest."""
    found = [[name, serialization.finite_or_none(value)] for name, value in rows]
    return {"kind": "bars", "title": title, "rows": found, "most": most, "unit": unit}


def strongest(title: str, names: Sequence[str], values: Sequence[float], *, most: float = 0.0) -> JsonDict:
    """Return the longest bars, in their order."""
    best = sorted(sorted(range(len(values)), key=lambda i: -abs(values[i]))[:STRONGEST])
    said = "" if len(best) == len(values) else f" (the {len(best)} largest of {len(values)})"
    return bars(f"{title}{said}", ((names[i], values[i]) for i in best), most=most)


def lines(
    title: str, along: str, series: Iterable[tuple[str, Sequence[float], Sequence[float]]], *, log: bool = False
) -> JsonDict:
    """Return curves: their names, and their points."""
    made = [
        {"name": name, "x": list(x), "y": [serialization.finite_or_none(one) for one in y]} for name, x, y in series
    ]
    return {"kind": "lines", "title": title, "along": along, "series": made, "log": log}


def table(title: str, head: Sequence[str], rows: Iterable[Sequence[str | float | int | None]]) -> JsonDict:
    """Return a table; numbers are shown in a few digits."""
    return {"kind": "table", "title": title, "head": list(head), "rows": [list(row) for row in rows]}


def facts(*named: tuple[str, float | int | str]) -> JsonDict:
    """Return named numbers."""
    return {"kind": "facts", "facts": [[name, _plain(value)] for name, value in named]}


def _plain(value: float | int | str) -> float | int | str | None:
    return serialization.finite_or_none(value) if isinstance(value, float) else value


def sentence(text: str) -> JsonDict:
    """Return a sentence."""
    return {"kind": "text", "text": text}


def tokens(title: str, named: Iterable[tuple[str, bool]]) -> JsonDict:
    """Return tokens in a line; some are marked."""
    return {"kind": "tokens", "title": title, "tokens": [[text, marked] for text, marked in named]}


def shapes(*named: tuple[str, Sequence[int]]) -> JsonDict:
    """Return a product with the shape of each part: x [6 x 64], and so on."""
    return {"kind": "shapes", "parts": [[name, list(shape)] for name, shape in named]}


def largest_difference(a: Tensor, b: Tensor) -> float:
    """Return the largest absolute difference."""
    return float((a.cpu().double() - b.cpu().double()).abs().max())


def normed_output(part: Any, out: Tensor) -> Tensor:  # noqa: ANN401 - a residual connection
    """Return what is added to the stream: the output of a sublayer, which an output norm normalises."""
    return part.norm_out(out) if isinstance(part, SandwichNorm | OutputNorm) else out


# Models that a figure needs where the open one lacks the part


@cache
def bundled(name: str) -> LoadedModel:
    """Return a model that comes with the package."""
    return LoadedModel(*hub.load(name))


@cache
def _bundled_traces(name: str) -> TraceCache:
    return TraceCache(ModelLoader(name, device="cpu"))


def elsewhere(scene: Scene, name: str, why: str) -> tuple[Scene, JsonDict]:
    """Return the scene of a bundled model on its own prompt, and the sentence that says so."""
    traces = _bundled_traces(name)
    model = bundled(name).model
    trace = traces.trace(ForwardPass(PagePrompt(pretrained.PROMPTS[name])))
    layer, head = min(scene.layer, model.spec.n_layers - 1), min(scene.head, model.spec.n_heads - 1)
    moved = Scene(trace, layer, head, min(scene.position, len(trace.ids) - 1), scene.value)
    return moved, sentence(f"{why}; this shows {name}, which comes with the package, on its own text.")


def decoder_scene(scene: Scene) -> tuple[Scene, list[JsonDict]]:
    """Return a scene of a decoder: the open model, or a bundled one."""
    if isinstance(scene.model, Decoder):
        return scene, []
    moved, why = elsewhere(scene, pretrained.DEFAULT, "The open model is no decoder")
    return moved, [why]


def encoder_of(scene: Scene) -> tuple[Model, Stack, str, Tensor, Tokenizer | None, list[JsonDict]]:
    """Return an encoder with positions that are added: its model, stack, prefix, input ids and tokenizer."""
    if isinstance(scene.model, Encoder):
        return scene.model, scene.stack, "", scene.trace.inputs[0], scene.trace.tok, []
    if isinstance(scene.model, Seq2Seq):
        return scene.model, scene.model.encoder, "encoder.", scene.trace.inputs[0], scene.trace.tok, []
    loaded = bundled("dates-1m")
    (source, _) = loaded.inputs(PagePrompt(pretrained.PROMPTS["dates-1m"]))
    assert isinstance(loaded.model, Seq2Seq)
    why = sentence("The open model has no encoder; this shows that of dates-1m, which comes with the package.")
    return loaded.model, loaded.model.encoder, "encoder.", source, loaded.tok, [why]


def token_labels(ids: Iterable[int], tok: Tokenizer | None) -> list[str]:
    """Return tokens as the page shows them."""
    return [str(one["text"]) for one in serialization.describe_tokens(ids, tok)]


def generator(seed: int = 0) -> torch.Generator:
    """Return a random generator, so that a figure is the same each time."""
    return torch.Generator().manual_seed(seed)


def initialised(kind: str, dtype: torch.dtype = torch.float32, **choices: object) -> Any:  # noqa: ANN401 - a model
    """Return a small model as initialised, the same each time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return models.build(spec.preset(f"tiny-{kind}", **choices), dtype=dtype).eval()
