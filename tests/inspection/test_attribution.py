"""Direct logit attribution by hand, and for all specs against a reference in which every component has a factor.

With the norms frozen, the logit is linear in these factors, so its gradient by one is the contribution of that
component. In float64 rounding is 1e-16 of the largest term, a few dozen operations deep: 1e-9 leaves room for that.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from examples import first_of, up_to
from hypothesis import HealthCheck, assume, given, settings
from inspected_models import IDS, Model, assert_close, build_random, inputs
from spec_strategy import VOCABULARY, specs
from torch import Tensor, nn

import glasshouse as gh
from glasshouse import spec
from glasshouse.inspection.attribution import Attribution, attribute
from glasshouse.inspection.recording import Recording
from glasshouse.inspection.sites import Selection
from glasshouse.layers import lora
from glasshouse.models import Seq2Seq

fast = settings(
    max_examples=up_to(60), derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck)
)


def tiny(kind: str = "tiny-decoder", **choices: object) -> Model:
    torch.manual_seed(3)
    sizes = {"d_model": 16, "n_heads": 2, "n_kv_heads": 1, "d_ff": 24, "vocab_size": VOCABULARY}
    return build_random(gh.preset(kind, **sizes, **choices))


def test_by_hand() -> None:
    """One token, which attends to itself alone; one layer, one head, d_model 2.

    Every stream that meets a norm has a mean square of 1, which with an epsilon of 3 the norm divides by 2:

    embedding (1, 1), normed (1/2, 1/2), values times 2 and 4: z = (1, 2), out (1, -2) with a bias of (-3, 2)
    stream (-1, 1), normed (-1/2, 1/2), up times 2 and ReLU: hidden (0, 1), down (2, 0) with a bias of (0, -2)
    stream (1, -1), normed (1/2, -1/2), times (4, -2): 3, and a bias of 7 makes the logit 10

    Ahead of the norm the token's direction is half of (4, -2): (2, -1). The embedding adds 1, the head 2 + 2, the
    neurons 0 and 4, the biases -8 + 2 + 7. The other token's logit is (1/2, -1/2) times (0, 2) and 1: nothing.
    """
    s = spec.DecoderSpec(
        vocab_size=2,
        d_model=2,
        n_layers=1,
        n_heads=1,
        d_ff=2,
        max_len=2,
        position=spec.NoPosition(),
        norm=spec.RMSNorm(eps=3.0),
        feedforward=spec.Relu(),
        head=spec.NextToken(tied=False, bias=True),
        out_bias=True,
        ffn_bias=True,
        qkv_bias=False,
    )
    model = gh.build(s, dtype=torch.float64)
    (block,) = model.stack.blocks
    attention, feedforward = block.attention.layer, block.feedforward.layer
    values = [
        (model.token_embedding.table.weight, [[0, 0], [1, 1]]),
        (attention.value.weight, [[2, 0], [0, 4]]),
        (attention.out.weight, [[1, 0], [0, -1]]),
        (attention.out.bias, [-3, 2]),
        (feedforward.up.weight, [[2, 0], [0, 2]]),
        (feedforward.up.bias, [0, 0]),
        (feedforward.down.weight, [[0, 2], [0, 0]]),
        (feedforward.down.bias, [0, -2]),
        (model.head.weight, [[4, -2], [0, 2]]),
        (model.head.bias, [7, 1]),
    ]
    with torch.no_grad():
        for weight, numbers in values:
            weight.copy_(torch.tensor(numbers))
    split = attribute(model, torch.tensor([[1]]), token=0, neurons=[0])
    parts = {name: part.item() for name, part in split.components().items()}
    assert parts == pytest.approx({"embed": 1, "head 0.0": 4, "ffn 0": 4, "bias": 1}, abs=1e-12)
    assert split.neurons[0][0].tolist() == pytest.approx([0, 4], abs=1e-12)
    assert split.logit.item() == pytest.approx(10, abs=1e-12)
    other = attribute(model, torch.tensor([[1]]), token=1)
    assert {name: part.item() for name, part in other.components().items()} == pytest.approx(
        {"embed": 1, "head 0.0": -2, "ffn 0": 0, "bias": 1}, abs=1e-12
    )


def test_logit_difference_by_hand() -> None:
    """Two tokens with the same vector: their logit difference is that of their biases."""
    model = tiny(head={"kind": "next_token", "tied": False, "bias": True})
    with torch.no_grad():
        model.head.weight[3] = model.head.weight[5]
        model.head.bias[3], model.head.bias[5] = 4.0, 1.5
    split = attribute(model, IDS, token=3, incorrect_token=5)
    assert split.logit.tolist() == pytest.approx([2.5, 2.5], abs=1e-12)
    assert split.bias.tolist() == pytest.approx([2.5, 2.5], abs=1e-12)
    assert all(part.abs().max() < 1e-12 for name, part in split.components().items() if name != "bias")


def frozen_norm(norm: nn.Module, x: Tensor) -> Tensor:
    """Apply a norm with its scale detached."""
    if isinstance(norm, nn.Identity):
        return x
    centred = x - x.mean() if isinstance(norm, nn.LayerNorm) else x
    made = centred / torch.sqrt((centred.detach() ** 2).mean() + norm.eps) * norm.weight
    return made + norm.bias if getattr(norm, "bias", None) is not None else made


def add_sublayer(residual: Any, x: Tensor, added: Tensor) -> Tensor:  # noqa: ANN401 - any order of norms
    """Add the output of a sublayer to the residual stream, by its norm placement."""
    match type(residual).__name__:
        case "PreNorm" | "NoNorm" | "ParallelNorm":
            return x + added
        case "PostNorm":
            return frozen_norm(residual.norm, x + added)
        case _:
            return x + frozen_norm(residual.norm_out, added)


def slowly(model: Any, call: tuple[Tensor, ...], b: int, i: int, token: int) -> tuple[Tensor, dict[str, Tensor]]:  # noqa: ANN401
    """Return one logit of one position, and its gradient by the factor of each component but the biases."""
    prefix, stack = ("decoder.", model.decoder) if isinstance(model, Seq2Seq) else ("", model.stack)
    with torch.no_grad(), gh.record(model, f"{prefix}*") as seen:
        model(*call)

    factors: dict[str, Tensor] = {}

    def factor(name: str) -> Tensor:
        factors[name] = torch.ones((), dtype=torch.float64, requires_grad=True)
        return factors[name]

    x = seen[f"{prefix}embed"][b, i] * factor("embed")
    for layer, block in enumerate(stack.blocks):
        for name, kind, site in (("attention", "head", "z"), ("cross", "cross head", "cross_z")):
            if hasattr(block, name):
                z = seen[f"{prefix}{site}.{layer}"][b, :, i]
                z = torch.cat([one * factor(f"{kind} {layer}.{head}") for head, one in enumerate(z)])
                residual = getattr(block, name)
                x = add_sublayer(residual, x, residual.layer.out(z))
        hidden = seen[f"{prefix}hidden.{layer}"][b, i] * factor(f"ffn {layer}")
        x = add_sublayer(block.feedforward, x, block.feedforward.layer.down(hidden))
        assert_close(x, seen[f"{prefix}resid_post.{layer}"][b, i])  # the same stream, so the same scales
    x = frozen_norm(stack.norm, x)
    if isinstance(model.head.transform, nn.Sequential):
        linear, activation, norm = model.head.transform
        x = linear(x)
        x = frozen_norm(norm, x * (activation(x) / x).nan_to_num().detach())
    logit = x @ model.head.unembedding(model.token_embedding.table.weight)[token] * model.head.scale
    if model.head.bias is not None:
        logit = logit + model.head.bias[token]
    return logit.detach(), dict(zip(factors, torch.autograd.grad(logit, list(factors.values())), strict=True))


def check_sum(split: Attribution, within: float) -> None:
    parts = torch.stack(list(split.components().values()))
    room = within * torch.maximum(split.logit.abs(), parts.abs().amax(0)).clamp(min=1)
    assert ((parts.sum(0) - split.logit).abs() <= room).all()


MODEL_KINDS, NORM_PLACEMENTS = ("decoder", "encoder", "seq2seq"), ("pre", "post", "sandwich", "output")


@pytest.mark.few(2)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "norm_placement"),
    first_of([*((kind, place) for place in NORM_PLACEMENTS for kind in MODEL_KINDS), ("decoder", "parallel")], 3),
)
def test_contributions_equal_a_reference_and_sum_to_the_logit(kind: str, norm_placement: str) -> None:
    norms = set()

    @settings(fast, max_examples=8)
    @given(specs())
    def holds(s: spec.Spec) -> None:
        assume(s.kind == kind)
        norms.add(s.norm.kind)
        other = spec.NextToken(tied=False, bias=True) if kind == "seq2seq" else spec.MaskedToken()
        head = s.head if isinstance(s.head, spec.NextToken | spec.MaskedToken) else other
        torch.manual_seed(0)
        model = build_random(dataclasses.replace(s, norm_placement=norm_placement, head=head))
        call = inputs(model)
        position, token, against = torch.tensor([1, -2]), torch.tensor([3, 7]), 10
        split = attribute(model, *call, position=position, token=token, incorrect_token=against)
        check_sum(split, 1e-9)
        model.head.softcap = None  # it is the logit before
        with torch.no_grad():
            logits = model(*call)
        for b in range(2):
            i = position[b] % call[-1].shape[1]
            assert split.logit[b] == pytest.approx((logits[b, i, token[b]] - logits[b, i, against]).item(), rel=1e-9)
            logit, correct = slowly(model, call, b, int(i), int(token[b]))
            assert logit == pytest.approx(logits[b, i, token[b]].item(), rel=1e-9, abs=1e-9)
            _, incorrect = slowly(model, call, b, int(i), against)
            parts = split.components()
            assert list(parts) == [*correct, "bias"]
            largest = max(1.0, *(float(part.abs().max()) for part in parts.values()))
            for name, part in parts.items():
                if name != "bias":
                    assert float(part[b]) == pytest.approx(
                        float(correct[name] - incorrect[name]), abs=1e-9 * largest
                    ), name

    holds()
    assert norms == {"layer", "rms"}


def test_contributions_sum_in_float32_and_with_padding() -> None:
    @fast
    @given(specs())
    def holds(s: spec.Spec) -> None:
        assume(isinstance(s.head, spec.NextToken | spec.MaskedToken))
        torch.manual_seed(0)
        model = build_random(s, torch.float32)
        lengths = torch.tensor([5, 3])
        kwargs = {"target_lengths" if isinstance(model, Seq2Seq) else "lengths": lengths}
        split = attribute(model, *inputs(model), position=lengths - 1, token=4, **kwargs)
        assert split.logit.dtype == torch.float32
        check_sum(split, 1e-4)
        model.head.softcap = None  # it is the logit before
        with torch.no_grad():
            own = model(*inputs(model), **kwargs)[torch.arange(2), lengths - 1, 4]
        assert_close(split.logit, own, 1e-5)

    holds()


def test_zero_preactivations_contribute_nothing() -> None:
    """The ratio of output to input of the activation is 0 / 0 where its input is 0."""
    model = tiny("tiny-encoder", head={"kind": "masked_token"})
    with torch.no_grad():
        model.head.transform[0].weight[:3], model.head.transform[0].bias[:3] = 0.0, 0.0
    check_sum(attribute(model, IDS, token=1), 1e-9)


@pytest.mark.parametrize("norm_placement", NORM_PLACEMENTS)
@pytest.mark.parametrize("kind", ["tiny-decoder", "tiny-encoder", "tiny-seq2seq"])
def test_neurons_sum_to_their_layer(kind: str, norm_placement: str) -> None:
    model = tiny(kind, n_layers=3, norm_placement=norm_placement)
    split = attribute(model, *inputs(model), token=2, neurons=[0, 2])
    assert list(split.neurons) == [0, 2]
    for layer, neurons in split.neurons.items():
        assert neurons.shape == (2, 24)
        assert_close(neurons.sum(-1), split.feedforward[:, layer])


def test_ablating_a_neuron_removes_its_contribution() -> None:
    """In the last layer without a final norm, the logit falls by the neuron's contribution."""
    model = tiny(norm_placement="pre", final_norm=False)
    split = attribute(model, IDS, token=2, neurons=[-1], position=3)
    (layer,) = split.neurons
    assert layer == 1
    for neuron in (0, 7, 23):
        with torch.no_grad(), gh.edit(model, {f"hidden.1[neuron={neuron}]": 0.0}):
            assert_close(split.logit - model(IDS)[:, 3, 2], split.neurons[1][:, neuron])
    for head in (0, 1):
        with torch.no_grad(), gh.edit(model, {"z.1": gh.ablate_head(head), "ffn_out.1": last_ffn_out(model)}):
            assert_close(split.logit - model(IDS)[:, 3, 2], split.heads[:, 1, head])


def last_ffn_out(model: Model) -> Tensor:
    """Return the output of the last feed-forward layer without edits."""
    with torch.no_grad(), gh.record(model, "ffn_out.1") as seen:
        model(IDS)
    return seen["ffn_out.1"]


def test_a_batch_equals_its_sequences() -> None:
    model = tiny("tiny-seq2seq")
    call = inputs(model)
    position, token = torch.tensor([4, 0]), torch.tensor([1, 9])
    both = attribute(model, *call, position=position, token=token, incorrect_token=token.flip(0))
    assert both.position.tolist() == [4, 0]
    for b in range(2):
        one = attribute(
            model,
            *(side[b : b + 1] for side in call),
            position=int(position[b]) - call[-1].shape[1],
            token=int(token[b]),
            incorrect_token=int(token[1 - b]),
        )
        assert_close(one.logit, both.logit[b : b + 1])
        for name, part in one.components().items():
            assert_close(part, both.components()[name][b : b + 1])


def test_only_the_requested_positions_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = set()
    put = Recording.put

    def measured(self: Recording, asked: Selection, value: Tensor) -> None:
        lengths.add(value.shape[asked.axes.index("position")])
        put(self, asked, value)

    monkeypatch.setattr(Recording, "put", measured)
    model, whole = tiny(), []
    model.head.register_forward_hook(lambda *_: whole.append(1))
    attribute(model, IDS, token=1, position=2)
    assert lengths == {1}
    assert not whole  # the logits of all positions are not computed
    lengths.clear()
    attribute(tiny(), IDS, token=1, position=torch.tensor([2, 4]))
    assert lengths == {3}


@pytest.mark.parametrize("norm_placement", ["pre", "post", "sandwich", "output", "parallel"])
def test_lora_is_attributed_with_its_linear_layer(norm_placement: str) -> None:
    model = tiny(norm_placement=norm_placement)
    lora.attach(model, lora.LoRA(rank=2, targets=("*",)))
    with torch.no_grad():
        for tensor in lora.adapter_state_dict(model).values():
            tensor.normal_()
    attached = attribute(model, IDS, token=1, incorrect_token=2)
    check_sum(attached, 1e-9)
    lora.merge(model)
    merged = attribute(model, IDS, token=1, incorrect_token=2)
    for name, part in attached.components().items():
        assert_close(part, merged.components()[name])


def test_train_mode_is_restored_and_dropout_off() -> None:
    model = tiny(dropout=0.5, embed_dropout=0.5, attention_dropout=0.5)
    in_eval_mode = attribute(model, IDS, token=1)
    split = attribute(model.train(), IDS, token=1)
    assert all(module.training for module in model.modules())
    assert not any(part.requires_grad for part in split.components().values())
    for name, part in split.components().items():
        assert torch.equal(part, in_eval_mode.components()[name])


def test_half_precision_is_attributed_in_float32() -> None:
    """The contributions sum to the logit within a few bfloat16 roundings, each 2**-8 of the largest."""
    split = attribute(tiny().to(torch.bfloat16), IDS, token=1)
    assert split.heads.dtype == split.bias.dtype == split.logit.dtype == torch.float32
    check_sum(split, 8 * 2**-8)


def test_edits_of_heads_apply() -> None:
    model = tiny()
    with gh.edit(model, {"z.0": gh.ablate_head(1)}):
        split = attribute(model, IDS, token=1)
    assert (split.heads[:, 0, 1] == 0).all()
    assert (split.heads[:, 1, 1] != 0).all()
    check_sum(split, 1e-9)


def test_html_shows_the_largest_and_sums_the_rest() -> None:
    model = tiny(n_layers=12)
    split = attribute(model, IDS.repeat(3, 1), token=1, incorrect_token=2)
    drawn = split._repr_html_()
    values = {name: float(part[0]) for name, part in split.components().items()}
    largest = sorted(values, key=lambda name: -abs(values[name]))
    first = drawn.split("</table>")[0]
    assert first.count("<tr>") == 31
    for name in largest[:30]:
        assert f"<th>{name}</th>" in first
    assert "<th>other</th>" in first
    rest = sum(values[name] for name in largest[30:])
    assert f"<td>{rest:.2f}</td>" in first.split("<th>other</th>")[1]
    assert drawn.count("<table>") == 4
    assert "2 more texts not drawn" in drawn
    assert "the logit of token 1 minus that of token 2" in first
    small = attribute(tiny(n_layers=1), IDS, token=1)._repr_html_()
    assert "other" not in small
    assert small.count("<tr>") == 2 * (1 + 2 + 1 + 1)


def test_tokens_may_be_given_as_text_with_a_tokenizer() -> None:
    tok = gh.Tokenizer.train(texts=["the the the the"], vocab_size=266)
    model = build_random(gh.preset("tiny-decoder", vocab_size=266))
    (the,) = tok.encode(" the")
    by_id = attribute(model, IDS, token=the, incorrect_token=5)
    by_text = attribute(model, IDS, token=" the", incorrect_token=tok.id_to_token(5), tok=tok)
    assert (by_text.token == the).all()
    assert (by_text.incorrect_token == 5).all()
    assert by_text.logit.equal(by_id.logit)
    with pytest.raises(gh.InputError, match=r"token is the text ' the'; give its id, tok.encode\(' the'\)\[0\], or"):
        attribute(model, IDS, token=" the")
    with pytest.raises(gh.InputError, match="incorrect_token is the text ' the'"):
        attribute(model, IDS, token=the, incorrect_token=" the")
    with pytest.raises(gh.InputError, match=r"token is 'q the', but that is 2 tokens \('q', .*the'\); give one"):
        attribute(model, IDS, token="q the", tok=tok)
    with pytest.raises(gh.InputError, match="but vocab_size is 11, so it is another model's"):
        attribute(tiny(), IDS, token=1, tok=tok)


def test_invalid_attributions_are_refused() -> None:
    model = tiny()
    with pytest.raises(
        gh.InputError, match="the head is 'token_classification', which has no logits over the vocabulary"
    ):
        attribute(tiny("tiny-encoder", head={"kind": "token_classification", "n_labels": 3}), IDS, token=0)
    with pytest.raises(gh.InputError, match="token contains 11, but it must be from 0 to 10"):
        attribute(model, IDS, token=11)
    with pytest.raises(gh.InputError, match="incorrect_token contains -1, but it must be from 0 to 10"):
        attribute(model, IDS, token=1, incorrect_token=torch.tensor([3, -1]))
    with pytest.raises(gh.InputError, match="position contains 6, but it must be from -6 to 5"):
        attribute(model, IDS, token=1, position=6)
    with pytest.raises(gh.InputError, match=r"position has shape \[3\] .* one for each of 2 sequences"):
        attribute(model, IDS, token=1, position=torch.tensor([1, 2, 3]))
    with pytest.raises(gh.InputError, match=r"token has shape \[\] and type torch.float32"):
        attribute(model, IDS, token=1.5)
    with pytest.raises(gh.InputError, match="token is None, but it must be one integer, or one for each"):
        attribute(tiny(), IDS, token=None)
    with pytest.raises(gh.InputError, match="position is 'last', but it must be one integer"):
        attribute(tiny(), IDS, token=1, position="last")
    with pytest.raises(gh.InputError, match=r"neurons is \('a',\), but it must be a list of integers"):
        attribute(tiny(), IDS, token=1, neurons=("a",))
    with pytest.raises(gh.InputError, match="neurons contains 2, but there are 2"):
        attribute(model, IDS, token=1, neurons=[2])


@pytest.mark.parametrize("order", ["pre", "post"])
def test_contributions_sum_with_compiled_modules(order: str) -> None:
    torch.compiler.reset()
    model = tiny(norm_placement=order, final_norm=True)
    block = model.stack.blocks[0]
    model.stack.norm = torch.compile(model.stack.norm, backend="eager")
    block.attention = torch.compile(block.attention, backend="eager")
    block.feedforward.layer.down = torch.compile(block.feedforward.layer.down, backend="eager")
    model.head = torch.compile(model.head, backend="eager")
    split = attribute(model, IDS, token=3)
    assert_close(sum(split.components().values()), split.logit, 1e-9)
