"""Padding explains nothing: every tool gives a padded sequence what it gives the sequence alone.

Models run in float64; padding changes the order of sums, and 1e-9 leaves room for that and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from examples import up_to
from hypothesis import given, settings
from hypothesis import strategies as st
from inspected_models import build_random
from torch import Tensor

import glasshouse as gh
from glasshouse import inspection
from glasshouse.models import Model

VOCABULARY = 40
Found = dict[str, Tensor]


def tiny(seed: int = 3, **choices: object) -> Model:
    torch.manual_seed(seed)
    sizes = {"d_model": 16, "n_heads": 2, "n_kv_heads": 1, "d_ff": 24, "vocab_size": VOCABULARY}
    return build_random(gh.preset("tiny-decoder", **sizes, **choices))


MODELS = {name: tiny(position=name) for name in ("rotary", "learned")}
OTHER = tiny(4)


# Each returns what a tool finds for a batch of one sequence; `last` is how many of its columns are not padding.


def attribute(model: Model, ids: Tensor, **given: Any) -> Found:  # noqa: ANN401
    found = {}
    for position in (-1, 0, -2):
        each = inspection.attribute(model, ids, token=7, incorrect_token=9, position=position, neurons=[1], **given)
        found |= {f"{position} {name}": value for name, value in each.components().items()}
        found |= {f"{position} logit": each.logit, f"{position} neurons": each.neurons[1]}
    return found


def lens(model: Model, ids: Tensor, **given: Any) -> Found:  # noqa: ANN401
    found = inspection.lens(model, ids, positions=[-1, 0, -2], top_k=3, **given)
    names = ("probabilities", "entropy", "rank", "loss", "tokens", "ids")
    return {name: getattr(found, name) for name in names}


def compare(model: Model, ids: Tensor, **given: Any) -> Found:  # noqa: ANN401
    found = inspection.compare(model, OTHER, ids, **given)
    return {name: getattr(found, name) for name in ("kl_divergence", "loss_a", "loss_b")}


def head_scores(model: Model, ids: Tensor, **given: Any) -> Found:  # noqa: ANN401
    found = inspection.head_scores(model, ids, **given)
    return {
        name: value for name, value in vars(found).items() if isinstance(value, Tensor) and value.is_floating_point()
    }


def ablation(model: Model, ids: Tensor, **given: Any) -> Found:  # noqa: ANN401
    found = inspection.ablation_effects(model, ids, **given)
    return {
        name: value for name, value in vars(found).items() if isinstance(value, Tensor) and value.is_floating_point()
    }


def patching(model: Model, ids: Tensor, **given: Any) -> Found:  # noqa: ANN401
    changed = ids.clone()
    changed[:, 0] = (changed[:, 0] + 1) % VOCABULARY

    def metric(logits: Tensor) -> Tensor:
        return logits[:, int(given.get("lengths", torch.tensor([ids.shape[1]]))) - 1, 5].sum()

    found = inspection.activation_patching(model, changed, ids, site="resid_post", metric=metric, **given)
    return {"effect": found.effect}


def rollout(model: Model, ids: Tensor, **given: Any) -> Found:  # noqa: ANN401
    return {"rollout": inspection.attention_rollout(model, ids, **given)}


def similarity(model: Model, ids: Tensor, **given: Any) -> Found:  # noqa: ANN401
    return {"similarity": inspection.position_similarity(model, ids, site="resid_post.0", **given)}


def norms(model: Model, ids: Tensor, **given: Any) -> Found:  # noqa: ANN401
    return {"norms": inspection.residual_norms(model, ids, **given)}


TOOLS = [attribute, lens, compare, head_scores, ablation, patching, rollout, similarity, norms]


@pytest.mark.parametrize("tool", TOOLS, ids=lambda tool: tool.__name__)
@settings(max_examples=up_to(60))
@given(
    row=st.lists(st.integers(1, VOCABULARY - 1), min_size=4, max_size=9),
    padding=st.integers(1, 5),
    name=st.sampled_from(sorted(MODELS)),
)
def test_a_padded_sequence_is_the_sequence_alone(
    tool: Callable[..., Found], row: list[int], padding: int, name: str
) -> None:
    model = MODELS[name]
    alone = tool(model, torch.tensor([row]))
    assert alone
    padded = tool(model, torch.tensor([[*row, *[0] * padding]]), lengths=torch.tensor([len(row)]))
    for key, value in alone.items():
        there = padded[key]
        for axis, size in enumerate(value.shape):  # columns of padding are not compared
            there = there.narrow(axis, 0, size)
        torch.testing.assert_close(there, value, rtol=1e-9, atol=1e-9, equal_nan=True, msg=lambda m: f"{key}: {m}")  # noqa: B023


@pytest.mark.parametrize("side", ["right", "left"])
@settings(max_examples=up_to(60))
@given(rows=st.lists(st.lists(st.integers(1, VOCABULARY - 1), min_size=3, max_size=7), min_size=2, max_size=4))
def test_each_sequence_of_a_batch_is_explained_at_its_own_positions(side: str, rows: list[list[int]]) -> None:
    model, width = MODELS["rotary"], max(map(len, rows))
    ids, mask = torch.zeros(len(rows), width, dtype=torch.long), torch.zeros(len(rows), width, dtype=torch.bool)
    for number, row in enumerate(rows):
        columns = slice(0, len(row)) if side == "right" else slice(width - len(row), width)
        ids[number, columns], mask[number, columns] = torch.tensor(row), True
    for tool in (attribute, lens):
        together = tool(model, ids, mask=mask)
        for number, row in enumerate(rows):
            for key, value in tool(model, torch.tensor([row])).items():
                axis = 0 if tool is attribute or key == "ids" else 1
                here, there = together[key].select(axis, number), value.select(axis, 0)
                torch.testing.assert_close(here, there, equal_nan=True)  # the last token has no target


def test_a_position_beyond_a_sequence_is_named() -> None:
    ids, lengths = torch.tensor([[1, 2, 0], [3, 4, 5]]), torch.tensor([2, 3])
    with pytest.raises(gh.InputError, match="position is 2, but sequence 0 has 2 tokens without its padding"):
        inspection.attribute(MODELS["rotary"], ids, token=7, position=2, lengths=lengths)
    with pytest.raises(gh.InputError, match="positions is -3, but sequence 0 has 2 tokens without its padding"):
        inspection.lens(MODELS["rotary"], ids, positions=[0, -3], lengths=lengths)
    found = inspection.attribute(MODELS["rotary"], ids, token=7, position=torch.tensor([1, 2]), lengths=lengths)
    assert found.position.tolist() == [1, 2]
