"""Figures of the cards without a browser: what a card draws, as tensors and plain Python, and what it is drawn from.

The tests compute each of these numbers anew, by another route: loops, torch.nn, a second pass, a second model.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple

import pytest
import tokenizers
import torch
from examples import first_of
from torch import Tensor, nn

import glasshouse as gh
from glasshouse import pretrained
from glasshouse.page.forward_pass import ForwardPass, PagePrompt
from glasshouse.page.model_loader import LoadedModel, ModelLoader
from glasshouse.page.trace import TraceCache
from glasshouse.page.views.notes import FIGURES
from glasshouse.page.views.notes.view import NoteFigure, note_figure
from glasshouse.spec import parse
from glasshouse.text import visible_token

LIMIT = 40  # tokens that a figure shows
WIDE = 48  # coordinates
WINDOW = 9  # keys that every other layer of the model "gemma" sees
PYTHON = """def deed(größe, y):  # 中 😀
    return größe + y

class Point(object):
    def __init__(self, x, y):
        self.x = x
        self.y = y
"""
IDS = " ".join(str((7 * i * i + 3 * i) % 29 + 40 * (i % 2)) for i in range(45))  # some occur twice


@dataclass(frozen=True, eq=False)
class Opened:
    """A model, what it reads, and what is selected on the page."""

    traces: TraceCache
    prompt: PagePrompt
    layer: int
    head: int
    position: int

    @property
    def loaded(self) -> LoadedModel:
        return self.traces.loader.get("")

    @property
    def model(self) -> Any:  # noqa: ANN401 - of any kind
        return self.loaded.model

    @property
    def tok(self) -> gh.Tokenizer | None:
        return self.loaded.tok

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        return self.loaded.inputs(self.prompt)

    @property
    def ids(self) -> list[int]:
        return self.inputs[-1][0].tolist()

    @property
    def shown(self) -> int:
        """How many tokens a figure shows."""
        return min(LIMIT, len(self.ids))

    @property
    def labels(self) -> list[str]:
        return labels(self.ids[: self.shown], self.tok)

    @property
    def prefix(self) -> str:
        return "decoder." if hasattr(self.model, "decoder") else ""

    @property
    def stack(self) -> Any:  # noqa: ANN401
        return self.model.decoder if self.prefix else self.model.stack

    @property
    def causal(self) -> bool:
        return self.model.spec.kind != "encoder"

    def visible(self, query: int, layer: int | None = None) -> list[int]:
        """Return the keys that a query of a layer sees, among the tokens shown."""
        window = self.model.spec.window(self.layer if layer is None else layer)
        if not self.causal:
            return [*range(self.shown)]
        return [key for key in range(query + 1) if not window or query - key < window]

    def record(self, *names: str) -> list[Tensor]:
        """Return sites of the stack below the head from a forward pass of our own, without the batch axis."""
        full = [self.prefix + name for name in names]
        with torch.no_grad(), gh.record(self.model, *full) as seen:
            self.model(*self.inputs)
        return [seen[name][0].float() for name in full]

    def logits(self) -> Tensor:
        """Return the logits of the whole input, [S, V]."""
        with torch.no_grad():
            return self.model(*self.inputs)[0].float()

    def outputs(self, *modules: nn.Module) -> list[Tensor]:
        """Return what modules return in a forward pass of our own, without the batch axis."""
        found: dict[nn.Module, Tensor] = {}
        hooks = [one.register_forward_hook(lambda m, _, out: found.update({m: out[0]})) for one in modules]
        with torch.no_grad():
            self.model(*self.inputs)
        for hook in hooks:
            hook.remove()
        return [found[one].float() for one in modules]


def labels(ids: Iterable[int], tok: gh.Tokenizer | None) -> list[str]:
    """Return tokens as the page shows them: ids where there is no tokenizer."""
    return [str(one) if tok is None else visible_token(tok, one) for one in ids]


def tiny(kind: str, **choices: object) -> gh.models.Model:
    """Return a small float32 model in which no parameter is near what it is as initialised."""
    sizes = {"vocab_size": 97, "d_model": 36, "n_layers": 3, "n_heads": 6, "d_ff": 20, "max_len": 48}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        model = gh.build(parse({"kind": kind, **sizes, "init": {"kind": "normal", "std": 0.3}, **choices})).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.2)
    return model


@cache
def opened(name: str) -> Opened:
    """Return one of the models that figures are drawn on."""
    match name:
        case "python-3m":
            return Opened(_traces(name), PagePrompt(PYTHON), layer=2, head=4, position=19)
        case "dates-1m":
            prompt = PagePrompt(pretrained.PROMPTS[name], "2033-03-2")
            return Opened(_traces(name), prompt, layer=1, head=2, position=3)
        case "gpt2":  # learned positions, layer norm, biases and GELU, and heads in groups of three
            model = tiny("decoder", n_kv_heads=2)
            return Opened(_in_memory(model), PagePrompt(IDS), layer=1, head=4, position=21)
        case "bert":  # post-norm, and no mask
            model = tiny("encoder", norm_placement="post", final_norm=False, n_segments=2)
            return Opened(_in_memory(model), PagePrompt(" ".join(IDS.split()[:21])), layer=1, head=2, position=20)
        case "gemma":  # norms on both sides, rotary, gated, tanh of the scores, a window in every other layer
            choices = {"norm": "rms", "norm_placement": "sandwich", "position": "rotary", "attention_softcap": 3.0}
            sizes = {"n_kv_heads": 3, "d_head": 8, "windows": [WINDOW, 0]}
            head = {"kind": "next_token", "tied": False}
            model = tiny("decoder", feedforward="swiglu", qkv_bias=False, head=head, **choices, **sizes)
            return Opened(_in_memory(model), PagePrompt(IDS), layer=0, head=3, position=12)
        case "headless":  # predicts nothing, and adds no positions
            model = tiny("encoder", position="rotary", head={"kind": "none"})
            return Opened(_in_memory(model), PagePrompt(" ".join(IDS.split()[:21])), layer=2, head=5, position=4)
        case "framed":  # a tokenizer that puts a token before and after every text
            tok = framed_tokenizer()
            traces = TraceCache(ModelLoader.from_model(tiny("decoder", vocab_size=2000), tok))
            return Opened(traces, PagePrompt("to be or not to be, that is"), layer=0, head=0, position=0)
    raise ValueError(name)


def framed_tokenizer() -> gh.Tokenizer:
    """Return a byte-level tokenizer that adds <s> and </s> to a text."""
    table = tokenizers.Tokenizer(tokenizers.models.BPE())
    table.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    table.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=262, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet, show_progress=False
    )
    table.train_from_iterator(["to be or not to be"], trainer)
    table.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    return gh.Tokenizer.from_json(table.to_str())


def _traces(name: str) -> TraceCache:
    return TraceCache(ModelLoader(name, device="cpu"))


def _in_memory(model: gh.models.Model) -> TraceCache:
    return TraceCache(ModelLoader.from_model(model, None))


@cache
def bundled(name: str) -> Opened:
    """Return a bundled model on its own prompt, as figures show it where the open model lacks a part."""
    return Opened(opened(name).traces, PagePrompt(pretrained.PROMPTS[name]), 0, 0, 0)


def elsewhere(one: Opened, name: str) -> Opened:
    """Return a bundled model on its own prompt, with the selection of another as far as it goes."""
    there = bundled(name)
    layer, head = min(one.layer, there.model.spec.n_layers - 1), min(one.head, there.model.spec.n_heads - 1)
    return replace(there, layer=layer, head=head, position=min(one.position, len(there.ids) - 1))


def predicting(one: Opened, texts: list[str]) -> Opened:
    """Return the model whose predictions are shown: the open one, or python-3m, which a sentence then names."""
    moved = "The open model predicts no tokens; this shows python-3m, which comes with the package, on its own text."
    if one.model.spec.head.kind == "none":
        assert moved in texts
        return elsewhere(one, "python-3m")
    assert moved not in texts
    return one


class Matrix(NamedTuple):
    """A matrix in colours."""

    title: str
    values: Tensor
    rows: list[str]
    columns: list[str]
    row: int | None


class Bars(NamedTuple):
    """Named bars; the longest has the value `most`, or the largest."""

    title: str
    rows: list[tuple[str, float]]
    most: float

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.rows]

    @property
    def values(self) -> list[float]:
        return [value for _, value in self.rows]


class Lines(NamedTuple):
    """Curves: their points by name."""

    title: str
    along: str
    series: dict[str, list[tuple[float, float]]]
    log: bool


class Table(NamedTuple):
    """A table."""

    title: str
    head: list[str]
    rows: list[list[Any]]


@dataclass(frozen=True)
class Case:
    """A card on a model, with its slider somewhere."""

    number: str
    name: str
    value: float | None

    def __str__(self) -> str:
        return f"{self.number}-{self.name}" + ("" if self.value is None else f"-{self.value:g}")

    def draw(self) -> Drawn:
        return Drawn(self)


class Drawn:
    """What a card draws, by kind of piece; `unread` are the kinds that a test has not looked at."""

    def __init__(self, case: Case) -> None:
        self.model = opened(case.name)
        one = self.model
        reads = FIGURES[case.number].reads  # the page leaves out the rest
        chosen = {name: getattr(one, name) for name in ("layer", "head", "position") if name in reads}
        asked = NoteFigure(case.number, ForwardPass(one.prompt), **chosen, value=case.value)
        self.pieces: list[dict[str, Any]] = note_figure(one.traces, asked)["pieces"]
        self.name, self.value = case.name, 0.0 if case.value is None else case.value
        self.unread = {piece["kind"] for piece in self.pieces}

    def _of(self, kind: str) -> list[dict[str, Any]]:
        self.unread.discard(kind)
        return [piece for piece in self.pieces if piece["kind"] == kind]

    @property
    def facts(self) -> dict[str, Any]:
        named = [tuple(fact) for piece in self._of("facts") for fact in piece["facts"]]
        assert len({name for name, _ in named}) == len(named)
        return dict(named)

    @property
    def matrices(self) -> list[Matrix]:
        found = []
        for one in self._of("matrix"):
            values = decode(one["values"])
            # Colours of one sign would show negative numbers as 0.
            assert one["signed"] or not (values[values.isfinite()] < 0).any(), one["title"]
            found.append(Matrix(one["title"], values, one["rows"], one["columns"], one["row"]))
        return found

    @property
    def bars(self) -> list[Bars]:
        return [
            Bars(one["title"], [(name, value) for name, value in one["rows"]], one["most"])
            for one in self._of("bars")
        ]

    @property
    def lines(self) -> list[Lines]:
        return [
            Lines(
                one["title"],
                one["along"],
                {curve["name"]: list(zip(curve["x"], curve["y"], strict=True)) for curve in one["series"]},
                one["log"],
            )
            for one in self._of("lines")
        ]

    @property
    def tables(self) -> list[Table]:
        return [Table(one["title"], one["head"], one["rows"]) for one in self._of("table")]

    @property
    def tokens(self) -> list[tuple[str, list[tuple[str, bool]]]]:
        return [(one["title"], [(text, marked) for text, marked in one["tokens"]]) for one in self._of("tokens")]

    @property
    def shapes(self) -> list[list[tuple[str, list[int]]]]:
        return [[(name, shape) for name, shape in one["parts"]] for one in self._of("shapes")]

    @property
    def texts(self) -> list[str]:
        return [one["text"] for one in self._of("text")]

    @property
    def dials(self) -> list[dict[str, Any]]:
        (piece,) = self._of("dials")
        return piece["dials"]


def decode(packed: dict[str, Any]) -> Tensor:
    """Return a tensor from its base64 data."""
    data = bytearray(base64.b64decode(packed["f32"]))
    return torch.frombuffer(data, dtype=torch.float32).view(packed["shape"]).clone()


def on(number: str, *names: str) -> Callable[..., Any]:
    """Parametrize a test with a card on models and places of its slider, all but the first of which are long."""
    control = FIGURES[number].control
    values: list[float | None] = [None]
    if control is not None:
        middle = (control.low + control.high) // 2  # where the slider starts at an end
        values = [*dict.fromkeys([control.start, control.low, control.high, middle])][:3]
    cases = [Case(number, name, value) for name in names for value in values]
    return pytest.mark.parametrize("drawn", first_of(cases), indirect=True, ids=str)


class Below:
    """A number that is not negative and below a bound, for comparisons of dicts."""

    def __init__(self, bound: float) -> None:
        self.bound = bound

    def __eq__(self, other: object) -> bool:
        return isinstance(other, float) and 0 <= other < self.bound

    def __hash__(self) -> int:
        return hash(self.bound)

    def __repr__(self) -> str:
        return f"below {self.bound:g}"


def near(value: float, rel: float = 1e-4) -> Any:  # noqa: ANN401 - what pytest returns
    """Return a number for comparisons, within a relative error: sums in float32 differ by their order."""
    return pytest.approx(float(value), rel=rel, abs=1e-12)


def same(actual: Tensor | Sequence[Any], expected: Tensor | Sequence[Any], within: float = 1e-5) -> None:
    """Check that numbers differ by at most `within` of the largest finite one; infinite ones must be the same."""
    found, wanted = (torch.as_tensor(one).double() for one in (actual, expected))
    finite = wanted[wanted.isfinite()].abs()
    largest = float(finite.max()) if len(finite) else 1.0
    torch.testing.assert_close(found, wanted, rtol=0, atol=within * largest)


def softmax(scores: Sequence[float]) -> list[float]:
    """Return the softmax of a row, one number at a time."""
    top = max(scores)
    powers = [math.exp(one - top) for one in scores]
    return [one / sum(powers) for one in powers]


def dot(a: Iterable[float], b: Iterable[float]) -> float:
    """Return a sum of products."""
    return math.fsum(x * y for x, y in zip(a, b, strict=True))


def size(vector: Iterable[float]) -> float:
    """Return the Euclidean norm."""
    return math.sqrt(math.fsum(x * x for x in vector))


def sinusoid(position: int, coordinate: int, width: int) -> float:
    """Return one number of a position code of the original transformer."""
    angle = position / 10_000 ** ((coordinate - coordinate % 2) / width)
    return math.cos(angle) if coordinate % 2 else math.sin(angle)


def unmasked(weights: Tensor) -> Tensor:
    """Return attention weights with minus infinity above the diagonal, where a figure hatches."""
    shown = weights.clone()
    for i in range(len(shown)):
        for j in range(i + 1, shown.shape[1]):
            shown[i, j] = -math.inf
    return shown


def check_strongest(bars: Bars, title: str, names: Sequence[str], values: Sequence[float]) -> None:
    """Check that the 16 longest bars are drawn, in the order of the tokens."""
    ranked = sorted((-abs(value), i) for i, value in enumerate(values))
    kept = sorted(i for _, i in ranked[:16])
    more = f" (the 16 largest of {len(values)})" if len(values) > 16 else ""
    assert bars.title == title + more
    assert bars.names == [names[i] for i in kept]
    same(bars.values, [values[i] for i in kept], 1e-4)
