"""Edits: the activation is replaced, the rest of the forward pass follows, and nothing is left afterwards."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch
from examples import up_to
from hypothesis import HealthCheck, given, settings
from inspected_models import IDS, assert_close, build_random, inputs, small
from spec_strategy import specs
from torch import Tensor

import glasshouse as gh
from glasshouse import spec
from glasshouse.inspection import add, mean_ablate, scale
from glasshouse.layers.attend.kernel import Attend

many = settings(max_examples=up_to(40), deadline=None, suppress_health_check=list(HealthCheck))


@pytest.mark.slow
@many
@given(specs())
def test_patching_a_site_with_its_own_activation_is_a_no_op_and_zero_is_not(s: spec.Spec) -> None:
    model = build_random(s)
    with torch.no_grad():
        before = model(*inputs(model))
        with gh.record(model, "*") as seen:
            model(*inputs(model))
        for name, value in seen.items():
            with gh.edit(model, {name: value}):
                assert_close(model(*inputs(model)), before)
            with gh.edit(model, {name: 0.0}), gh.record(model, name) as now:
                changed = model(*inputs(model))
            assert not now[name].any()
            if value.any():  # neurons may all be dead
                assert not torch.equal(changed, before), name
        assert torch.equal(model(*inputs(model)), before)


def test_editing_a_pattern_replaces_only_its_layers_kernel() -> None:
    model = small(n_layers=3)
    kinds = [type(block.attention.layer.attend) for block in model.stack.blocks]
    with gh.edit(model, {"pattern.1": lambda value: value}):
        assert [type(block.attention.layer.attend) is Attend for block in model.stack.blocks] == [
            True,
            False,
            True,
        ]
        with gh.record(model, "pattern.2", "q.1"):  # recording replaces no other kernel
            assert type(model.stack.blocks[2].attention.layer.attend) is Attend
    assert [type(block.attention.layer.attend) for block in model.stack.blocks] == kinds


def test_an_edited_pattern_determines_z() -> None:
    model = small()
    itself = torch.eye(6, dtype=torch.float64)
    with gh.edit(model, {"pattern.0": itself}), gh.record(model, "pattern.0", "v.0", "z.0") as seen:
        model(IDS)
    assert torch.equal(seen["pattern.0"], itself.expand(2, 4, 6, 6))
    assert torch.equal(seen["z.0"], seen["v.0"].repeat_interleave(2, 1))  # four heads, two key-value heads


def test_edited_scores_go_through_the_softmax() -> None:
    model = small()
    with gh.edit(model, {"scores.0[head=1]": 0.0}), gh.record(model, "pattern.0[head=1]") as seen:
        model(IDS)
    assert_close(seen["pattern.0"], torch.full((2, 6, 6), 1 / 6, dtype=torch.float64))


def test_a_slice_is_edited_and_the_rest_is_not() -> None:
    model = small()
    with gh.record(model, "z.1") as before:
        model(IDS)
    with gh.edit(model, {"z.1[head=2, position=3:5]": 7.0}), gh.record(model, "z.1") as seen:
        model(IDS)
    expected = before["z.1"].clone()
    expected[:, 2, 3:5] = 7.0
    assert torch.equal(seen["z.1"], expected)


def test_edits_run_in_order_and_a_recording_has_the_result() -> None:
    model = small()
    with gh.record(model, "resid_post.0") as plain:
        model(IDS)
    expected = (plain["resid_post.0"] * 2 + 1) * 3
    twice_and_one = {"resid_post.0": [scale(2.0), lambda value: value + 1]}
    with (
        gh.record(model, "resid_post.0") as outside,
        gh.edit(model, twice_and_one),
        gh.record(model, "resid_post.0") as between,
        gh.edit(model, {"resid_post.*": scale(3.0)}),
    ):
        model(IDS)
    assert torch.equal(outside["resid_post.0"], expected)
    assert torch.equal(between["resid_post.0"], expected)


def test_edits_of_scores_and_pattern_of_one_layer_compose() -> None:
    model = small()
    with (
        gh.edit(model, {"scores.0": 0.0}),
        gh.edit(model, {"pattern.0": scale(0.5)}),
        gh.record(model, "pattern.0", "z.0", "v.0") as seen,
    ):
        model(IDS)
    assert_close(seen["pattern.0"], torch.full((2, 4, 6, 6), 1 / 12, dtype=torch.float64))
    assert_close(seen["z.0"], 0.5 * seen["v.0"].mean(2, keepdim=True).repeat_interleave(2, 1).expand(2, 4, 6, 16))


def test_ablating_a_head_removes_its_output() -> None:
    model = small(qkv_bias=True, out_bias=True)
    out = model.stack.blocks[1].attention.layer.out
    for to in ("zero", "mean", torch.full((16,), 0.25, dtype=torch.float64)):
        with gh.record(model, "z.1", "attn_out.1") as before:
            model(IDS)
        with gh.edit(model, {"z.1": gh.ablate_head(1, 3, to=to)}), gh.record(model, "attn_out.1") as seen:
            model(IDS)
        expected = before["attn_out.1"].clone()
        for head in (1, 3):
            z = before["z.1"][:, head]  # [B, S, d]
            fill = {"zero": torch.zeros(16), "mean": z.mean((0, 1))}.get(to) if isinstance(to, str) else to
            expected += (fill - z) @ out.weight[:, 16 * head : 16 * head + 16].T
        assert_close(seen["attn_out.1"], expected)


def test_ready_made_edits() -> None:
    value = torch.arange(12.0).view(2, 1, 3, 2)
    assert torch.equal(scale(-2.0)(value), -2 * value)
    assert torch.equal(add(torch.tensor([1.0, 0.0]))(value), value + torch.tensor([1.0, 0.0]))


def test_a_trained_steering_vector_is_not_cached() -> None:
    model = small().bfloat16()
    vector = torch.zeros(64, requires_grad=True)
    push, losses = add(vector), []
    for _ in range(2):
        with gh.edit(model, {"resid_post.0": push}):
            loss = model(IDS)[:, -1, 3].sum()
            loss.backward()
        losses.append(float(loss.detach()))
        with torch.no_grad():
            vector -= vector.grad
    assert losses[1] < losses[0]
    third = add(torch.full((64,), 1 / 3))
    third(torch.zeros(64, dtype=torch.bfloat16))
    assert third(torch.zeros(64))[0] == torch.tensor(1 / 3)  # not rounded to bfloat16


@pytest.mark.parametrize(
    ("name", "over"),
    [("z.0", (0, 2)), ("hidden.0", (0, 1)), ("resid_mid.1", (0, 1)), ("v.1", (0, 2))],
)
def test_mean_ablation_of_a_slice_uses_the_mean_over_batch_and_positions(name: str, over: tuple[int, ...]) -> None:
    model = small()
    with gh.record(model, name) as plain:
        model(IDS)
    middle = plain[name].mean(over, keepdim=True).expand_as(plain[name])
    last = "neuron" if name.startswith("hidden") else "width"
    for part, cut in ((f"[{last}=5]", (..., 5)), ("[batch=1]", (1,)), ("", (...,))):
        with gh.edit(model, {name + part: mean_ablate()}), gh.record(model, name) as seen:
            model(IDS)
        expected = plain[name].clone()
        expected[cut] = middle[cut]
        assert_close(seen[name], expected)


def test_ablating_a_head_in_a_slice_changes_only_the_slice() -> None:
    model = small()
    with gh.record(model, "z.0") as plain:
        model(IDS)
    with gh.edit(model, {"z.0[batch=0]": gh.ablate_head(1, to="mean")}), gh.record(model, "z.0") as seen:
        model(IDS)
    expected = plain["z.0"].clone()
    expected[0, 1] = plain["z.0"][:, 1].mean((0, 1))
    assert_close(seen["z.0"], expected)
    with gh.edit(model, {"z.0": gh.ablate_head(1, to=0.5)}), gh.record(model, "z.0[head=1]") as seen:
        model(IDS)
    assert (seen["z.0"] == 0.5).all()


def test_in_place_edits_reach_neither_recordings_nor_the_cache() -> None:
    model, cache = small(), small().make_cache(2, 6)
    with torch.no_grad(), gh.record(model, "resid_post.0") as plain:
        model(IDS)
    with (
        torch.no_grad(),
        gh.record(model, "resid_post.0") as seen,
        gh.edit(model, {"resid_pre.1": lambda value: value.mul_(2), "k.0": lambda value: value.mul_(0)}),
    ):
        model(IDS, cache=cache)
    assert not torch.equal(seen["resid_post.0"], plain["resid_post.0"])  # by the keys of layer 0
    assert cache.keys[0].any()
    double = gh.edit(model, {"resid_pre.1": lambda value: value.mul_(2)})
    with torch.no_grad(), gh.record(model, "resid_post.0") as seen, double:
        model(IDS)
    assert torch.equal(seen["resid_post.0"], plain["resid_post.0"])


def test_blocks_that_end_out_of_order_remove_their_own_edits() -> None:
    model = small()

    def writing(name: str) -> Iterator[None]:
        with gh.edit(model, {name: 0.0}):
            yield

    with torch.no_grad():
        plain = model(IDS)
        first, second = writing("z.0"), writing("z.1")
        next(first)
        next(second)
        first.close()
        with gh.record(model, "z.*") as seen:
            model(IDS)
        assert seen["z.0"].any()
        assert not seen["z.1"].any()
        second.close()
        assert torch.equal(model(IDS), plain)


def test_generation_refuses_position_dependent_edits() -> None:
    model = small()
    for edits in (
        {"resid_post.0[position=-1]": 0.0},
        {"resid_post.0[position=1:-1]": 0.0},
        {"resid_post.0[position=:2]": torch.zeros(2, 64)},
        {"pattern.0[query=2]": 0.0},
        {"k.0[position=1]": 0.0},
        {"resid_post.0[batch=0]": 0.0},
        {"z.0": mean_ablate()},
        {"z.0": gh.ablate_head(1, to="mean")},
    ):
        with (
            gh.edit(model, edits),
            pytest.raises(gh.InputError, match="depends on rows, or on positions in a way that changes"),
        ):
            gh.generate(model, None, [[1, 2, 3]], max_new_tokens=2)
    with gh.edit(model, {"z.0[head=1]": 0.0}):
        gh.generate(model, None, [[1, 2, 3]], max_new_tokens=2)


def edited_text(
    model: gh.models.Model, names: dict[str, object], source: Tensor | None, prompt: list[int]
) -> list[int]:
    """Generate greedily, by a forward pass of the whole text for each token."""
    ids = list(prompt)
    for _ in range(6):
        with torch.no_grad(), gh.edit(model, names):
            given = (torch.tensor([ids]),) if source is None else (source, torch.tensor([ids]))
            ids.append(int(model(*given)[0, -1].argmax()))
    return ids[len(prompt) :]


PLACES = {
    "prompt": "[position=:{n}]",
    "new": "[position={n}:]",
    "2": "[position=2:3]",
    "3:7": "[position=3:7]",
    "1:": "[position=1:]",
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    "site", ["resid_post.0", "result.1[head=2, ", "token_embed", "hidden_pre.1", "attn_norm_scale.1"]
)
def test_edits_of_some_positions_during_generation(place: str, site: str) -> None:
    """Several requests at once, in fewer slots, against whole texts whose positions are indexed."""
    model = small()
    stem, _, head = site.partition("[")
    prompts = [[1, 2, 3], [4, 5, 6, 7, 8], [9, 1], [3], [2, 7, 1, 8, 2, 8, 1]]
    torch.manual_seed(0)
    push = torch.randn(()).double() * 3 + 2

    def names(text: str) -> dict[str, object]:
        return {f"{stem}[{head}{text[1:]}": lambda value: value * push + 0.5}

    expected = [edited_text(model, names(PLACES[place].format(n=len(one))), None, one) for one in prompts]
    plain = [edited_text(model, {}, None, one) for one in prompts]
    with gh.edit(model, names(f"[position={place}]")):
        for slots, chunk in ((2, 64), (5, 2)):
            engine = gh.Engine(model, None, slots=slots, max_len=32, prefill_chunk=chunk)
            requests = [engine.submit(one, gh.SamplingParams(max_new_tokens=6)) for one in prompts]
            while not all(request.done for request in requests):
                engine.step()
            assert [request.ids for request in requests] == expected
        whole = model(torch.tensor([prompts[1]]))
    assert torch.allclose(whole, model(torch.tensor([prompts[1]]))) == (place == "new")
    assert expected != plain


@pytest.mark.parametrize("site", ["resid_post.0[", "z.1[head=2, ", "z.1[", "result.0["])
def test_a_function_is_given_one_position_as_in_a_whole_text(site: str) -> None:
    """It may change other axes in place, or look at all of them."""
    model, prompts = small(), [[1, 2, 3, 9], [4, 5, 6, 7, 8]]

    def changed(value: Tensor) -> Tensor:
        shapes.add(value.shape[1:])
        value[:, 1:] = value.flatten(1).amax(1).view(-1, *(1 for _ in value.shape[1:])) * 99
        return value

    shapes: set[torch.Size] = set()
    names = {f"{site}position=3]": changed}
    expected = [edited_text(model, names, None, one) for one in prompts]
    assert expected != [edited_text(model, {}, None, one) for one in prompts]
    with gh.edit(model, names):
        found = gh.generate(model, None, prompts, max_new_tokens=6)
    assert [one.ids for one in found] == expected
    assert len(shapes) == 1


def test_calls_of_other_threads_do_not_change_what_is_new() -> None:
    """An engine's forward pass is halted in its first block while another thread calls the model."""
    model = small()
    names = {"resid_post.1[position=new]": scale(-3.0)}
    with gh.edit(model, names):
        (expected,) = gh.generate(model, None, [[1, 2, 3]], max_new_tokens=6)

    def call_beside(value: Tensor) -> Tensor:
        other = threading.Thread(target=lambda: model(IDS))
        other.start()
        other.join()
        return value

    with gh.edit(model, {"resid_post.0": call_beside, **names}):
        engine = gh.Engine(model, None, slots=1, max_len=16, weights="own")
        request = engine.submit([1, 2, 3], gh.SamplingParams(max_new_tokens=6))
        engine.run()
    assert request.ids == expected.ids
    assert expected.ids != gh.generate(model, None, [[1, 2, 3]], max_new_tokens=6)[0].ids


def test_edits_of_some_positions_of_an_encoder_decoder() -> None:
    model = small("tiny-seq2seq", start_id=1)
    source = torch.tensor([[3, 1, 4, 0, 5, 9]])
    for place, text in (("new", "[position=1:]"), ("prompt", "[position=:1]"), ("2:4", "[position=2:4]")):
        expected = edited_text(model, {f"decoder.resid_post.0{text}": scale(3.0)}, source, [1])
        with gh.edit(model, {f"decoder.resid_post.0[position={place}]": scale(3.0)}):
            (found,) = gh.generate(model, None, source.tolist(), max_new_tokens=6)
        assert found.ids == expected[: len(found.ids)]
    with (
        pytest.raises(gh.InputError, match=r"resid_post.0\[position=new\] is for edits; record decoder.resid_post.0"),
        gh.record(model, "decoder.resid_post.0[position=new]"),
    ):
        pass


def test_edits_carry_gradients() -> None:
    model = small()
    push = torch.zeros(64, dtype=torch.float64, requires_grad=True)
    with gh.edit(model, {"resid_post.0[position=2]": lambda value: value + push}):
        model(IDS)[0, 2, 5].backward()
    with gh.record(model, "resid_post.0", grad=True) as seen:
        (slope,) = torch.autograd.grad(model(IDS)[0, 2, 5], seen["resid_post.0"])
    assert_close(push.grad, slope[0, 2])


def test_training_works_under_an_edit() -> None:
    model = small().train()
    with gh.edit(model, {"pattern.0": gh.ablate_head(0)}):
        model(IDS).sum().backward()
    assert all(weight.grad is not None for weight in model.parameters())


def test_invalid_ablate_head_arguments_are_refused_at_once() -> None:
    with pytest.raises(gh.InputError, match="to is 'maen', but it must be 'zero', 'mean' or a value"):
        gh.ablate_head(1, to="maen")
    with pytest.raises(gh.InputError, match="ablate_head was given no head"):
        gh.ablate_head()


@pytest.mark.parametrize(
    ("edits", "sentence"),
    [
        (
            {"z.0": lambda value: None},
            "the edit of z.0 returned a NoneType; return a tensor of the shape it is given.",
        ),
        ({"z.0": torch.zeros(3)}, "the edit of z.0 gave shape [3], but the activation has [2, 4, 6, 16]"),
        ({"z.0[head=9]": 0.0}, "z.0[head=9] has head index 9, but that axis has size 4; use 0 to 3."),
        ({"z.0": gh.ablate_head(4)}, "head 4 is to be ablated, but there are 4; use 0 to 3."),
        ({"zed.0": 0.0}, "the model has no site 'zed.0'"),
        ({"resid_post.0": gh.ablate_head(1)}, "resid_post.0 has no head axis to ablate; use z."),
        ({"pattern.0": gh.ablate_head(1, to="mean")}, "pattern.0 has no mean that respects the attention mask"),
        (
            {"z.0": gh.ablate_head(1, to=torch.zeros(3))},
            "to be ablated to a tensor of shape [3], which does not broadcast",
        ),
        ("z.0", "edits is a str, but it must map sites to edits"),
    ],
)
def test_invalid_edits_are_refused_in_one_sentence(edits: dict[str, object], sentence: str) -> None:
    model = small()
    with torch.no_grad():
        before = model(IDS)
        with pytest.raises(gh.InputError) as caught, gh.edit(model, edits):
            model(IDS)
        assert sentence in str(caught.value)
        assert torch.equal(model(IDS), before)


def test_a_cached_call_is_edited_like_a_full_one() -> None:
    model = small(position="rotary")
    edits = {"z.0": gh.ablate_head(1), "pattern.1": gh.ablate_head(2), "resid_post.0": add(torch.ones(64))}
    with torch.no_grad(), gh.edit(model, edits):
        whole = model(IDS)
        cache = model.make_cache(2, 6)
        parts: list[Tensor] = [model(IDS[:, :4], cache=cache), model(IDS[:, 4:], cache=cache)]
    assert_close(torch.cat(parts, 1), whole)
