"""Patching against loops over edits, paths against the residual stream summed by hand, and properties of any model.

Tolerances are those of tests/models/test_properties.py: float64, some dozen operations deep.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from examples import up_to
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from inspected_models import IDS, Model, assert_close, build_random, inputs, linear, small
from spec_strategy import specs
from torch import Tensor, nn

import glasshouse as gh
from glasshouse import spec
from glasshouse.errors import InputError
from glasshouse.inspection import editing
from glasshouse.inspection.inputs.call_arguments import CallArguments
from glasshouse.inspection.patching.activation_patching import ActivationPatching, activation_patching, patch
from glasshouse.inspection.patching.attribution_patching import attribution_patching
from glasshouse.inspection.patching.edge_runner import EdgeRunner
from glasshouse.inspection.patching.path_patching import path_patching
from glasshouse.inspection.sites import sites
from glasshouse.layers.attention import merge_heads, split_heads
from glasshouse.layers.lora import LoRA, attach, lora_layers
from glasshouse.models import Seq2Seq

many = settings(max_examples=up_to(40), deadline=None, suppress_health_check=list(HealthCheck))
OTHER = (IDS + torch.tensor([[0, 3, 0, 5, 0, 1], [2, 0, 0, 0, 4, 0]])) % 11


@pytest.fixture(autouse=True)
def _no_graph() -> Iterator[None]:
    """Run without autograd: torch may use another kernel with it."""
    with torch.no_grad():
        yield


def prompts(model: Model) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    return inputs(model), inputs(model, OTHER)


def weighted_sum(output: Tensor) -> Tensor:
    """Return a metric with another weight for each element of an output, so that every change shows."""
    weights = torch.arange(output.numel(), dtype=output.dtype, device=output.device).sin()
    return (output * weights.view(output.shape)).sum()


def disagreeing(model: Model, length: int = 6) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Return two prompts of one sequence with different top predictions."""
    for _ in range(100):
        here, there = (inputs(model, torch.randint(11, (1, length))) for _ in range(2))
        answers = [output.view(-1, output.shape[-1])[-1].argmax() for output in (model(*here), model(*there))]
        if answers[0] != answers[1]:
            return here, there
    raise AssertionError


def ends(model: Model) -> tuple[list[str], list[str]]:
    """Return the sites that determine the output: the first of each stack, and the last of the last."""
    if isinstance(model, Seq2Seq):
        return ["encoder.resid_pre.0", "decoder.resid_pre.0"], [f"decoder.resid_post.{model.spec.n_layers - 1}"]
    return ["resid_pre.0"], [f"resid_post.{model.spec.n_layers - 1}"]


# patch ------------------------------------------------------------------------------------------------------


@many
@given(specs(), st.data())
def test_the_same_prompt_changes_nothing(s: spec.Spec, data: st.DataObject) -> None:
    model = build_random(s)
    here, _ = prompts(model)
    name = data.draw(st.sampled_from(list(sites(model))))
    assert_close(patch(model, here, here, name), model(*here))


@many
@given(specs())
def test_patching_a_whole_layer_gives_the_clean_output(s: spec.Spec) -> None:
    model = build_random(replace(s, value_embeddings=False))  # they read the token ids past the residual stream
    here, there = prompts(model)
    for names in ends(model):
        assert torch.equal(patch(model, here, there, *names), model(*there))


@many
@given(specs(), st.integers(0, 4), st.data())
def test_nothing_changes_before_the_patched_position(s: spec.Spec, position: int, data: st.DataObject) -> None:
    """For causal models."""
    if isinstance(s, spec.EncoderSpec):
        return
    model = build_random(s)
    model.head = gh.models.heads.NoHead()
    here, there = prompts(model)
    known = [name for name, site in sites(model).items() if "position" in site.axes and "encoder" not in name]
    name = data.draw(st.sampled_from([name for name in known if "cross_k" not in name and "cross_v" not in name]))
    patched, plain = patch(model, here, there, f"{name}[position={position}]"), model(*here)
    if "norm_scale" in name or "result" in name:  # where a norm or a sum over heads is computed by its formula
        assert_close(patched[:, :position], plain[:, :position])
    else:
        assert torch.equal(patched[:, :position], plain[:, :position])


def test_many_sites_are_patched_together() -> None:
    model = small(n_layers=3)
    names = ["z.*[head=1]", "ffn_out.2[position=-1]", "pattern.0[head=0]"]
    with gh.record(model, *names) as seen:
        model(OTHER)
    with gh.edit(model, dict(seen)):
        expected = model(IDS)
    assert not torch.equal(expected, model(IDS))
    assert_close(patch(model, IDS, OTHER, *names), expected)


def test_patching_runs_in_eval_mode_and_restores_the_model() -> None:
    model = small(dropout=0.5, attention_dropout=0.5).train()
    model.stack.blocks[0].eval()
    modes = [module.training for module in model.modules()]
    with torch.enable_grad():
        output = patch(model, IDS, OTHER, "resid_post.1")
        found = activation_patching(model, IDS, OTHER, "z", metric=weighted_sum)
    assert not output.requires_grad
    assert modes == [module.training for module in model.modules()]
    model.eval()
    assert torch.equal(output, model(OTHER))
    assert torch.equal(found.effect, activation_patching(model, IDS, OTHER, "z", metric=weighted_sum).effect)


def test_prompts_must_agree_where_they_are_patched() -> None:
    model = small()
    sentence = r"resid_post.0 has shape \[2, 4, 64\] on clean, but \[2, 6, 64\] on corrupted; give prompts"
    with pytest.raises(InputError, match=sentence):
        patch(model, IDS, OTHER[:, :4], "resid_post.0")
    with pytest.raises(InputError, match=sentence):
        activation_patching(model, IDS, OTHER[:, :4], "resid_post", metric=lambda output: output.sum())
    with pytest.raises(InputError, match=r"but .* on corrupted"):  # edit would spread one row over all
        patch(model, IDS, OTHER[:1], "resid_post.0")
    cut = "resid_post.0[position=-1]"
    assert patch(model, IDS, OTHER[:, :4], cut).shape == model(IDS).shape  # the part agrees


# sweep ------------------------------------------------------------------------------------------------------


def swept_slowly(model: Model, site: str, axis: int, call: dict[str, Any]) -> Tensor:
    """Return the metric with one index patched at a time, by edits of whole activations."""
    here, there = prompts(model)
    rows = []
    for name in [name for name in sites(model) if name.rpartition(".")[0] == site]:
        with gh.record(model, name) as seen:
            model(*there, **call)
        rows.append([])
        for place in range(seen[name].shape[axis]):

            def change(value: Tensor, place: int = place, new: Tensor = seen[name]) -> Tensor:
                changed = value.clone()
                index = (slice(None),) * axis + (place,)
                changed[index] = new[index]
                return changed

            with gh.edit(model, {name: change}):
                rows[-1].append(weighted_sum(model(*here, **call)))
    return torch.stack([torch.stack(row) for row in rows])


@many
@given(specs(), st.data(), st.sampled_from([1, 2000, editing.MAX_ELEMENTS]))
def test_activation_patching_equals_a_loop_over_edits(s: spec.Spec, data: st.DataObject, most: int) -> None:
    """With any number of edits in a batch, from one."""
    model = build_random(s)
    layered = {name.rpartition(".")[0]: site.axes for name, site in sites(model).items() if name[-1].isdigit()}
    site = data.draw(st.sampled_from(list(layered)))
    by = data.draw(st.sampled_from([axis for axis in layered[site][1:] if axis not in ("width", "neuron")]))
    call = {}
    if data.draw(st.booleans()):
        call["lengths"] = torch.tensor([6, 4])
    here, there = prompts(model)
    expected = swept_slowly(model, site, layered[site].index(by), call)
    before, after = weighted_sum(model(*here, **call)), weighted_sum(model(*there, **call))
    assume((after - before).abs() > 1e-6)  # else there is nothing to explain, which is an error
    kwargs: list[tuple[int, int]] = []
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(editing, "MAX_ELEMENTS", most)
        found = activation_patching(
            model, here, there, site, axis=by, metric=weighted_sum, progress=lambda *now: kwargs.append(now), **call
        )
    assert_close(found.metric_values, expected)
    assert_close(found.corrupted_baseline, before)
    assert_close(found.clean_baseline, after)
    assert_close(found.effect * (after - before), expected - before)
    assert kwargs == [((layer + 1) * expected.shape[1], expected.numel()) for layer in range(len(expected))]


@pytest.mark.parametrize(
    ("site", "vocab_size", "d_ff", "most", "passes"),
    [
        ("resid_post", 11, 100, editing.MAX_ELEMENTS, [6]),  # all six positions at once
        ("resid_post", 11, 100, 2 * 6 * 100, [2, 2, 2]),  # two times six tokens of a hidden layer
        ("resid_post", 90, 5, 4 * 6 * 90, [4, 2]),  # four times six tokens of logits
        ("pattern", 11, 5, 3 * 4 * 6 * 6, [3, 1]),  # three times the pairs of four heads
        ("pattern", 11, 5, 1, [1, 1, 1, 1]),
    ],
)
def test_edits_are_batched_up_to_max_elements(
    site: str, vocab_size: int, d_ff: int, most: int, passes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(editing, "MAX_ELEMENTS", most)
    model = build_random(gh.preset("tiny-decoder", n_layers=1, vocab_size=vocab_size, d_ff=d_ff))
    rows: list[int] = []
    model.register_forward_pre_hook(lambda _, args: rows.append(len(args[0])))
    activation_patching(model, IDS[:1], OTHER[:1], site, metric=weighted_sum)
    assert rows == [1, 1, 1, *passes]  # both prompts and what is put in, then the patches


def test_the_default_metric_computes_only_the_last_logits() -> None:
    model = small()
    here, there = disagreeing(model)
    made: list[tuple[int, ...]] = []
    model.head.register_forward_hook(lambda _, args, output: made.append(tuple(output.shape)))
    activation_patching(model, here, there, "z")
    assert {shape[1:] for shape in made} == {(1, 11)}


def test_the_default_axis_is_head_or_else_position() -> None:
    model = small(n_layers=3, n_heads=4, n_kv_heads=2)
    shapes = {"resid_post": (3, 6), "z": (3, 4), "k": (3, 2), "pattern": (3, 4), "ffn_out": (3, 6), "hidden": (3, 6)}
    for site, shape in shapes.items():
        assert activation_patching(model, IDS, OTHER, site, metric=weighted_sum).effect.shape == shape
    assert activation_patching(model, IDS, OTHER, "pattern", axis="query", metric=weighted_sum).effect.shape == (3, 6)


@pytest.mark.parametrize("kind", ["tiny-decoder", "tiny-seq2seq"])
def test_the_default_metric_by_hand(kind: str) -> None:
    torch.manual_seed(0)
    model = build_random(gh.preset(kind, vocab_size=11))
    here, there = disagreeing(model)
    site = "decoder.cross_z" if isinstance(model, Seq2Seq) else "z"
    found = activation_patching(model, here, there, site)
    old, new = (int(model(*prompt)[0, -1].argmax()) for prompt in (here, there))
    for prompt, value in ((here, found.corrupted_baseline), (there, found.clean_baseline)):
        logits = model(*prompt)[0, -1]
        assert_close(value, logits[new] - logits[old])
    logits = patch(model, here, there, f"{site}.1[head=2]")[0, -1]
    assert_close(found.metric_values[1, 2], logits[new] - logits[old])
    assert_close(
        found.effect[1, 2],
        (found.metric_values[1, 2] - found.corrupted_baseline) / (found.clean_baseline - found.corrupted_baseline),
    )


@pytest.mark.parametrize("padding", ["lengths", "mask"])
def test_the_default_metric_is_at_the_last_token_that_is_not_padding(padding: str) -> None:
    """A padded batch gives the mean over its sequences alone."""
    model = small()
    long, short = disagreeing(model, 6), disagreeing(model, 4)
    here, there = (
        torch.cat([one, nn.functional.pad(two, (0, 2), value=7)]) for (one,), (two,) in zip(long, short, strict=True)
    )
    lengths = torch.tensor([6, 4])
    kwargs = {"lengths": lengths} if padding == "lengths" else {"mask": torch.arange(6) < lengths[:, None]}
    together = activation_patching(model, here, there, "z", **kwargs)
    alone = [activation_patching(model, *pair, "z") for pair in (long, short)]
    for field in ("corrupted_baseline", "clean_baseline", "metric_values"):
        one, two = (getattr(found, field) for found in alone)
        assert_close(getattr(together, field), (one + two) / 2)


@pytest.mark.parametrize("padding", ["lengths", "mask"])
def test_each_prompt_has_its_own_padding(padding: str) -> None:
    """A keyword given as a pair applies to each prompt, so that both equal the prompts without padding."""
    of_corrupted, of_clean = torch.tensor([4]), torch.tensor([6])
    pair = (of_corrupted, of_clean)
    if padding == "mask":
        pair = tuple(torch.arange(6) < lengths[:, None] for lengths in pair)
    kwargs = {padding: pair}
    model = small("tiny-encoder")  # which attends to later positions, too
    (short,), (long,) = inputs(model, IDS[:1, :4]), inputs(model, OTHER[:1])
    padded = nn.functional.pad(short, (0, 2), value=7)
    name = "resid_post.0[position=0:4]"
    alone = patch(model, short, long, name)
    assert_close(patch(model, padded, long, name, **kwargs)[:, :4], alone)
    back = patch(model, long, short, name)
    assert_close(patch(model, long, padded, name, **{padding: pair[::-1]}), back)
    assert not torch.allclose(patch(model, long, padded, name), back)

    model = small()
    for _ in range(100):
        short, long = torch.randint(11, (1, 4)), torch.randint(11, (1, 6))
        old, new = int(model(short)[0, -1].argmax()), int(model(long)[0, -1].argmax())
        if old != new:
            break
    padded = nn.functional.pad(short, (0, 2), value=7)
    found = activation_patching(model, padded, long, "z", **kwargs)
    for value, logits in (
        (found.corrupted_baseline, model(short)[0, -1]),
        (found.clean_baseline, model(long)[0, -1]),
    ):
        assert_close(value, logits[new] - logits[old])
    logits = patch(model, padded, long, "z.1[head=2]", **kwargs)[0, 3]
    assert_close(found.metric_values[1, 2], logits[new] - logits[old])
    through = path_patching(model, padded, long, "z.0[head=1]", "q.1[head=2]", **kwargs)
    assert_close(through.corrupted_baseline, found.corrupted_baseline)
    assert_close(through.clean_baseline, found.clean_baseline)


def test_more_than_a_pair_is_refused() -> None:
    lengths = torch.tensor([6, 6])
    for tool in (patch, activation_patching):
        with pytest.raises(InputError, match="lengths is a tuple of 3, but there are two prompts"):
            tool(small(), IDS, OTHER, "z.0" if tool is patch else "z", lengths=(lengths, lengths, lengths))


def test_the_default_metric_of_a_classifier() -> None:
    torch.manual_seed(0)
    model = build_random(
        gh.preset("tiny-encoder", vocab_size=11, head={"kind": "sequence_classification", "n_labels": 5})
    )
    (a,), (b,) = disagreeing(model)
    old, new = int(model(a).argmax()), int(model(b).argmax())
    found = activation_patching(model, a, b, "resid_post")
    assert_close(found.clean_baseline, model(b)[0, new] - model(b)[0, old])
    assert_close(found.corrupted_baseline, model(a)[0, new] - model(a)[0, old])


def test_activation_patching_with_lora_attached() -> None:
    torch.manual_seed(0)
    model = small()
    attach(model, LoRA(rank=2, targets=("*",)))
    for layer in lora_layers(model).values():
        layer.lora_b.normal_()
    expected = swept_slowly(model, "z", 1, {})
    assert_close(activation_patching(model, IDS, OTHER, "z", metric=weighted_sum).metric_values, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_half_precision_metrics_are_float32(dtype: torch.dtype) -> None:
    model = small().to(dtype)
    found = activation_patching(model, IDS, OTHER, "resid_post", metric=lambda output: output[0, -1, 3])
    assert found.effect.dtype == torch.float32
    assert found.effect[-1].tolist() == [0.0] * 5 + [1.0]


@pytest.mark.parametrize(
    ("site", "axis", "names"),
    [
        ("z", ("head", "position"), "z.{layer}[head={0}, position={1}]"),
        ("z", ("position", "head"), "z.{layer}[head={1}, position={0}]"),
        ("k", ("head", "position"), "k.{layer}[head={0}, position={1}]"),
        ("z[head=-1]", None, "z.{layer}[head=3, position={0}]"),
        ("resid_post[width=5:9]", "position", "resid_post.{layer}[position={0}, width=5:9]"),
        ("pattern[query=2:4]", ("head", "query"), "pattern.{layer}[head={0}, query={1}+2]"),
        ("attn_norm_scale", None, "attn_norm_scale.{layer}[position={0}]"),
        ("embed", "position", "embed[position={0}]"),
        ("z.1", "head", "z.1[head={0}]"),
    ],
)
def test_several_axes_and_parts_equal_one_patch_at_a_time(site: str, axis: Any, names: str) -> None:  # noqa: ANN401
    model = small(n_kv_heads=2)
    found = activation_patching(model, IDS, OTHER, site, axis=axis, metric=weighted_sum)
    layers = range(2) if "{layer}" in names else range(1)
    assert found.effect.shape == (len(layers), *map(len, found.axis_labels))
    assert len(found.layer_labels) == len(layers)
    for layer in layers:
        for index in itertools.product(*map(range, found.effect.shape[1:])):
            name = names.format(*index, layer=layer).replace("query=0+2", "query=2").replace("query=1+2", "query=3")
            assert_close(found.metric_values[layer][index], weighted_sum(patch(model, IDS, OTHER, name)))
    assert set(found.axes) == {name for name, value in vars(found).items() if isinstance(value, Tensor)}
    assert all(len(found.axes[name]) == getattr(found, name).dim() for name in found.axes)
    assert found._repr_html_().count("<tr>") == found.effect.flatten(0, -2).shape[0] + 1


@pytest.mark.parametrize(
    "names", [["z.1[head=1]", "z.0[head=3]"], ["z.1[head=1]", "z.1[head=0]"], ["embed", "ffn_out.1"]]
)
def test_a_list_of_sites_has_a_row_for_each(names: list[str]) -> None:
    model = small()
    found = activation_patching(model, IDS, OTHER, names, metric=weighted_sum)
    each = [activation_patching(model, IDS, OTHER, one, metric=weighted_sum) for one in names]
    assert_close(found.effect, torch.cat([one.effect for one in each]))
    assert found.layer_labels == tuple(names)
    estimated = attribution_patching(model, IDS, OTHER, names, metric=weighted_sum)
    each = [attribution_patching(model, IDS, OTHER, one, metric=weighted_sum) for one in names]
    assert_close(estimated.effect, torch.cat([one.effect for one in each]))
    assert "z.1[head=1]" not in names or "z.1[head=1]" in found._repr_html_()


def test_invalid_activation_patching_is_refused() -> None:
    model = small()
    for names in (["z.1[head=1]", "z.0"], []):
        with pytest.raises(InputError, match="have not the same axes"):
            activation_patching(model, IDS, OTHER, names, metric=weighted_sum)
    pair = small("tiny-seq2seq")
    prompts = [(IDS, ids[:, :4]) for ids in (IDS, OTHER)]
    for work in (activation_patching, attribution_patching):
        with pytest.raises(InputError, match=r"decoder.resid_post.0 is patched at \[4\] indices, but .* at \[6\]"):
            work(pair, *prompts, ["encoder.resid_post.0", "decoder.resid_post.0"], metric=lambda x: x[0, -1, 3])
    with pytest.raises(InputError, match=r"the layers have no site 'resid_pots'; did you mean resid_post\?"):
        activation_patching(model, IDS, OTHER, "resid_pots")
    with pytest.raises(InputError, match=r"the layers have no site 'z\.7'; "):
        activation_patching(model, IDS, OTHER, "z.7")
    with pytest.raises(InputError, match=r"z.0\[head=9\] has head index 9, but that axis has size 4"):
        activation_patching(model, IDS, OTHER, "z.0[head=9]", metric=weighted_sum)
    with pytest.raises(InputError, match=r"z\[head=1\] has no axis 'head' to patch along; it has position, width"):
        activation_patching(model, IDS, OTHER, "z[head=1]", axis=("head", "position"))
    with pytest.raises(InputError, match="must be one or several different of head, position, width"):
        activation_patching(model, IDS, OTHER, "z", axis=("head", "head"))
    with pytest.raises(InputError, match="resid_post has no axis 'head' to patch along; it has position, width"):
        activation_patching(model, IDS, OTHER, "resid_post", axis="head")
    with pytest.raises(InputError, match="z has no axis 'batch' to patch along"):
        activation_patching(model, IDS, OTHER, "z", axis="batch")
    with pytest.raises(
        InputError, match=r"the top prediction is \d+ on both prompts, so there is no logit difference"
    ):
        activation_patching(model, IDS, IDS, "z")
    with pytest.raises(InputError, match="the metric is 1 on corrupted and 1 on clean, so there is no difference"):
        activation_patching(model, IDS, OTHER, "z", metric=lambda output: 1.0)
    with pytest.raises(InputError, match="the metric is nan on corrupted and nan on clean"):
        activation_patching(model, IDS, OTHER, "z", metric=lambda output: float("nan"))
    with pytest.raises(InputError, match=r"the metric gave shape \[2, 6\], but it must be a scalar"):
        activation_patching(model, IDS, OTHER, "z", metric=lambda output: output[..., 0])
    with pytest.raises(InputError, match="the model outputs vectors, not logits; give a metric"):
        activation_patching(small(head="none"), IDS, OTHER, "z")


def test_activation_patching_html_has_tokens() -> None:
    tok = gh.Tokenizer.train(texts=["<b> or not <b>"], vocab_size=263)
    here, there = (torch.tensor([tok.encode(text, add_special_tokens=False)]) for text in ("<b>a", "<b>c"))
    model = build_random(gh.preset("tiny-decoder", vocab_size=263))
    found = activation_patching(model, here, there, "resid_post", tok=tok)
    assert found.axis_labels[0][-1] == "a → c"
    assert "".join(found.axis_labels[0][:-1]) == "<b>"
    html = found._repr_html_()
    assert "a → c" in html
    assert "<b>" not in html
    assert html.count("<td") == found.effect.numel()
    assert set(found.axes) == {name for name, value in vars(found).items() if isinstance(value, Tensor)}


def test_source_keys_are_labelled_by_their_tokens() -> None:
    torch.manual_seed(0)
    model = build_random(gh.preset("tiny-seq2seq", vocab_size=11))
    here, there = (
        (torch.tensor([[7, 8, 9]]), torch.tensor([[1, 2]])),
        (torch.tensor([[7, 6, 9]]), torch.tensor([[1, 3]])),
    )
    source, target = ("7", "8 → 6", "9"), ("1", "2 → 3")
    expected = {
        ("encoder.resid_post", "position"): source,
        ("decoder.cross_k", "position"): source,
        ("decoder.cross_pattern", "key"): source,
        ("decoder.cross_pattern", "query"): target,
        ("decoder.resid_post", "position"): target,
    }
    for (site, by), names in expected.items():
        assert activation_patching(model, here, there, site, axis=by, metric=weighted_sum).axis_labels == (names,)


def test_html_of_many_positions_stays_small() -> None:
    wide = torch.rand(3, 1000)
    rows, columns = ("layer 0", "layer 1", "layer 2"), (("word",) * 1000,)
    html = ActivationPatching(wide, wide, wide[0, 0], wide[0, 1], "z", ("position",), rows, columns)._repr_html_()
    assert "936 more positions are not shown" in html
    assert html.count("<td") == 3 * 64


# path -------------------------------------------------------------------------------------------------------


def stream_by_hand(model: Model, embed: Tensor, z: list[Tensor], ffn_out: list[Tensor]) -> Tensor:
    """Return the residual stream of layers with these outputs, for any norm placement."""
    x = embed
    for block, heads, added in zip(model.stack.blocks, z, ffn_out, strict=False):
        attention = block.attention
        gathered = attention.layer.out(merge_heads(heads))
        match model.spec.norm_placement:
            case "pre" | "parallel":
                x = x + gathered + added
            case "sandwich" | "output":
                x = x + attention.norm_out(gathered) + added
            case "post":
                x = block.feedforward.norm(attention.norm(x + gathered) + added)
    return x


@pytest.mark.few(3)
@pytest.mark.parametrize("order", ["pre", "post", "sandwich", "output", "parallel"])
@pytest.mark.parametrize(("read", "head"), [("q", 3), ("k", 1), ("v", 0)])
def test_a_path_is_through_the_residual_stream_alone(order: str, read: str, head: int) -> None:
    """Two layers further, past heads and feed-forward layers that would respond to the change."""
    model = small(n_layers=4, n_heads=4, n_kv_heads=2, norm_placement=order, position="learned", qk_norm=False)
    with gh.record(model, "embed", "z.*", "ffn_out.*", f"{read}.3") as here:
        model(IDS)
    with gh.record(model, "z.1") as there:
        model(OTHER)
    z, ffn_out = list(here["z.*"].clone()), list(here["ffn_out.*"])
    z[1][:, 2] = there["z.1"][:, 2]
    x = stream_by_hand(model, here["embed"], z[:3], ffn_out[:3])
    attention = model.stack.blocks[3].attention
    maps = {"q": attention.layer.query, "k": attention.layer.key, "v": attention.layer.value}
    given = x if order in ("post", "output") else attention.norm(x)
    expected = split_heads(maps[read](given), attention.layer.d_head)
    changed = here[f"{read}.3"].clone()
    changed[:, head] = expected[:, head]
    with gh.edit(model, {f"{read}.3": changed}):
        output = model(IDS)
    found = path_patching(model, IDS, OTHER, "z.1[head=2]", f"{read}.3[head={head}]", metric=weighted_sum)
    assert not torch.allclose(output, model(IDS))
    assert_close(found.output, output)
    before, after = (weighted_sum(model(ids)) for ids in (IDS, OTHER))
    assert_close(found.effect, (weighted_sum(output) - before) / (after - before))


@pytest.mark.parametrize(("sender", "receiver"), [("z.0", "cross_q.0"), ("cross_z.0", "v.1"), ("z.0", "cross_q.1")])
def test_a_path_in_a_decoder_with_cross_attention(sender: str, receiver: str) -> None:
    """With pre-norm, the residual stream at the receiver differs by the sender's output alone."""
    torch.manual_seed(0)
    model = build_random(gh.preset("tiny-seq2seq", vocab_size=11, norm_placement="pre", position="learned"))
    (kind, _), (reads, layer) = sender.split("."), receiver.split(".")
    sends, d = model.decoder.blocks[0], model.spec.d_head
    attention = (sends.cross if "cross" in kind else sends.attention).layer
    block = model.decoder.blocks[int(layer)]
    stream = f"decoder.{'resid_mid' if reads == 'cross_q' else 'resid_pre'}.{layer}"
    part = block.cross if reads == "cross_q" else block.attention
    here, there = prompts(model)
    with gh.record(model, f"decoder.{sender}", stream) as clean:
        model(*here)
    with gh.record(model, f"decoder.{sender}") as other:
        model(*there)
    moved = (other[f"decoder.{sender}"] - clean[f"decoder.{sender}"])[:, 1]
    x = clean[stream] + moved @ attention.out.weight[:, d : 2 * d].T
    read = (part.layer.query if reads == "cross_q" else part.layer.value)(part.norm(x))
    with gh.edit(model, {f"decoder.{receiver}[head=0]": split_heads(read, d)[:, 0]}):
        expected = model(*here)
    found = path_patching(
        model, here, there, f"decoder.{sender}[head=1]", f"decoder.{receiver}[head=0]", metric=weighted_sum
    )
    assert not torch.allclose(expected, model(*here))
    assert_close(found.output, expected)


@pytest.fixture
def linear_model() -> Model:
    return linear()


def even(length: int) -> Tensor:
    """Return the weights of uniform causal attention."""
    return torch.tril(1 / torch.arange(1, length + 1, dtype=torch.float64)[:, None].expand(length, length))


def test_a_path_through_a_linear_model_is_a_product_of_matrices(linear_model: Model) -> None:
    """One path as a product of matrices: attention, values and output of the sender, then of the receiver."""
    first, last = linear_model.stack.blocks[0].attention.layer, linear_model.stack.blocks[2].attention.layer
    a, b = 1, 0  # the heads
    embedding, unembedding = linear_model.token_embedding.table.weight.double(), linear_model.head.weight
    apart = embedding[OTHER] - embedding[IDS]  # [B, S, D]
    z = even(6) @ apart @ first.value.weight[4 * a : 4 * a + 4].T
    value = z @ first.out.weight[:, 4 * a : 4 * a + 4].T @ last.value.weight[4 * b : 4 * b + 4].T
    added = even(6) @ value @ last.out.weight[:, 4 * b : 4 * b + 4].T
    expected = linear_model(IDS) + added @ unembedding.T
    found = path_patching(linear_model, IDS, OTHER, f"z.0[head={a}]", f"v.2[head={b}]", metric=weighted_sum)
    assert not torch.allclose(expected, linear_model(IDS))
    assert_close(found.output, expected)


def test_no_effect_on_a_receiver_orthogonal_to_the_sender(linear_model: Model) -> None:
    first, last = linear_model.stack.blocks[0].attention.layer, linear_model.stack.blocks[2].attention.layer
    written, _ = torch.linalg.qr(first.out.weight[:, 4:])  # what head 1 writes, as 4 directions of 12
    last.value.weight[:4] -= last.value.weight[:4] @ written @ written.T
    found = path_patching(linear_model, IDS, OTHER, "z.0[head=1]", "v.2[head=0]", metric=weighted_sum)
    assert_close(found.output, linear_model(IDS))
    assert_close(found.effect, torch.zeros((), dtype=torch.float64))
    other_ways = patch(linear_model, IDS, OTHER, "z.0[head=1]")
    assert not torch.allclose(other_ways, linear_model(IDS))
    read = path_patching(linear_model, IDS, OTHER, "z.0[head=1]", "v.2[head=1]", metric=weighted_sum)
    assert not torch.allclose(read.output, linear_model(IDS))


@pytest.mark.parametrize(
    ("sender", "receiver", "sentence"),
    [
        (
            "z.1[head=0]",
            "q.1[head=0]",
            r"there is no path .* from z.1\[head=0\] to q.1\[head=0\]; give a writer before the",
        ),
        ("z.1[head=0]", "v.0", "there is no path through the residual stream from z.1"),
        (
            "resid_post.0",
            "q.1",
            "the writer is 'resid_post.0', but it must be one site of embed, z, cross_z, ffn_out; name its layer",
        ),
        (
            "z.*",
            "q.1",
            r"the writer is 'z.\*', but it must be one site of embed, z, cross_z, ffn_out; name its layer",
        ),
        (
            "z.0",
            "z.1",
            "the reader is 'z.1', but it must be one site of q, k, v, cross_q, cross_k, cross_v, or ffn",
        ),
    ],
)
def test_invalid_paths_are_refused(sender: str, receiver: str, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        path_patching(small(), IDS, OTHER, sender, receiver)


@pytest.mark.parametrize(
    ("sender", "receiver", "sentence"),
    [
        (
            "encoder.z.0",
            "decoder.q.1",
            "there is no path through the residual stream from encoder.z.0 to decoder.q.1",
        ),
        ("decoder.z.0", "decoder.cross_k.1", "there is no path .* from decoder.z.0 to decoder.cross_k.1"),
    ],
)
def test_a_path_stays_in_its_stack(sender: str, receiver: str, sentence: str) -> None:
    model = build_random(gh.preset("tiny-seq2seq", vocab_size=11))
    here, there = prompts(model)
    with pytest.raises(InputError, match=sentence):
        path_patching(model, here, there, sender, receiver)


@pytest.mark.parametrize("order", ["pre", "post", "sandwich", "output", "parallel"])
@pytest.mark.parametrize("kind", ["gelu", "swiglu"])
def test_paths_from_and_into_every_component_by_hand(order: str, kind: str) -> None:
    """The embedding and a feed-forward layer as writers, a feed-forward layer and the logits as readers."""
    model = small(n_layers=3, norm_placement=order, feedforward=kind, position="learned", final_norm=True)
    with gh.record(model, "embed", "z.*", "ffn_out.*") as here:
        model(IDS)
    with gh.record(model, "embed", "ffn_out.0") as there:
        model(OTHER)
    z, ffn_out = list(here["z.*"]), list(here["ffn_out.*"])

    def to_logits(embed: Tensor, ffn: Tensor) -> Tensor:
        x = stream_by_hand(model, embed, z, [ffn, *ffn_out[1:]])
        with gh.edit(model, {"resid_post.2": x}):
            return model(IDS)

    for writer, embed, ffn in (
        ("embed", there["embed"], ffn_out[0]),
        ("ffn_out.0", here["embed"], there["ffn_out.0"]),
    ):
        found = path_patching(model, IDS, OTHER, writer, "logits", metric=weighted_sum)
        assert_close(found.output, to_logits(embed, ffn))
    block = model.stack.blocks[2]
    x = stream_by_hand(model, here["embed"], z[:2], [there["ffn_out.0"], ffn_out[1]])
    gathered = block.attention.layer.out(merge_heads(z[2]))
    middle = {
        "pre": lambda: x + gathered,
        "parallel": lambda: x,
        "post": lambda: block.attention.norm(x + gathered),
    }.get(order, lambda: x + block.attention.norm_out(gathered))()
    bare = order in ("post", "output")
    made = block.feedforward.layer(middle if bare else block.feedforward.norm(middle), None)
    normed = order in ("sandwich", "output")
    with gh.edit(model, {"ffn_out.2": block.feedforward.norm_out(made) if normed else made}):
        expected = model(IDS)
    found = path_patching(model, IDS, OTHER, "ffn_out.0", "ffn.2", metric=weighted_sum)
    assert_close(found.output, expected)
    assert not torch.allclose(expected, model(IDS))


@pytest.mark.parametrize("kind", ["tiny-decoder", "tiny-seq2seq"])
def test_longer_paths_and_sets_of_paths_equal_edges(kind: str) -> None:
    """The same path as a set of edges, of which the first carries what is written in the clean run."""
    model = small(kind, n_layers=3, n_kv_heads=2, norm_placement="pre", final_norm=True)
    here, there = (CallArguments(given, {}) for given in prompts(model))
    edges = EdgeRunner(model, here, there)
    graph = edges.graph
    at = "" if kind == "tiny-decoder" else "decoder."
    paths: list[tuple[list[tuple[str, str]], tuple[Any, ...]]] = [
        (
            [("z.0[head=1]", "q.1[head=2]"), ("z.1[head=2]", "logits")],
            ("z.0[head=1]", "q.1[head=2]", "logits"),
        ),
        (
            # Both query heads of a KV head write what they make of its keys.
            [("embed", "k.1[head=1]"), ("z.1[head=2]", "ffn.2"), ("z.1[head=3]", "ffn.2"), ("ffn_out.2", "logits")],
            ("embed", "k.1[head=1]", "ffn.2", "logits"),
        ),
        (
            [
                ("z.0[head=0]", "k.1[head=0]"), ("z.0[head=0]", "v.1[head=0]"), ("ffn_out.0", "k.1[head=0]"),
                ("ffn_out.0", "v.1[head=0]"), ("z.1[head=0]", "v.2[head=1]"), ("z.1[head=1]", "v.2[head=1]"),
                ("z.2[head=2]", "logits"), ("z.2[head=3]", "logits"),
            ],
            (["z.0[head=0]", "ffn_out.0"], ["k.1[head=0]", "v.1[head=0]"], "v.2[head=1]", "logits"),
        ),
    ]  # fmt: skip
    for each, path in paths:
        chosen, patched = torch.zeros(2, 1, *graph.exists.shape)
        first = {path[0]} if isinstance(path[0], str) else {*path[0]}
        for writer, reader in each:
            place = graph.place(at + writer, reader if reader == "logits" else at + reader)
            (patched if writer in first else chosen)[0][place] = 1
        named = [
            [one if one == "logits" else at + one for one in ([place] if isinstance(place, str) else place)]
            for place in path
        ]
        found = path_patching(model, *prompts(model), *named, metric=weighted_sum)
        assert_close(found.output, edges.run(chosen, patched)[0])
        assert not torch.allclose(found.output, edges.corrupted_output)


def test_a_path_from_the_encoder_into_cross_attention() -> None:
    model = small("tiny-seq2seq", n_layers=2, norm_placement="pre", final_norm=True)
    here, there = (CallArguments(given, {}) for given in prompts(model))
    edges = EdgeRunner(model, here, there)
    chosen, patched = torch.zeros(2, 1, *edges.graph.exists.shape)
    patched[0][edges.graph.place("encoder.ffn_out.0", "decoder.cross_v.1[head=2]")] = 1
    chosen[0][edges.graph.place("decoder.cross_z.1[head=2]", "logits")] = 1
    path = ("encoder.ffn_out.0", "decoder.cross_v.1[head=2]", "logits")
    found = path_patching(model, *prompts(model), *path, metric=weighted_sum)
    assert_close(found.output, edges.run(chosen, patched)[0])
    assert not torch.allclose(found.output, edges.corrupted_output)


def test_path_patching_html() -> None:
    found = path_patching(small(), IDS, OTHER, "z.0[head=1]", "q.1[head=2]", metric=weighted_sum)
    html = found._repr_html_()
    assert f"z.0[head=1] through q.1[head=2]: effect {found.effect:.3f}" in html
    assert html.count("<tr>") == 3
    assert set(found.axes) == {name for name, value in vars(found).items() if isinstance(value, Tensor)}
