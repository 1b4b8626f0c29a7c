"""Sites inside a module: what each head writes, the scale of a norm, the neurons before their activation."""

from __future__ import annotations

import pytest
import torch
from examples import up_to
from hypothesis import HealthCheck, given, settings
from inspected_models import IDS, assert_close, build_random, inputs, small
from spec_strategy import specs
from torch import Tensor

import glasshouse as gh
from glasshouse import spec
from glasshouse.inspection.sites import parts_of, sublayer_of
from glasshouse.layers import lora
from glasshouse.layers.attention import merge_heads
from glasshouse.layers.feedforward import GatedFeedForward
from glasshouse.layers.residual import NoNorm, OutputNorm, ParallelNorm, PostNorm
from glasshouse.models import Seq2Seq

many = settings(max_examples=up_to(40), deadline=None, suppress_health_check=list(HealthCheck))


@many
@given(specs())
def test_derived_sites_by_their_definition(s: spec.Spec) -> None:
    """By loops over heads and coordinates, for every kind of model, norm and feed-forward layer."""
    model = build_random(s)
    with torch.no_grad(), gh.record(model, "*") as seen:
        model(*inputs(model))
    stacks = (
        {"encoder.": model.encoder, "decoder.": model.decoder} if isinstance(model, Seq2Seq) else {"": model.stack}
    )
    for prefix, stack in stacks.items():
        for number, block in enumerate(stack.blocks):
            stream = block_input = seen[f"{prefix}resid_pre.{number}"]
            names = {"attention": ("", "attn", "resid_mid"), "cross": ("cross_", "cross_attn", "cross_resid_mid")}
            for part in parts_of(block):
                cross, norm, after = names.get(part, ("", "ffn", "resid_post"))
                residual, layer = block.get_submodule(part), sublayer_of(block, part)
                if isinstance(residual, PostNorm):
                    normed = stream + seen[f"{prefix}{norm}_out.{number}"]
                elif isinstance(residual, OutputNorm):
                    inner = seen[f"{prefix}{layer.residual_input}.{number}"]
                    normed = layer.residual_projection(inner if part == "feedforward" else merge_heads(inner))
                else:
                    normed = block_input if isinstance(residual, ParallelNorm) else stream
                    assert_close(seen[f"{prefix}{norm}_norm.{number}"], residual.norm(normed))
                if not isinstance(residual, NoNorm):
                    assert_close(seen[f"{prefix}{norm}_norm_scale.{number}"], scale_of(s, normed))
                if part == "feedforward":
                    check_neurons(layer, {name: seen[f"{prefix}{name}.{number}"] for name in neurons(layer)})
                else:
                    z, written = (seen[f"{prefix}{cross}{name}.{number}"] for name in ("z", "result"))
                    for head in range(z.shape[1]):
                        columns = layer.out.weight[:, head * s.d_head : (head + 1) * s.d_head]
                        assert_close(written[:, head], torch.einsum("bsd,wd->bsw", z[:, head], columns))
                stream = seen[f"{prefix}{after}.{number}"]
        if s.final_norm:
            assert_close(seen[f"{prefix}final_norm_scale"], scale_of(s, stream))


def scale_of(s: spec.Spec, x: Tensor) -> Tensor:
    """Return the root of the mean square, of the deviations in LayerNorm, by a sum over coordinates."""
    assert isinstance(s.norm, spec.LayerNorm | spec.RMSNorm)
    mean = x.sum(-1) / x.shape[-1] if isinstance(s.norm, spec.LayerNorm) else torch.zeros(())
    squares = sum((one - mean) ** 2 for one in x.unbind(-1))
    return (squares / x.shape[-1] + s.norm.eps).sqrt()


def neurons(layer: torch.nn.Module) -> list[str]:
    return ["gate", "hidden_pre", "hidden"] if isinstance(layer, GatedFeedForward) else ["hidden_pre", "hidden"]


def check_neurons(layer: torch.nn.Module, seen: dict[str, Tensor]) -> None:
    if "gate" in seen:
        assert_close(layer.activation(seen["gate"]) * seen["hidden_pre"], seen["hidden"])
    else:
        assert_close(layer.activation(seen["hidden_pre"]), seen["hidden"])


def test_the_token_embedding_is_the_tables_rows_scaled() -> None:
    for kind in ("tiny-decoder", "tiny-encoder", "tiny-seq2seq"):
        model = small(kind, embed_scale=True)
        with gh.record(model, "*token_embed") as seen:
            model(*inputs(model))
        for name, ids in zip(seen, inputs(model), strict=True):
            assert_close(seen[name], model.token_embedding.table.weight[ids] * 8)  # the square root of 64


def test_without_one_heads_result_the_output_is_that_without_the_head() -> None:
    for model in (small(norm_placement="sandwich", out_bias=True), small("tiny-encoder"), small("tiny-seq2seq")):
        prefix = "decoder.cross_" if isinstance(model, Seq2Seq) else ""
        with gh.edit(model, {f"{prefix}result.1[head=2]": 0.0}):
            edited = model(*inputs(model))
        with gh.edit(model, {f"{prefix}z.1": gh.ablate_head(2)}):
            assert_close(edited, model(*inputs(model)))


@pytest.mark.parametrize("norm", [spec.LayerNorm(), spec.RMSNorm()])
@pytest.mark.parametrize("placement", ["pre", "post", "sandwich", "output", "parallel"])
def test_a_frozen_scale_makes_the_norm_linear(norm: spec.Norm, placement: str) -> None:
    """With the scale of one input, twice the input gives twice the output: the bias of the norm is zero here."""
    model = small(norm=norm, norm_placement=placement, n_layers=1)
    name = "ffn_norm_scale.0"
    with gh.record(model, name) as seen:
        model(IDS)
    residual = model.stack.blocks[0].feedforward
    module = residual.norm_out if placement == "output" else residual.norm
    if isinstance(norm, spec.LayerNorm):
        module.bias.data.zero_()
    x = torch.randn(2, 6, 64, dtype=torch.float64)
    with gh.edit(model, {name: seen[name]}):
        assert_close(module(2 * x), 2 * module(x))
    with gh.edit(model, {name: 2.0}):
        centred = x - x.mean(-1, keepdim=True) if isinstance(norm, spec.LayerNorm) else x
        assert_close(module(x), centred / 2 * module.weight)


def test_gradients_of_derived_sites_equal_those_of_an_edit() -> None:
    model = small()
    names = ["token_embed", "result.0", "attn_norm_scale.1", "gate.0", "hidden_pre.1", "ffn_norm.0"]
    with gh.record(model, *names, grad=True) as seen:
        out = model(IDS)[0, 4].square().sum()
    for name in names:
        slope = seen.gradient(name, of=out)
        away = torch.randn_like(slope)
        step = 1e-6

        def at(size: float, name: str = name, away: Tensor = away) -> Tensor:
            with torch.no_grad(), gh.edit(model, {name: lambda value: value + size * away}):
                return model(IDS)[0, 4].square().sum()

        # A central difference is off by the step's square and by rounding over the step: 1e-12 and 1e-10 here.
        assert_close((at(step) - at(-step)) / (2 * step), (slope * away).sum(), 1e-6)


def test_the_gradient_of_all_layers_is_stacked() -> None:
    model = small(n_layers=3)
    with gh.record(model, "resid_post.*", grad=True) as seen:
        loss = model(IDS).square().sum()
    together = seen.gradient("resid_post.*", of=loss)
    assert together.shape == (3, 2, 6, 64)
    for layer, one in enumerate(together):
        (alone,) = torch.autograd.grad(loss, seen[f"resid_post.{layer}"], retain_graph=True)
        assert torch.equal(one, alone)
    early = seen["resid_post.0"].sum()  # does not depend on later layers
    assert not seen.gradient("resid_post.*", of=early)[1:].any()
    with gh.record(model, "resid_post.*") as detached:
        loss = model(IDS).sum()
    with pytest.raises(gh.InputError, match=r"not in the graph of the scalar; use gh.record\(\.\.\., grad=True\)"):
        detached.gradient("resid_post.*", of=loss)


def test_what_heads_write_through_lora_sums_to_the_output() -> None:
    model = gh.build(gh.preset("tiny-decoder", out_bias=True)).eval()
    lora.attach(model, lora.LoRA(targets=("out",)))
    with torch.no_grad():
        for layer in lora.lora_layers(model).values():
            layer.lora_b.normal_()
        model.stack.blocks[0].attention.layer.out.base.bias.normal_()
        with gh.record(model, "result.0", "attn_out.0") as seen:
            model(IDS)
    bias = model.stack.blocks[0].attention.layer.out.base.bias
    torch.testing.assert_close(seen["result.0"].sum(1) + bias, seen["attn_out.0"])


@pytest.mark.parametrize("norm", ["rms", "layer"])
def test_the_scale_of_a_large_activation_in_float16(norm: str) -> None:
    """Squares of more than 256 overflow in float16, in which the norms themselves do not."""
    model = small(norm=norm, position="none").half()
    with torch.no_grad():
        model.token_embedding.table.weight[1, 5] = 2000
        plain = model(IDS)
        sites = {name: lambda value: value for name in gh.inspection.sites(model) if "norm_scale" in name}
        with gh.edit(model, sites), gh.record(model, "attn_norm_scale.0") as seen:
            edited = model(IDS)
    assert seen["attn_norm_scale.0"].isfinite().all()
    assert seen["attn_norm_scale.0"].max() > 200
    assert (edited - plain).abs().max() <= 0.01 * plain.abs().max()
