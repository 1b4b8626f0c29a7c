"""Recording returns what a forward pass computes, and changes nothing about it, then or later.

Tolerances are those of tests/models/test_properties.py: float64, some dozen operations deep.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import pickle
import threading
import weakref
from collections.abc import Callable

import pytest
import torch
from examples import up_to
from hypothesis import HealthCheck, given, settings
from inspected_models import IDS, Model, assert_close, build_random, inputs, small
from spec_strategy import specs
from torch import Tensor, nn

import glasshouse as gh
from glasshouse import spec
from glasshouse.inspection import attention_map
from glasshouse.inspection.sites import sites
from glasshouse.layers.module_swap import HOOK_ATTRIBUTES
from glasshouse.models.stack import Stack

many = settings(max_examples=up_to(60), deadline=None, suppress_health_check=list(HealthCheck))


def stacks(model: Model) -> dict[str, Stack]:
    if isinstance(model, gh.models.Seq2Seq):
        return {"encoder.": model.encoder, "decoder.": model.decoder}
    return {"": model.stack}


def state(model: nn.Module) -> object:
    """Return everything that recording could leave behind."""
    return (
        [(name, id(module), type(module)) for name, module in model.named_modules()],
        [(name, id(tensor)) for name, tensor in model.state_dict(keep_vars=True).items()],
        [len(getattr(module, hooks)) for module in model.modules() for hooks in HOOK_ATTRIBUTES],
        [sorted(vars(module)) for module in model.modules()],
    )


@many
@given(specs())
def test_recording_everything_changes_nothing(s: spec.Spec) -> None:
    model = build_random(s)
    before, tree = model(*inputs(model)), state(model)
    with gh.record(model, "*") as seen:
        during = model(*inputs(model))
    assert torch.equal(during, before)
    assert list(seen) == list(sites(model))
    assert state(model) == tree
    assert torch.equal(model(*inputs(model)), before)
    for name, value in seen.items():
        assert not value.requires_grad
        assert len(seen.axes(name)) == value.dim()


@many
@given(specs())
def test_the_residual_stream_is_the_sum_of_sublayer_outputs(s: spec.Spec) -> None:
    model = build_random(s)
    with gh.record(model, "*") as seen:
        model(*inputs(model))
    for prefix, stack in stacks(model).items():
        stream = seen[f"{prefix}embed"]
        for layer, block in enumerate(stack.blocks):
            assert torch.equal(seen[f"{prefix}resid_pre.{layer}"], stream)
            steps = [("attn_out", "resid_mid", block.attention), ("ffn_out", "resid_post", block.feedforward)]
            if hasattr(block, "cross"):
                steps.insert(1, ("cross_attn_out", "cross_resid_mid", block.cross))
            for added, after, sublayer in steps:
                stream = stream + seen[f"{prefix}{added}.{layer}"]
                if s.norm_placement == "post":
                    stream = sublayer.norm(stream)
                # The same sums in the same order: equal to the last bit.
                assert torch.equal(seen[f"{prefix}{after}.{layer}"], stream)
        assert torch.equal(seen[f"{prefix}final"], stack.norm(stream))


@many
@given(specs())
def test_patterns_are_the_softmax_and_reproduce_the_kernel(s: spec.Spec) -> None:
    model = build_random(s)
    with gh.record(model, "*") as seen:
        model(*inputs(model))
    for name in seen:
        if "pattern" not in name:
            continue
        pattern, scores = seen[name], seen[name.replace("pattern", "scores")]
        q, k, v, z = (seen[name.replace("pattern", other)] for other in "qkvz")
        assert_close(pattern.sum(-1), torch.ones_like(pattern.sum(-1)))
        assert_close(pattern, scores.softmax(-1))
        group = q.shape[1] // k.shape[1]
        assert_close(torch.einsum("bhqk,bhkd->bhqd", pattern, v.repeat_interleave(group, 1)), z)
        if not isinstance(s.position, spec.Relative | spec.Alibi) and s.attention_softcap is None:
            scale = s.attention_scale or s.d_head**-0.5
            raw = torch.einsum("bhqd,bhkd->bhqk", q, k.repeat_interleave(group, 1)) * scale
            assert_close(torch.where(scores.isinf(), -torch.inf, raw), scores)


@many
@given(specs())
def test_masked_keys_have_weight_0(s: spec.Spec) -> None:
    """The mask by its definition: causality, window and padding."""
    model = build_random(s)
    lengths = torch.tensor([6, 4])
    call = {} if isinstance(model, gh.models.Seq2Seq) else {"lengths": lengths}
    with gh.record(model, "*") as seen:
        model(*inputs(model), **call)
    for name in seen:
        stem, _, layer = name.rpartition(".")
        if stem not in ("pattern", "decoder.pattern", "encoder.pattern"):
            continue
        pattern = seen[name]
        window = s.window(int(layer))
        for b, i, j in torch.cartesian_prod(torch.arange(2), *(torch.arange(n) for n in pattern.shape[2:])).tolist():
            causal = isinstance(s, spec.DecoderSpec) or stem.startswith("decoder.")
            hidden = (causal and j > i) or (window and abs(i - j) >= window) or (call and j >= lengths[b])
            if i < lengths[b] or not call:  # queries at padding are not compared
                assert bool((pattern[b, :, i, j] == 0).all()) == bool(hidden)


PARTS = [
    ("pattern.*[head=2, query=-1]", lambda one: one[:, 2, -1]),
    ("pattern.*[batch=1, head=1:3, query=2:5, key=:2]", lambda one: one[1, 1:3, 2:5, :2]),
    ("scores.*[query=-2:, key=0]", lambda one: one[:, :, -2:, 0]),
    ("pattern.*[query=4:2]", lambda one: one[:, :, 4:2]),
    ("q.*[head=-1, width=3:5]", lambda one: one[:, -1, :, 3:5]),
    ("k.*[head=1]", lambda one: one[:, 1]),
    ("resid_post.*[position=-1]", lambda one: one[:, -1]),
    ("hidden.*[neuron=5, batch=0]", lambda one: one[0, :, 5]),
]


@pytest.mark.few(8)
@pytest.mark.parametrize("tile", [1, 50, 2**20])
@pytest.mark.parametrize(("name", "cut"), PARTS)
def test_a_slice_equals_the_slice_of_the_whole(
    name: str, cut: Callable[[Tensor], Tensor], tile: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = small(n_layers=2, windows=(3, 0), position="alibi")
    stem = name.partition("[")[0]
    with gh.record(model, stem) as whole:
        model(IDS, lengths=torch.tensor([6, 4]))
    monkeypatch.setitem(attention_map.TILE, "cpu", tile)
    with gh.record(model, name) as part:
        model(IDS, lengths=torch.tensor([6, 4]))
    for layer in range(2):
        expected = cut(whole[f"{stem[:-1]}{layer}"])
        assert_close(part[name.replace("*", str(layer))], expected)
        assert torch.equal(part[f"{stem[:-1]}{layer}"], part[name.replace("*", str(layer))])
        assert len(part.axes(name)) == expected.dim() + 1  # with all layers in one


def test_a_slice_does_not_keep_the_whole_tensor_alive() -> None:
    model = small()
    with gh.record(model, "resid_post.0[position=-1]") as seen:
        model(IDS)
    assert seen["resid_post.0"].untyped_storage().nbytes() == seen["resid_post.0"].numel() * 8


def test_only_the_requested_queries_are_recomputed(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    multiply = torch.bmm

    def counting(a: Tensor, b: Tensor, *, out: Tensor) -> Tensor:
        sizes.append(out.numel())
        return multiply(a, b, out=out)

    monkeypatch.setattr(attention_map.torch, "bmm", counting)
    model = small()
    with gh.record(model, "pattern.1[batch=0, head=2, query=-1]"):
        model(IDS)
    assert sizes == [6]


def test_slices_of_one_site_are_distinguished() -> None:
    model = small()
    with gh.record(model, "pattern.0[head=0]", "pattern.0[head=1]") as seen:
        model(IDS)
    assert not torch.equal(seen["pattern.0[head=0]"], seen["pattern.0[head=1]"])
    with gh.record(model, "pattern.0", "pattern.0[head=1]") as both:
        model(IDS)
    assert torch.equal(both["pattern.0"][:, 1], both["pattern.0[head=1]"])
    assert set(dict(both)) == {"pattern.0", "pattern.0[head=1]"}
    with pytest.raises(gh.InputError, match=r"is ambiguous: pattern\.0\[head=0\] or pattern\.0\[head=1\]; give"):
        seen["pattern.0"]


def test_layers_are_stacked_in_order() -> None:
    model = small(n_layers=3)
    with gh.record(model, "z.2", "z.0", "z.1", "resid_post.1") as seen:
        model(IDS)
    assert torch.equal(seen["z.*"], torch.stack([seen["z.0"], seen["z.1"], seen["z.2"]]))
    for name in ("*", "*.1"):
        with pytest.raises(gh.InputError, match="is ambiguous"):
            seen[name]


def test_a_recording_is_a_mapping() -> None:
    model = small()
    with gh.record(model, "pattern.0[head=2, query=-1]", "z.0") as seen:
        model(IDS)
    assert torch.equal(seen["pattern.0[query=-1,head=2]"], seen["pattern.0"])
    assert "pattern.0" in seen
    assert "pattern.1" not in seen
    assert seen.get("nothing") is None
    assert list(seen) == ["pattern.0[head=2, query=-1]", "z.0"]
    with pytest.raises(KeyError):
        seen["nothing"]
    with pytest.raises(gh.InputError, match="0 is not the name of a site"):
        seen[0]


def test_a_recording_does_not_keep_the_model_alive() -> None:
    model = small()
    with gh.record(model, "z.0[head=1]") as seen:
        model(IDS)
    held = weakref.ref(model)
    del model
    gc.collect()
    assert held() is None
    assert len(pickle.dumps(seen)) < 3000 + seen["z.0"].numel() * 8


def test_an_empty_slice_is_empty() -> None:
    model = small()
    with gh.record(model, "pattern.0[head=1:1]", "z.0[position=3:3]") as seen:
        model(IDS)
    assert seen["pattern.0"].shape == (2, 0, 6, 6)
    assert seen["z.0"].shape == (2, 4, 0, 16)
    assert seen._repr_html_()


def test_hooks_changed_while_a_kernel_is_replaced_persist() -> None:
    model = small()
    calls: list[str] = []
    attention = model.stack.blocks[0].attention.layer
    old = attention.attend.register_forward_hook(lambda module, args, value: calls.append("old"))
    with gh.edit(model, {"pattern.0": lambda value: value}):
        attention.attend.register_forward_hook(lambda module, args, value: calls.append("new"))
        old.remove()
        model(IDS)
    model(IDS)
    assert calls == ["new", "new"]


def test_a_recording_has_the_latest_call() -> None:
    model = small()
    with gh.record(model, "resid_post.1") as seen:
        model(IDS)
        first = seen["resid_post.1"]
        model(IDS.flip(1))
    with gh.record(model, "resid_post.1") as again:
        model(IDS.flip(1))
    assert torch.equal(seen["resid_post.1"], again["resid_post.1"])
    assert not torch.equal(first, again["resid_post.1"])


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_call_that_fails_midway_leaves_nothing(error: type[BaseException]) -> None:
    model = small(n_layers=3)
    failing = False

    def fail(module: nn.Module, args: object) -> None:
        if failing:
            raise error

    handle = model.stack.blocks[2].register_forward_pre_hook(fail)
    with gh.record(model, "resid_post.*") as good:
        model(IDS)
    with contextlib.suppress(error), gh.record(model, "resid_post.*") as seen:
        model(IDS)
        failing = True
        model(IDS.flip(1))
    assert set(seen) == set(good)
    assert all(seen[name].equal(good[name]) for name in good)  # all from one call, the last that completed
    with contextlib.suppress(error), gh.record(model, "resid_post.*") as nothing:
        model(IDS)
    assert len(nothing) == 0
    with pytest.raises(gh.InputError, match=r"resid_post.0 has not been recorded yet"):
        nothing["resid_post.*"]
    # Also inside the block, and a later call is recorded in full.
    with gh.record(model, "resid_post.*") as seen:
        with contextlib.suppress(error):
            model(IDS.flip(1))
        assert error is KeyboardInterrupt or len(seen) == 0
        failing = False
        model(IDS)
    assert all(seen[name].equal(good[name]) for name in good)
    handle.remove()


def test_a_call_stopped_by_another_record_leaves_nothing() -> None:
    model = small()
    with gh.record(model, "resid_post.*") as outer:
        model(IDS)
        before = dict(outer)
        with gh.record(model, "q.1", stop=True):
            model(IDS.flip(1))
        assert all(outer[name] is value for name, value in before.items())


def test_an_edit_may_read_activations_of_the_same_call() -> None:
    model = small()
    with gh.record(model, "resid_post.*") as seen:
        model(IDS.flip(1))
        with gh.edit(model, {"resid_mid.1": lambda value: seen["resid_post.0"]}):
            edited = model(IDS)
    with gh.record(model, "resid_post.0") as plain:
        model(IDS)
    with gh.edit(model, {"resid_mid.1": plain["resid_post.0"]}):
        assert model(IDS).equal(edited)


def test_a_submodule_called_alone_is_recorded() -> None:
    model = small()
    with gh.record(model, "final") as seen:
        model.stack.norm(torch.ones(1, 2, 64, dtype=torch.float64))
    assert seen["final"].shape == (1, 2, 64)


def test_keys_recorded_from_a_cache_stay_as_they_were() -> None:
    model = small()
    cache = model.make_cache(2, 8)
    with torch.no_grad(), gh.record(model, "k.0") as seen:
        model(IDS[:, :3], cache=cache)
        held = seen["k.0"]
        before = held.clone()
        model(IDS[:, 3:], cache=cache)
    assert torch.equal(held, before)


def test_gradients_equal_those_of_an_edit() -> None:
    model = small(windows=(3, 0))
    names = ["embed", "q.0", "v.1", "scores.0", "pattern.1", "z.0", "hidden.1", "resid_mid.0", "final"]
    with gh.record(model, *names, grad=True) as seen:
        out = model(IDS)[0, 4].square().sum()
        slopes = torch.autograd.grad(out, [seen[name] for name in names])
    for name, slope in zip(names, slopes, strict=True):
        away = torch.where(seen[name].detach().isinf(), 0, torch.randn_like(slope))
        step = 1e-6

        def at(size: float, name: str = name, away: Tensor = away) -> Tensor:
            with torch.no_grad(), gh.edit(model, {name: lambda value: value + size * away}):
                return model(IDS)[0, 4].square().sum()

        # A central difference is off by the step's square and by rounding over the step: 1e-12 and 1e-10 here.
        assert_close((at(step) - at(-step)) / (2 * step), (slope * away).sum(), 1e-6)


def test_grad_of_a_slice_is_refused() -> None:
    with (
        pytest.raises(gh.InputError, match=r"resid_post\.0\[position=1\] is a slice.*record resid_post\.0"),
        gh.record(small(), "resid_post.0[position=1]", grad=True),
    ):
        pass


def test_stop_leaves_the_rest_of_the_model_uncomputed() -> None:
    model = small(n_layers=3)
    reached: list[int] = []
    for layer, block in enumerate(model.stack.blocks):
        block.register_forward_pre_hook(lambda module, args, layer=layer: reached.append(layer))
    with gh.record(model, "pattern.1", "q.0", stop=True) as seen:
        model(IDS)
        raise AssertionError("the block goes on")
    assert reached == [0, 1]
    assert set(seen) == {"q.0", "pattern.1"}
    with gh.record(model, "pattern.1") as whole:
        model(IDS)
    assert torch.equal(seen["pattern.1"], whole["pattern.1"])


def test_an_inner_stop_does_not_end_an_outer_record() -> None:
    model = small()
    with gh.record(model, "resid_post.1", stop=True) as outer:
        with gh.record(model, "q.0", stop=True) as inner:
            model(IDS)
        assert list(inner) == ["q.0"]
        assert list(outer) == []
        model(IDS)
    assert list(outer) == ["resid_post.1"]


def test_errors_leave_the_model_as_it_was() -> None:
    model = small()
    tree = state(model)

    def broken(value: Tensor) -> Tensor:
        raise RuntimeError("mine")

    with (
        pytest.raises(RuntimeError, match="mine"),
        gh.record(model, "pattern.*"),
        gh.edit(model, {"pattern.0": broken}),
    ):
        model(IDS)
    assert state(model) == tree
    with (
        pytest.raises(gh.InputError, match="has head index 7, but that axis has size 4"),
        gh.record(model, "q.0[head=7]"),
    ):
        model(IDS)
    assert state(model) == tree
    with pytest.raises(gh.InputError, match="no site"), gh.record(model, "resid_post.0", "resid_poster.0"):
        pass
    assert state(model) == tree


def test_a_fully_masked_query_has_no_weights() -> None:
    model = build_random(gh.preset("tiny-encoder", vocab_size=11))
    with gh.record(model, "pattern.0") as seen:
        model(IDS, lengths=torch.tensor([6, 0]))
    assert_close(seen["pattern.0"][0].sum(-1), torch.ones(4, 6, dtype=torch.float64))
    assert not seen["pattern.0"][1].any()


def test_train_mode_set_inside_the_block_persists() -> None:
    model = small(attention_dropout=0.5).train()
    with gh.edit(model, {"pattern.0": lambda value: value}):
        model.eval()
    assert not any(module.training for module in model.modules())


def test_other_hooks_stay_and_run() -> None:
    model = small()
    calls: list[str] = []
    attend = model.stack.blocks[0].attention.layer.attend
    attend.register_forward_hook(lambda module, args, value: calls.append("theirs"))
    with gh.edit(model, {"pattern.0": lambda value: value}):
        model(IDS)
    model(IDS)
    assert calls == ["theirs", "theirs"]


@pytest.mark.parametrize("name", ["pattern.0", "z.0"])
def test_other_threads_are_not_recorded(name: str) -> None:
    model = small()
    with torch.no_grad():
        plain = model(IDS)
    found: list[Tensor] = []

    def elsewhere() -> None:
        with torch.no_grad():
            found.append(model(IDS))

    with torch.no_grad(), gh.edit(model, {name: 0.0}), gh.record(model, name) as seen:
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        assert list(seen) == []
        changed = model(IDS)
    assert torch.equal(found[0], plain)
    assert not torch.equal(changed, plain)


def test_a_second_record_of_the_same_model_waits() -> None:
    model = small()
    order: list[str] = []
    inside = threading.Event()

    def other() -> None:
        inside.wait()
        with gh.edit(model, {"z.0": 0.0}):
            order.append("other")

    thread = threading.Thread(target=other)
    thread.start()
    with gh.record(model, "z.0"):
        inside.set()
        thread.join(0.2)
        order.append("first")
    thread.join()
    assert order == ["first", "other"]


@pytest.mark.long
def test_a_compiled_model_is_recorded_and_stays_compiled() -> None:
    torch.compiler.reset()
    model = small().float()
    made = 0

    def backend(graph: torch.fx.GraphModule, example: list[Tensor]) -> Callable[..., object]:
        nonlocal made
        made += 1
        return graph.forward

    compiled = torch.compile(model, backend=backend)
    with torch.no_grad():
        before = compiled(IDS)
        graphs = made
        with gh.record(compiled, "pattern.*") as seen, gh.edit(compiled, {"z.1": 0.0}):
            changed = compiled(IDS)
        with torch._dynamo.config.patch(error_on_recompile=True):
            after = compiled(IDS)
    assert len(seen) == 2
    assert not torch.equal(changed, before)
    assert torch.equal(after, before)
    assert made == graphs


def test_a_copy_made_inside_the_block_is_edited_as_long_as_the_model_is() -> None:
    """An engine runs such a copy."""
    model = small()
    with torch.no_grad():
        plain = model(IDS)
        with gh.edit(model, {"pattern.0": 0.0, "z.1": 0.0}), gh.record(model, "q.0") as seen:
            twin = copy.deepcopy(model)
            changed = twin(IDS)
            assert torch.equal(changed, model(IDS))
        first = seen["q.0"]
        assert torch.equal(twin(IDS), plain)
        with gh.edit(model, {"z.0": 0.0}):  # other edits are not the copy's
            assert torch.equal(twin(IDS.flip(1)), model_alone(IDS.flip(1)))
    assert not torch.equal(changed, plain)
    assert seen["q.0"] is first


def model_alone(ids: Tensor) -> Tensor:
    return small()(ids)


def test_missing_sites_are_refused_with_the_nearest_name() -> None:
    model = small()
    with gh.record(model, "resid_post.*") as seen:
        with pytest.raises(gh.InputError, match=r"resid_post\.0 has not been recorded yet; call the model"):
            seen["resid_post.0"]
        model(IDS)
    with pytest.raises(gh.InputError, match=r"'resid_pre\.0' is not recorded; did you mean"):
        seen["resid_pre.0"]
    with pytest.raises(gh.InputError, match="record was given no site"), gh.record(model):
        pass
    assert repr(seen) == "Recording(resid_post.0 [2, 6, 64], resid_post.1 [2, 6, 64])"
    assert seen["resid_post.*"].shape == (2, 2, 6, 64)
