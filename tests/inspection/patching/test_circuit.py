"""Circuits: exactly the known one in a model whose weights are set by hand, and what they say of themselves."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from inspected_models import IDS, assert_close, inputs, small
from torch import Tensor

import glasshouse as gh
from glasshouse.inspection import Circuit, circuit
from glasshouse.inspection.patching.circuit import _drawn, _first_faithful
from glasshouse.inspection.patching.edge_graph import EdgeGraph
from glasshouse.models import Decoder

OTHER = (IDS + torch.tensor([[0, 3, 0, 5, 0, 1], [2, 0, 0, 0, 4, 0]])) % 11
LETTERS, LENGTH = 6, 7
SHARP = 20.0  # scores this far apart make a softmax a choice


def weighted_sum(output: Tensor) -> Tensor:
    weights = torch.arange(output.numel(), dtype=output.dtype).sin()
    return (output * weights.view(output.shape)).sum()


def induction() -> Decoder:
    """Make a model that repeats: what came after the last letter the time before is the answer.

    The stream has a coordinate for each letter, each position, each letter before and each answer. Head 0 of layer 0
    attends to the position before and copies its letter; head 1 of layer 1 attends to the position that comes after
    the same letter and copies its letter to the answer. Everything else writes nothing.
    """
    width = 3 * LETTERS + LENGTH
    model = gh.build(
        gh.preset(
            "tiny-decoder", vocab_size=LETTERS, d_model=width, n_heads=2, n_kv_heads=2, d_head=LENGTH, d_ff=4,
            n_layers=2, max_len=LENGTH, position="learned", qk_norm=False, final_norm=False,
            head={"kind": "next_token", "tied": False},
        ),
        dtype=torch.float64,
    ).eval()  # fmt: skip
    assert isinstance(model, Decoder)
    letter, place, before, answer = torch.eye(width, dtype=torch.float64).split([LETTERS, LENGTH, LETTERS, LETTERS])
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" not in name:
                weight.zero_()
        model.token_embedding.table.weight.copy_(letter)
        dict(model.stack.position.named_parameters()).popitem()[1].copy_(place)
        model.head.weight.copy_(answer)
        first, last = (block.attention.layer for block in model.stack.blocks)
        own, other = slice(0, LENGTH), slice(LENGTH, 2 * LENGTH)  # rows of heads 0 and 1
        first.query.weight[own][:-1] = SHARP * place[1:]  # asks at a position for the one before
        first.key.weight[own] = place
        first.value.weight[own][:LETTERS] = letter
        first.out.weight[:, own] = torch.cat([before, torch.zeros(1, width)]).T
        last.query.weight[other][:LETTERS] = SHARP * letter
        last.key.weight[other][:LETTERS] = before
        last.value.weight[other][:LETTERS] = letter
        last.out.weight[:, other] = torch.cat([answer, torch.zeros(1, width)]).T
        for layer in (first, last):  # the heads that do nothing attend somewhere
            for head in ({first: other, last: own}[layer],):
                layer.query.weight[head].normal_()
                layer.key.weight[head].normal_()
    return model


CLEAN = torch.tensor([[0, 1, 2, 3, 4, 1], [3, 5, 4, 0, 2, 5]])  # the answers are 2 and 4
CORRUPTED = torch.tensor([[0, 5, 2, 3, 4, 1], [3, 1, 4, 0, 2, 5]])  # the letter before the answer is another
KNOWN = {
    ("embed", "v.0[head=0]"),
    ("z.0[head=0]", "k.1[head=1]"),
    ("z.1[head=1]", "logits"),
}


def answer_logit(logits: Tensor) -> Tensor:
    last = logits[:, -1]
    return (last[torch.arange(2), torch.tensor([2, 4])] - last.mean(-1)).mean()


def test_the_model_made_by_hand_repeats() -> None:
    with torch.no_grad():
        assert induction()(CLEAN)[:, -1].argmax(-1).tolist() == [2, 4]


def test_the_circuit_of_a_model_made_by_hand_is_exactly_the_known_one() -> None:
    model = induction()
    found = circuit(model, CORRUPTED, CLEAN, metric=answer_logit, faithfulness=0.95)
    assert {*found.edges} == KNOWN
    assert found.components == ["embed", "z.0[head=0]", "z.1[head=1]"] or {*found.components} == {
        writer for writer, _ in KNOWN
    }
    # The softmax leaves exp(-20 / (3 / 25) ** 0.5 / 7 ** 0.5) of the weight to each other position: 4e-10.
    assert found.faithfulness == pytest.approx(1, abs=1e-8)
    assert found.completeness == pytest.approx(1, abs=1e-8)
    assert found.random_faithfulness == pytest.approx(0, abs=0.05)
    assert found.share == 3 / found.n_possible
    output = found.run(model, CORRUPTED, CLEAN)
    assert output[:, -1].argmax(-1).tolist() == [2, 4]
    assert_close(output[:, -1], model(CLEAN)[:, -1].detach(), 1e-8)
    # On other prompts of the same behaviour, where the answers are 0 and 3.
    clean, corrupted = (
        torch.tensor([[5, 4, 0, 1, 4], [2, 3, 1, 2, 3]]),
        torch.tensor([[5, 2, 0, 1, 4], [2, 0, 1, 2, 3]]),
    )
    metric = lambda logits: logits[0, -1, 0] + logits[1, -1, 1]  # noqa: E731
    assert found.effect(model, corrupted, clean, metric=metric) == pytest.approx(1, abs=1e-8)


@pytest.mark.parametrize("kind", ["tiny-decoder", "tiny-seq2seq"])
def test_what_a_circuit_says_is_what_its_runs_give(kind: str) -> None:
    model = small(kind, norm_placement="pre", final_norm=True)
    here, there = inputs(model), inputs(model, OTHER)
    counted: list[tuple[int, int]] = []
    found = circuit(
        model, here, there, metric=weighted_sum, faithfulness=0.8, progress=lambda *count: counted.append(count)
    )
    with torch.no_grad():
        before, after = weighted_sum(model(*here)), weighted_sum(model(*there))
    alone = weighted_sum(found.run(model, here, there))
    assert float((alone - before) / (after - before)) == pytest.approx(found.faithfulness)
    assert abs(found.faithfulness - 1) <= 0.2
    assert found.effect(model, here, there, metric=weighted_sum) == pytest.approx(found.faithfulness)
    assert 0 < len(found.edges) < found.n_possible
    assert counted == sorted(counted)
    assert counted[-1] == (found.n_possible, found.n_possible)
    effects = [abs(effect) for effect in found.edges.values()]
    assert effects == sorted(effects, reverse=True)


@pytest.mark.parametrize("faithful", [range(1, 2), range(3, 5), range(40, 60)])
def test_few_edges_are_found_though_more_are_not_faithful(faithful: range) -> None:
    """The faithfulness of a beginning does not grow with its size."""
    graph = EdgeGraph(small(norm_placement="pre"))
    order = graph.exists.nonzero()
    sizes: list[int] = []

    def is_faithful(masks: Tensor) -> Tensor:
        sizes.extend(masks.sum((1, 2)).tolist())
        return torch.tensor([int(one.sum()) in faithful or one.sum() == len(order) for one in masks])

    found = _first_faithful(graph, order, is_faithful)
    expected = torch.zeros_like(graph.exists)
    expected[tuple(order[: faithful.start].T)] = True
    assert torch.equal(found, graph.connected(expected))
    assert len(sizes) < 40


def test_drawn_edges_lie_on_paths() -> None:
    for kind in ("tiny-decoder", "tiny-seq2seq"):
        graph = EdgeGraph(small(kind, norm_placement="pre"))
        for size in (1, 7, 30):
            masks = [_drawn(graph, size, seed) for seed in range(5)]
            for mask in masks:
                assert torch.equal(graph.connected(mask), mask)
                assert not (mask & ~graph.exists).any()
                assert size - 3 <= int(mask.sum()) <= size
            assert size < 3 or len({str(one.nonzero().tolist()) for one in masks}) == len(masks)


def test_a_circuit_is_saved_and_loaded(tmp_path: Path) -> None:
    model = induction()
    found = circuit(model, CORRUPTED, CLEAN, metric=answer_logit)
    found.save(tmp_path / "circuit.json")
    again = Circuit.load(tmp_path / "circuit.json")
    assert vars(again) == vars(found)
    assert list(again.edges) == list(found.edges)
    assert repr(again) == repr(found)
    assert_close(again.run(model, CORRUPTED, CLEAN), found.run(model, CORRUPTED, CLEAN))
    other = induction()
    with torch.no_grad():
        other.head.weight.mul_(2)
    with pytest.raises(gh.InputError, match="the circuit is that of another model, whose weights differ"):
        again.run(other, CORRUPTED, CLEAN)
    for suffix in ("svg", "html"):
        found.save(tmp_path / f"circuit.{suffix}", caption="by hand")
        page = (tmp_path / f"circuit.{suffix}").read_text()
        assert "z.0[head=0] → k.1[head=" in page  # a picture shortens long names
        assert "by hand" in page
    assert "3 of 46 (6.5%)" in found._repr_html_()


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"kind": "circuit", "edges": [["a", "b"]]}', "\x00"])
def test_other_files_are_no_circuits(text: str, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(gh.StoreError, match=r"a\.json' is no circuit; make one with"):
        Circuit.load(tmp_path / "a.json")
    with pytest.raises(gh.StoreError, match=r"there is no .*b\.json"):
        Circuit.load(tmp_path / "b.json")


def test_a_circuit_with_strange_fields_is_refused(tmp_path: Path) -> None:
    found = circuit(induction(), CORRUPTED, CLEAN, metric=answer_logit)
    found.save(tmp_path / "a.json")
    given = json.loads((tmp_path / "a.json").read_text())
    for change in ({"kind": "other"}, {"n_possible": None}, {"more": 1}, {"edges": 5}):
        (tmp_path / "b.json").write_text(json.dumps(given | change))
        with pytest.raises(gh.StoreError, match="is no circuit"):
            Circuit.load(tmp_path / "b.json")


def test_settings_out_of_range_are_refused() -> None:
    for settings, sentence in (
        ({"faithfulness": 1.0}, "faithfulness is 1.0, but it must be"),
        ({"steps": 0}, "steps is 0, but"),
    ):
        with pytest.raises(gh.InputError, match=sentence):
            circuit(induction(), CORRUPTED, CLEAN, metric=answer_logit, **settings)
