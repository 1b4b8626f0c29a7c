"""The worked examples of the lectures: what the cards draw, worked another way."""

from __future__ import annotations

import base64
import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import glasshouse as gh
from glasshouse import notes
from glasshouse.page.forward_pass import ForwardPass, PagePrompt
from glasshouse.page.model_loader import ModelLoader
from glasshouse.page.trace import TraceCache
from glasshouse.page.views.notes import worked
from glasshouse.page.views.notes.figure import Scene


@pytest.fixture(scope="module")
def scene() -> Scene:
    traces = TraceCache(ModelLoader("python-3m", device="cpu"))
    return Scene(traces.trace(ForwardPass(PagePrompt("the cat sat"))), layer=1, head=1, position=1, value=0.0)


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def piece(pieces: list[dict[str, Any]], kind: str, number: int = 0) -> Any:  # noqa: ANN401 - JSON
    return [one for one in pieces if one["kind"] == kind][number]


def decode_tensor(packed: dict[str, Any]) -> Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(packed["f32"])), dtype=torch.float32).view(packed["shape"])


def test_four_ids_are_four_rows(scene: Scene) -> None:
    found = worked.four_rows(scene)
    assert "as the open model's ids end at 4,095" in piece(found, "text")["text"]
    weight = worked._large_vocabulary().token_embedding.table.weight
    rows = torch.stack([weight[one] for one in (5, 4000, 10532, 2224)])
    assert torch.equal(decode_tensor(piece(found, "matrix")["values"]), rows)
    assert piece(found, "shapes")["parts"] == [["one-hot", [4, 50257]], ["E", [50257, 8]], ["x", [4, 8]]]
    assert piece(found, "facts")["facts"][0][1] == 0


def test_four_ids_are_rows_of_a_model_that_has_them() -> None:
    torch.manual_seed(0)
    model = gh.build(gh.preset("tiny-decoder", vocab_size=10533))
    traces = TraceCache(ModelLoader.from_model(model, None))
    scene = Scene(traces.trace(ForwardPass(PagePrompt("1 2 3"))), 0, 0, 0, 0.0)
    found = worked.four_rows(scene)
    rows = model.token_embedding.table.weight[[5, 4000, 10532, 2224], :8]
    assert torch.equal(decode_tensor(piece(found, "matrix")["values"]), rows)
    assert piece(found, "text")["text"].endswith("in the open model.")


def test_thinking_machines_by_hand(scene: Scene) -> None:
    """Scores 2 and 1 give weights 1 / (1 + 1/e) and the rest; 1.5 and 2 give 1 / (1 + sqrt(e))."""
    found = worked.thinking_machines(scene)
    tables = [one for one in found if one["kind"] == "table"]
    matrices = zip(worked.WQ, worked.WK, worked.WV, strict=True)
    for row, given in zip(tables[0]["rows"], matrices, strict=True):
        assert row[1:] == [str(one) for one in given]
    assert tables[1]["rows"] == [
        ["Thinking", "(1, 0, 1, 0)", "(1, 0, 2, 1)", "(1, 1, 1, 1)", "(1, 2, 1, 2)"],
        ["Machines", "(0, 2, 0, 1)", "(1, 2, 0, 0)", "(2, 1, 0, 0)", "(0, 2, 3, 0)"],
    ]
    first, second = 1 / (1 + math.exp(-1)), 1 / (1 + math.exp(0.5))
    expected = [[4, 2, math.exp(2), first], [2, 1, math.e, 1 - first]]
    expected += [[3, 1.5, math.exp(1.5), second], [4, 2, math.exp(2), 1 - second]]
    words = ("Thinking", "Machines")
    for row, numbers, (query, key) in zip(
        tables[2]["rows"], expected, ((i, j) for i in words for j in words), strict=True
    ):
        assert row[:2] == [query, key]
        assert row[2:] == pytest.approx(numbers, abs=1e-12)
    # z = w (1, 2, 1, 2) + (1 - w) (0, 2, 3, 0)
    for row, weight in zip(tables[3]["rows"], (first, second), strict=True):
        assert row[1:] == pytest.approx([weight, 2, 3 - 2 * weight, 2 * weight], abs=1e-12)


def test_thinking_machines_is_what_the_layer_does(scene: Scene) -> None:
    sizes = {"vocab_size": 2, "d_model": 4, "n_layers": 1, "n_heads": 1, "n_kv_heads": 1, "d_head": 4, "d_ff": 8}
    model = gh.build(gh.preset("tiny-encoder", **sizes, position="none", qkv_bias=False), dtype=torch.float64).eval()
    layer = model.stack.blocks[0].attention.layer
    contexts: list[Any] = []
    hook = layer.register_forward_pre_hook(lambda _, given: contexts.append(given[1]))
    model(torch.tensor([[0, 1]]))
    hook.remove()
    for linear, matrix in ((layer.query, worked.WQ), (layer.key, worked.WK), (layer.value, worked.WV)):
        linear.weight.copy_(torch.tensor(matrix).T)
    layer.out.weight.copy_(torch.eye(4))
    if layer.out.bias is not None:
        layer.out.bias.zero_()
    z = layer(torch.tensor([worked.X], dtype=torch.float64), contexts[0])[0]
    shown = [one for one in worked.thinking_machines(scene) if one["kind"] == "table"][3]["rows"]
    torch.testing.assert_close(torch.tensor([row[1:] for row in shown], dtype=torch.float64), z, rtol=0, atol=1e-12)


def test_p_fish_is_a_product_over_tokens(scene: Scene) -> None:
    """Each factor from a forward pass of its own prefix."""
    model, tok = gh.load("python-3m")
    ids, target = tok.encode("thanks for all the"), tok.encode(" fish")
    assert tok.decode([*ids, *target]) == notes.EXAMPLES[0].text
    factors = []
    for i, one in enumerate(target):
        logits = model(torch.tensor([[*ids, *target[:i]]]))[0, -1].double()
        factors.append(float((logits[one] - logits.logsumexp(0)).exp()))
    found = worked.p_fish(scene)
    assert [row[2] for row in piece(found, "table")["rows"]] == pytest.approx(factors, rel=1e-4)
    assert dict(piece(found, "facts")["facts"]) == {
        "P(fish | thanks for all the)": pytest.approx(math.prod(factors), rel=1e-4)
    }
    *likely, (name, value) = piece(found, "bars")["rows"]
    assert (name, value) == ("␣fish", pytest.approx(math.prod(factors), rel=1e-4))
    logits = model(torch.tensor([ids]))[0, -1]
    assert [value for _, value in likely] == pytest.approx(
        logits.softmax(0).sort().values[-5:].flip(0).tolist(), rel=1e-4
    )
    assert piece(found, "bars")["most"] == 1


def without(pattern: Tensor, query: int, keys: list[int]) -> Tensor:
    """Return attention weights without those of a query to some keys; the others are divided by what is left."""
    pattern = pattern.clone()
    pattern[:, :, query, keys] = 0
    pattern[:, :, query] /= pattern[:, :, query].sum(-1, keepdim=True)
    return pattern


def test_she_looks_at_names_and_what_removing_that_does(scene: Scene) -> None:
    model, tok = gh.load("python-3m")
    text = notes.EXAMPLES[2].text
    ids = tok.encode(text)
    ends = [len(tok.decode(ids[: i + 1])) for i in range(len(ids))]

    def places(word: str) -> list[int]:
        letters = range(text.index(word), text.index(word) + len(word))
        return [i for i, end in enumerate(ends) if any((ends[i - 1] if i else 0) <= at < end for at in letters)]

    she = places("She")[-1]
    with gh.record(model, "pattern.*") as seen:
        before = model(torch.tensor([ids]))[0, she].log_softmax(0)
    rows = piece(worked.sarah(scene), "table")["rows"]
    assert [row[0] for row in rows] == ["Sarah", "cat", "Alex"]
    for name, mean, strongest, most, change in rows:
        weights = {
            (layer, head): sum(float(seen[f"pattern.{layer}"][0, head, she, place]) for place in places(name))
            for layer in range(model.spec.n_layers)
            for head in range(model.spec.n_heads)
        }
        assert mean == pytest.approx(sum(weights.values()) / len(weights), abs=1e-6)
        best = max(weights, key=lambda one: weights[one])
        assert (strongest, most) == (f"{best[0]}.{best[1]}", pytest.approx(weights[best], abs=1e-6))
        cut = partial(without, query=she, keys=places(name))
        with gh.edit(model, {f"pattern.{layer}": cut for layer in range(model.spec.n_layers)}):
            after = model(torch.tensor([ids]))[0, she].log_softmax(0)
        assert change == pytest.approx(float(after[ids[she + 1]] - before[ids[she + 1]]), abs=1e-3)


BYTES = gh.Tokenizer.train(texts=["x"], vocab_size=263)


@pytest.mark.parametrize(
    ("choices", "tok"),
    [({}, None), ({"head": "none"}, BYTES), ({"position": "learned", "max_len": 16}, BYTES)],
    ids=["no tokenizer", "no head", "too few positions"],
)
def test_a_model_that_cannot_read_the_text_gives_way(choices: dict[str, object], tok: gh.Tokenizer | None) -> None:
    model = gh.build(gh.preset("tiny-decoder", vocab_size=263, **choices))
    traces = TraceCache(ModelLoader.from_model(model, tok))
    scene = Scene(traces.trace(ForwardPass(PagePrompt("1 2 3"))), 0, 0, 0, 0.0)
    for example in (worked.p_fish, worked.sarah):
        assert piece(example(scene), "text")["text"].endswith("can read this text; this shows python-3m.")
