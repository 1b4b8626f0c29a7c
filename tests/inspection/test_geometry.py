"""Geometry of the residual stream: by hand, against plain loops, and independent of padding and tiling.

Tolerances are those of tests/models/test_properties.py: float64, some dozen operations deep.
"""

from __future__ import annotations

import math

import pytest
import torch
from examples import up_to
from hypothesis import HealthCheck, given, settings
from inspected_models import Model, assert_close, build_random, inputs, small
from spec_strategy import specs
from torch import Tensor

import glasshouse as gh
from glasshouse import spec
from glasshouse.errors import InputError
from glasshouse.inspection import attention_map, hooks
from glasshouse.inspection.geometry import attention_rollout, position_similarity, residual_norms
from glasshouse.inspection.inputs import stack_input
from glasshouse.models import Seq2Seq

many = settings(max_examples=up_to(40), deadline=None, suppress_health_check=list(HealthCheck))
ONE = torch.tensor([[5, 6, 5, 7]])


def slow_rollout(pattern: list, residual: float) -> list:
    """Compute the rollout of a pattern [layer][row][head][query][key] element by element."""
    found: list = []
    for number, layer in enumerate(pattern):
        found.append([])
        for row, heads in enumerate(layer):
            size = range(len(heads[0]))
            mixed = [
                [(1 - residual) * sum(head[q][k] for head in heads) / len(heads) + residual * (q == k) for k in size]
                for q in size
            ]
            if number:
                below = found[number - 1][row]
                mixed = [[sum(mixed[q][j] * below[j][k] for j in size) for k in size] for q in size]
            found[-1].append(mixed)
    return found


def stacks(model: Model) -> dict[str | None, str]:
    """Return the name of a stack, and the prefix of its sites."""
    return {None: "decoder.", "encoder": "encoder."} if isinstance(model, Seq2Seq) else {None: ""}


@many
@given(specs())
def test_all_three_equal_plain_loops(s: spec.Spec) -> None:
    model = build_random(s)
    for stack, prefix in stacks(model).items():
        names = [prefix + name for name in ("pattern.*", "embed", "resid_post.*", "final")]
        with gh.record(model, *names) as seen:
            model(*inputs(model))
        pattern, embedded, after, final = (seen[name] for name in names)

        rolled = attention_rollout(model, *inputs(model), residual=0.3, stack=stack)
        assert_close(rolled, torch.tensor(slow_rollout(pattern.tolist(), 0.3), dtype=torch.float64))
        assert_close(rolled.sum(-1), torch.ones(rolled.shape[:-1], dtype=torch.float64))

        lengths = [
            [[math.sqrt(sum(x * x for x in vector)) for vector in row] for row in layer]
            for layer in torch.cat([embedded[None], after]).tolist()
        ]
        assert_close(residual_norms(model, *inputs(model), stack=stack), torch.tensor(lengths, dtype=torch.float64))

        for site, vectors in ((f"{prefix}final", final), (f"{prefix}resid_post.0", after[0])):
            cosines = torch.empty(*vectors.shape[:2], vectors.shape[1], dtype=torch.float64)
            for row, one, other in torch.cartesian_prod(*map(torch.arange, cosines.shape)).tolist():
                a, b = vectors[row, one], vectors[row, other]
                cosines[row, one, other] = (a @ b) / (a.norm() * b.norm())
            assert_close(position_similarity(model, *inputs(model), site=site), cosines)
            if stack is None and site.endswith("final"):
                assert_close(position_similarity(model, *inputs(model)), cosines)


def test_rollout_of_previous_token_heads() -> None:
    model = small()
    back = torch.diag(torch.ones(3), -1)
    back[0, 0] = 1
    with gh.edit(model, {"pattern.*": back.double()}):
        rolled = attention_rollout(model, ONE)
        # Of the third token, half stays and half is from the second; after another layer a quarter is from the first.
        assert rolled[0, 0, 2].tolist() == [0, 0.5, 0.5, 0]
        assert rolled[1, 0, 2].tolist() == [0.25, 0.5, 0.25, 0]
        assert rolled[1, 0, 0].tolist() == [1, 0, 0, 0]
        alone = attention_rollout(model, ONE, residual=0.0)
        assert alone[1, 0].argmax(-1).tolist() == [0, 0, 0, 1]
        assert torch.equal(attention_rollout(model, ONE, residual=1.0), torch.eye(4).double().expand(2, 1, 4, 4))


def test_rollout_normalizes_edited_patterns() -> None:
    model = small()
    plain = attention_rollout(model, ONE, residual=0.0)
    with gh.edit(model, {"pattern.*": lambda pattern: 3 * pattern}):
        assert_close(attention_rollout(model, ONE, residual=0.0)[0], plain[0])
        assert attention_rollout(model, ONE).sum(-1).allclose(torch.ones(2, 1, 4).double(), atol=1e-12)


def test_fully_masked_queries_are_not_nan() -> None:
    """In a sequence of padding alone every key is masked."""
    two, lengths = ONE.repeat(2, 1), torch.tensor([4, 0])
    model = small("tiny-encoder")
    assert torch.equal(
        attention_rollout(model, two, residual=0.0, lengths=lengths)[:, 1], torch.zeros(2, 4, 4).double()
    )
    assert torch.equal(attention_rollout(model, two, lengths=lengths)[:, 1], torch.eye(4).double().expand(2, 4, 4))


def test_norms_and_similarities_by_hand() -> None:
    model = small(n_layers=1)
    vectors = torch.zeros(1, 4, 64, dtype=torch.float64)
    vectors[0, 0, 0], vectors[0, 1, 0], vectors[0, 2, 1] = 3, -2, 5
    vectors[0, 3, 0] = vectors[0, 3, 1] = 1
    half = math.sqrt(0.5)
    expected = [[1, -1, 0, half], [-1, 1, 0, -half], [0, 0, 1, half], [half, -half, half, 1]]
    with gh.edit(model, {"resid_post.0": vectors}):
        assert torch.allclose(
            residual_norms(model, ONE)[1, 0], torch.tensor([3, 2, 5, math.sqrt(2)]).double(), atol=1e-6
        )
        angles = position_similarity(model, ONE, site="resid_post.0")[0]
        assert_close(angles, torch.tensor(expected, dtype=torch.float64))
        vectors[0, 0] = 0  # which has no direction
        assert position_similarity(model, ONE, site="resid_post.0")[0, 0].tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("kind", ["tiny-decoder", "tiny-encoder"])
def test_padding_changes_nothing(kind: str) -> None:
    model = small(kind)
    padded, kwargs = torch.tensor([[5, 6, 5, 7, 1, 2]]), {"lengths": torch.tensor([4])}
    assert_close(attention_rollout(model, padded, **kwargs)[..., :4, :4], attention_rollout(model, ONE))
    assert (attention_rollout(model, padded, **kwargs)[..., :4, 4:] == 0).all()
    assert_close(residual_norms(model, padded, **kwargs)[..., :4], residual_norms(model, ONE))
    assert_close(position_similarity(model, padded, **kwargs)[:, :4, :4], position_similarity(model, ONE))


def test_tiling_is_exact_and_never_materializes_a_pattern(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small()
    whole = attention_rollout(model, ONE)
    made, recompute_attention = [], attention_map.recompute_attention

    def spy(*args: object) -> Tensor:
        made.append(recompute_attention(*args))
        return made[-1]

    monkeypatch.setattr(hooks, "recompute_attention", spy)
    monkeypatch.setattr(stack_input, "TILE", 1)
    assert_close(attention_rollout(model, ONE), whole)
    assert {one.shape[2] for one in made} == {1}


def test_the_forward_pass_stops_at_the_last_site_needed() -> None:
    model = small()
    calls = []
    for module in (model.stack, model.stack.blocks[1], model.head):
        module.register_forward_pre_hook(lambda module, args: calls.append(module))
    position_similarity(model, ONE, site="resid_post.0")
    assert calls == [model.stack]
    residual_norms(model, ONE)
    attention_rollout(model, ONE)
    assert calls == [model.stack, *[model.stack, model.stack.blocks[1]] * 2]


def test_dropout_is_off_and_there_is_no_autograd_graph() -> None:
    model = small(dropout=0.5, attention_dropout=0.5, embed_dropout=0.5)
    expected = [tool(model, ONE) for tool in (attention_rollout, position_similarity, residual_norms)]
    model.train()
    for tool, value in zip((attention_rollout, position_similarity, residual_norms), expected, strict=True):
        assert_close(tool(model, ONE), value)
        assert not tool(model, ONE).requires_grad
    assert model.training


def test_invalid_arguments_are_refused() -> None:
    model = small()
    for residual in (-0.1, 1.1, math.nan):
        with pytest.raises(InputError, match="residual is"):
            attention_rollout(model, ONE, residual=residual)
    for site in ("q.0", "resid_post.*", "resid_post.0[position=1]", "resid_post.0[width=1]"):
        with pytest.raises(InputError, match="one vector per position"):
            position_similarity(model, ONE, site=site)
    with pytest.raises(InputError, match=r"no site 'resid_post\.9'"):
        position_similarity(model, ONE, site="resid_post.9")
    with pytest.raises(InputError, match=r"did you mean encoder\.final or decoder\.final"):
        position_similarity(small("tiny-seq2seq"), ONE, ONE, site="final")
    for tool in (attention_rollout, position_similarity, residual_norms):
        with pytest.raises(InputError, match="cache was given"):
            tool(model, ONE, cache=model.make_cache(1, 8))
