"""Estimated effects of patches: exact in a linear model, and elsewhere the gradient that they say they are."""

from __future__ import annotations

import pytest
import torch
from inspected_models import IDS, assert_close, inputs, linear, small
from torch import Tensor

import glasshouse as gh
from glasshouse.inspection import activation_patching, attribution_patching, edge_attribution, edge_patching

OTHER = (IDS + torch.tensor([[0, 3, 0, 5, 0, 1], [2, 0, 0, 0, 4, 0]])) % 11
SITES = ["z", "resid_post", "v", "attn_out", "hidden", "pattern[head=1]", "token_embed", "final"]


def weighted_sum(output: Tensor) -> Tensor:
    weights = torch.arange(output.numel(), dtype=output.dtype).sin()
    return (output * weights.view(output.shape)).sum()


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize(("site", "axis"), [*((site, None) for site in SITES), ("z", ("head", "position"))])
def test_in_a_linear_model_estimates_are_exact(site: str, axis: tuple[str, ...] | None, steps: int) -> None:
    estimated = attribution_patching(linear(), IDS, OTHER, site, axis=axis, metric=weighted_sum, steps=steps)
    exact = activation_patching(linear(), IDS, OTHER, site, axis=axis, metric=weighted_sum)
    assert_close(estimated.effect, exact.effect)
    assert_close(estimated.metric_values, exact.metric_values)
    assert (estimated.axis, estimated.axis_labels, estimated.layer_labels) == (
        exact.axis,
        exact.axis_labels,
        exact.layer_labels,
    )


@pytest.mark.parametrize("steps", [1, 4])
def test_in_a_linear_model_estimated_edges_are_exact(steps: int) -> None:
    model = linear()
    with torch.no_grad():  # a linear feed-forward layer
        for block in model.stack.blocks:
            block.feedforward.layer.down.weight.normal_()
            block.feedforward.layer.activation = torch.nn.Identity()
            if hasattr(block.feedforward.layer, "gate"):
                block.feedforward.layer.gate.weight.zero_()
    estimated = edge_attribution(model, IDS, OTHER, metric=weighted_sum, steps=steps)
    exact = edge_patching(model, IDS, OTHER, metric=weighted_sum)
    assert torch.equal(estimated.effect.isnan(), exact.effect.isnan())
    assert_close(estimated.effect, exact.effect)
    assert exact.effect.nan_to_num().abs().gt(1e-3).sum() > 20


@pytest.mark.parametrize("kind", ["tiny-decoder", "tiny-encoder", "tiny-seq2seq"])
def test_estimates_are_the_limit_of_small_patches(kind: str) -> None:
    """By central differences along the patch, for steps=1 on the corrupted prompt."""
    model = small(kind)
    here, there = inputs(model), inputs(model, OTHER)
    at = "decoder." if kind == "tiny-seq2seq" else ""
    found = attribution_patching(model, here, there, f"{at}z", axis=("head", "position"), metric=weighted_sum)
    with torch.no_grad(), gh.record(model, f"{at}z.*") as seen:
        normal_output = model(*here)
    normal = seen[f"{at}z.*"]
    with torch.no_grad(), gh.record(model, f"{at}z.*") as seen:
        clean_output = model(*there)
    difference = seen[f"{at}z.*"] - normal
    apart = weighted_sum(clean_output) - weighted_sum(normal_output)
    step = 1e-5
    for layer, head, position in [(0, 1, 2), (1, 3, 4), (1, 0, 1)]:

        def at_share(share: float, layer: int = layer, head: int = head, position: int = position) -> Tensor:
            value = normal[layer].clone()
            value[:, head, position] += share * difference[layer][:, head, position]
            with torch.no_grad(), gh.edit(model, {f"{at}z.{layer}": value}):
                return weighted_sum(model(*here))

        # A central difference is off by the step's square and by rounding over the step: 1e-10 and 1e-10 here.
        slope = (at_share(step) - at_share(-step)) / (2 * step)
        assert_close(found.effect[layer, head, position], slope / apart, 1e-7)


def test_steps_average_gradients_between_the_prompts() -> None:
    """Against a loop in which the embeddings are moved by hand."""
    model = small()
    found = attribution_patching(model, IDS, OTHER, "z", metric=weighted_sum, steps=4)
    table = model.token_embedding.table.weight
    slopes = []
    for share in (1 / 8, 3 / 8, 5 / 8, 7 / 8):
        mixed = (1 - share) * table[IDS] + share * table[OTHER]
        with gh.edit(model, {"token_embed": mixed}), gh.record(model, "z.*", grad=True) as seen:
            value = weighted_sum(model(IDS))
        slopes.append(seen.gradient("z.*", of=value))
    with torch.no_grad(), gh.record(model, "z.*") as normal:
        before = weighted_sum(model(IDS))
    with torch.no_grad(), gh.record(model, "z.*") as clean:
        after = weighted_sum(model(OTHER))
    expected = (torch.stack(slopes).mean(0) * (clean["z.*"] - normal["z.*"])).sum((1, 3, 4)) / (after - before)
    assert_close(found.effect, expected)


def test_parameters_are_left_alone() -> None:
    model = small()
    model.train()
    attribution_patching(model, IDS, OTHER, "z", metric=weighted_sum, steps=2)
    edge_attribution(model, IDS, OTHER, metric=weighted_sum)
    assert model.training
    assert all(weight.grad is None and weight.requires_grad for weight in model.parameters())


def test_scores_of_masked_keys_have_no_effect() -> None:
    found = attribution_patching(small(), IDS, OTHER, "scores", axis=("query", "key"), metric=weighted_sum)
    assert found.effect.isfinite().all()
    above = torch.ones(6, 6).triu(1).bool()
    assert not found.effect[:, above].any()
    assert found.effect[:, ~above].any()


def test_chosen_edges_are_those_of_all() -> None:
    model = small()
    every = edge_patching(model, IDS, OTHER, metric=weighted_sum)
    chosen = every.top(3)
    counted: list[tuple[int, int]] = []
    some = edge_patching(
        model, IDS, OTHER, chosen, metric=weighted_sum, progress=lambda *count: counted.append(count)
    )
    assert counted == [(3, 3)]
    assert some.top(9) == chosen
    assert all(some[edge] == pytest.approx(every[edge], abs=1e-12) for edge in chosen)
    values = every.effect[every.effect.isfinite()].abs()
    assert abs(every[chosen[0]]) == pytest.approx(values.max().item())
    html = every._repr_html_()
    assert f"{chosen[0][0]} → {chosen[0][1]}" in html
    for edge, sentence in (
        (("z.7[head=0]", "logits"), r"the model has no writer 'z.7\[head=0\]'"),
        (("embed", "w.0"), "the model has no reader 'w.0'"),
        (("ffn_out.1", "q.0[head=0]"), r"there is no edge from ffn_out.1 to q.0\[head=0\]; give a writer before"),
    ):
        with pytest.raises(gh.InputError, match=sentence):
            edge_patching(model, IDS, OTHER, [edge], metric=weighted_sum)
    with pytest.raises(gh.InputError, match=r"there is no edge \('a', 'b'\)"):
        _ = every["a", "b"]
    with pytest.raises(gh.InputError, match="steps is 0, but it must be a whole number of at least 1"):
        edge_attribution(model, IDS, OTHER, metric=weighted_sum, steps=0)
    with pytest.raises(gh.InputError, match="give prompts of the same length"):
        edge_attribution(model, IDS, OTHER[:, 1:], metric=torch.mean)
