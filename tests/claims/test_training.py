"""Training: statement L2."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from glasshouse import spec
from glasshouse.layers.attend.backends import Explicit, Sdpa
from glasshouse.layers.attend.kernel import Attend, Situation
from glasshouse.layers.attend.mask import Mask

BuildModel = Callable[..., Any]

LLAMA3 = {"kind": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_len": 16}
YARN = {"kind": "yarn", "factor": 4.0, "original_max_len": 16}

# Each model is the default of its kind except for what its name says; together they cover every component.
MODELS: dict[str, dict[str, Any]] = {
    # positions, in each kind of model
    **{
        f"{kind}, {position} positions": {"kind": kind, "position": position}
        for kind in ("decoder", "encoder", "seq2seq")
        for position in ("none", "sinusoidal", "learned", "rotary", "relative", "alibi")
    },
    "sinusoidal in halves": {"position": {"kind": "sinusoidal", "layout": "halves"}},
    "learned with an offset": {"position": {"kind": "learned", "offset": 2}},
    "rotary in pairs": {"position": {"kind": "rotary", "layout": "pairs"}},
    "rotary, half of each head": {"position": {"kind": "rotary", "fraction": 0.5}},
    "rotary, linear": {"position": {"kind": "rotary", "scaling": {"kind": "linear", "factor": 2.0}}},
    "rotary, llama3": {"position": {"kind": "rotary", "scaling": LLAMA3}},
    "rotary, yarn": {"position": {"kind": "rotary", "scaling": YARN}},
    # norms and norm placement
    **{
        f"{norm['kind']} norm {norm.get('bias', '')} {placement}": {
            "kind": "seq2seq",
            "norm": norm,
            "norm_placement": placement,
        }
        for norm in ({"kind": "layer"}, {"kind": "layer", "bias": False}, {"kind": "rms"})
        for placement in ("pre", "post", "sandwich", "output")
    },
    "attention and feed-forward in parallel": {"norm_placement": "parallel"},
    "no final norm": {"final_norm": False},
    "embedding norm": {"embed_norm": True},
    "QK norm": {"qk_norm": True, "position": "rotary"},
    "QK norm over the projection": {"qk_norm": True, "qk_norm_over": "projection", "position": "rotary"},
    "QK norm, seq2seq": {"kind": "seq2seq", "qk_norm": True, "norm": "rms"},
    "value embeddings": {"value_embeddings": True, "n_layers": 2, "n_kv_heads": 2},
    "value embeddings, seq2seq": {"kind": "seq2seq", "value_embeddings": True, "n_layers": 2},
    # feed-forward
    **{name: {"feedforward": name} for name in ("relu", "relu2", "gelu", "silu", "swiglu", "geglu")},
    "gelu, tanh": {"feedforward": {"kind": "gelu", "tanh": True}},
    "geglu, tanh": {"feedforward": {"kind": "geglu", "tanh": True}},
    # heads
    "no head": {"head": "none"},
    "next token, tied": {"head": {"kind": "next_token", "bias": True}},
    "next token, untied": {"head": {"kind": "next_token", "tied": False}},
    "next token, seq2seq": {"kind": "seq2seq", "head": {"kind": "next_token", "tied": False, "bias": True}},
    "no head, seq2seq": {"kind": "seq2seq", "head": "none"},
    "masked token, tied": {"kind": "encoder", "head": "masked_token"},
    "masked token, plain": {"kind": "encoder", "head": {"kind": "masked_token", "tied": False, "transform": False}},
    "token classification": {"kind": "encoder", "head": {"kind": "token_classification", "n_labels": 3}},
    **{
        f"{head}, {pooling} pooling": {
            "kind": "encoder",
            "head": {"kind": head, "pooling": pooling, "dense": dense, **labels},
        }
        for head, labels in (("pooled", {}), ("sequence_classification", {"n_labels": 3}))
        for pooling, dense in (("first", True), ("mean", False), ("last", True))
    },
    # others
    "two layers": {"kind": "seq2seq", "n_layers": 2},
    "multi-query": {"n_kv_heads": 1},
    "grouped-query": {"n_kv_heads": 2, "kind": "seq2seq"},
    "d_head given": {"d_head": 6},
    "sliding windows": {"windows": [0, 2], "n_layers": 2},
    "soft-cap": {"attention_softcap": 3.0, "position": "relative"},
    "attention scale given": {"attention_scale": 1.0},
    "no biases": {"qkv_bias": False, "out_bias": False, "ffn_bias": False},
    "scaled embeddings and logits": {"embed_scale": True, "logit_scale": True},
    "soft-cap of logits": {"logit_softcap": 2.0},
    "segments": {"kind": "encoder", "n_segments": 2},
    "dropout": {"kind": "seq2seq", "dropout": 0.2, "attention_dropout": 0.2, "embed_dropout": 0.2},
}


def make_call(model: nn.Module, choices: dict[str, Any]) -> Callable[[], Tensor]:
    """Return a forward pass on fixed ids with padding, and with segments if the model has them."""
    ids, mask = torch.randint(23, (2, 6)), torch.tensor([[True] * 6, [False] * 2 + [True] * 4])
    extra: dict[str, Tensor] = {}
    if "n_segments" in choices:
        extra["segments"] = torch.tensor([[0, 0, 1, 1, 1, 1], [0, 0, 0, 0, 0, 1]])
    if choices.get("kind") == "seq2seq":
        source, lengths = torch.randint(23, (2, 5)), torch.tensor([3, 5])
        return lambda: model(source, ids, lengths=lengths, target_mask=mask)
    return lambda: model(ids, mask=mask, **extra)


def check_gradients(model: nn.Module, call: Callable[[], Tensor]) -> None:
    """Compare, for every parameter, the gradient along a random direction that is 1 longer at its largest entry."""

    def loss() -> Tensor:
        torch.manual_seed(3)  # the same dropout every time
        return (F.log_softmax(call(), -1) * pull).sum()

    pull = torch.randn(call().shape, dtype=torch.float64)
    names, parameters = zip(*model.named_parameters(), strict=True)
    gradients = torch.autograd.grad(loss(), parameters)
    # The error of central differences is a third derivative times step^2 / 6, plus the rounding of the loss, about
    # 1e-14, over the step: 1e-9 or so, compared with gradients of order 1.
    step = 1e-5
    with torch.no_grad():
        for name, parameter, gradient in zip(names, parameters, gradients, strict=True):
            assert gradient.abs().max() > 0, name
            direction = F.normalize(torch.randn_like(parameter).view(-1), dim=0)
            direction[gradient.abs().argmax()] += 1
            direction = direction.view_as(parameter)
            ends = []
            for sign in (1, -1):
                parameter.add_(direction, alpha=sign * step)
                ends.append(loss().item())
                parameter.sub_(direction, alpha=sign * step)
            measured, expected = (ends[0] - ends[1]) / (2 * step), (gradient * direction).sum().item()
            # The second term is for gradients that are 0: a bias shared by all keys shifts all scores of a row.
            assert abs(measured - expected) < 1e-7 * gradient.norm() + 1e-8, name


@pytest.mark.few(8)
@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_l2_gradients_agree_with_finite_differences(build_model: BuildModel, name: str) -> None:
    """In each of these models, every parameter's gradient agrees with finite differences of the loss."""
    choices = {"kind": "decoder", "n_layers": 1, **MODELS[name]}
    model = build_model(**choices)
    model.train(name == "dropout")
    check_gradients(model, make_call(model, choices))


@pytest.mark.few(1)
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["decoder", "encoder", "seq2seq"])
def test_l2_gradients_with_sequence_packing(build_model: BuildModel, kind: str) -> None:
    """The same with two packed documents per sequence, and in a decoder with a bidirectional prefix."""
    model = build_model(kind, position="rotary", n_layers=1)
    ids, documents = torch.randint(23, (2, 6)), torch.tensor([[0, 0, 0, 1, 1, 1], [0, 1, 1, 1, 1, 1]])
    if kind == "seq2seq":
        check_gradients(model, lambda: model(ids, ids, documents=documents, target_documents=documents))
    elif kind == "encoder":
        check_gradients(model, lambda: model(ids, documents=documents))
    else:
        check_gradients(model, lambda: model(ids, documents=documents, prefix_lengths=torch.tensor([2, 1])))


def test_l2_models_cover_every_component() -> None:
    """Each kind of position, scaling, norm, feed-forward, head and norm placement is in a model checked above."""
    made = [
        spec.parse({"kind": "decoder", "vocab_size": 9, "d_model": 16, "n_layers": 1, "n_heads": 4, **choices})
        for choices in MODELS.values()
    ]
    scalings = (spec.NoScaling, spec.LinearScaling, spec.Llama3Scaling, spec.YarnScaling)
    for field, kinds in (
        ("position", spec.Position.kinds.values()),
        ("norm", spec.Norm.kinds.values()),
        ("feedforward", spec.FeedForward.kinds.values()),
        ("head", get_args(spec.Head)),
    ):
        assert {type(getattr(model, field)) for model in made} == set(kinds)
    assert {type(model.position.scaling) for model in made if isinstance(model.position, spec.Rotary)} == set(
        scalings
    )
    assert {model.norm_placement for model in made} == set(get_args(spec.NormPlacement))
    assert {type(model) for model in made} == set(get_args(spec.Spec))


@pytest.mark.few(6)
@pytest.mark.parametrize("kv_heads", [2, 1])
@pytest.mark.parametrize("form", ["none", "causal", "bool", "float"])
@pytest.mark.parametrize("backend", [Sdpa, Explicit])
def test_l2_gradients_of_attention_kernels(backend: type[Sdpa | Explicit], form: str, kv_heads: int) -> None:
    """Every entry of the Jacobian of both kernels, with each form of mask, agrees with finite differences."""
    q, k, v = (torch.randn(1, heads, 4, 3, dtype=torch.float64).requires_grad_() for heads in (2, kv_heads, kv_heads))
    visible = torch.ones(4, 4, dtype=torch.bool).tril()
    attend = Attend(3**-0.5, 0.0)
    if form == "float":
        # Finite differences of -infinity are NaN: masked entries are excluded, the others are differentiated.
        free = torch.randn(1, 2, 4, 4, dtype=torch.float64).requires_grad_()
        assert torch.autograd.gradcheck(
            lambda q, k, v, free: attend(q, k, v, backend(Mask(), dense=free.masked_fill(~visible, -torch.inf))),
            (q, k, v, free),
        )
        return
    if form == "bool":
        prepared = backend(Mask(), dense=visible)
    else:
        mask = Mask(causal=form == "causal")
        prepared = backend.prepare(Situation(mask, 4, 4, q.device, q.dtype, d_head=3))
    assert torch.autograd.gradcheck(lambda q, k, v: attend(q, k, v, prepared), (q, k, v))
