"""Small models of every kind to inspect, and one way to call them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import glasshouse as gh
from glasshouse import spec
from glasshouse.models import Decoder, Encoder, Seq2Seq

Model = Decoder | Encoder | Seq2Seq
IDS = torch.tensor([[3, 1, 4, 0, 5, 9], [2, 6, 10, 7, 8, 1]])  # below spec_strategy.VOCABULARY, no row all alike


def build_random(s: spec.Spec, dtype: torch.dtype = torch.float64) -> Model:
    """Build a model with noise added to every weight, so that every component has an effect."""
    model = gh.build(s, dtype=dtype).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight), alpha=0.3)
    return model


def small(kind: str = "tiny-decoder", **settings: object) -> Model:
    """Build the same small model each time."""
    torch.manual_seed(0)
    return build_random(gh.preset(kind, vocab_size=11, **settings))


def linear() -> Model:
    """Make a linear model: no norms, no feed-forward, and uniform attention."""
    model = small(
        n_layers=3, d_model=12, n_heads=2, n_kv_heads=2, d_head=4, d_ff=5, position="none", final_norm=False,
        head={"kind": "next_token", "tied": False},
    )  # fmt: skip
    for name in [name for name, _ in model.named_modules()]:
        if name.endswith("norm"):
            parent, _, last = name.rpartition(".")
            setattr(model.get_submodule(parent), last, nn.Identity())
    with torch.no_grad():
        for block in model.stack.blocks:
            for weight in (*block.attention.layer.query.parameters(), *block.feedforward.layer.down.parameters()):
                weight.zero_()
    return model


def inputs(model: Model, ids: Tensor = IDS) -> tuple[Tensor, ...]:
    """Return the inputs of a model; the target of an encoder-decoder differs from its source and is shorter."""
    return (ids, ids.flip(1)[:, :-1]) if isinstance(model, Seq2Seq) else (ids,)


def assert_close(a: Tensor, b: Tensor, tolerance: float = 1e-10) -> None:
    """Assert that two tensors are equal up to rounding, relative to the largest entry."""
    assert a.shape == b.shape
    finite = b.isfinite()
    assert torch.equal(finite, a.isfinite())
    if finite.any():
        a, b = a[finite].detach(), b[finite].detach()
        assert (a - b).abs().max() <= tolerance * max(1.0, float(b.abs().max()))
