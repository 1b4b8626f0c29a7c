"""Models of every kind to look into, and one way to call them all."""

from __future__ import annotations

import torch
from torch import Tensor

import glasshouse as gh
from glasshouse import spec
from glasshouse.models import Decoder, Encoder, Seq2Seq

Model = Decoder | Encoder | Seq2Seq
IDS = torch.tensor([[3, 1, 4, 0, 5, 9], [2, 6, 10, 7, 8, 1]])  # below spec_strategy.VOCABULARY, no row all alike


def build_random(s: spec.Spec, dtype: torch.dtype = torch.float64) -> Model:
    """Build a model whose every weight was shaken, so that no part of it does nothing."""
    model = gh.build(s, dtype=dtype).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight), alpha=0.3)
    return model


def small(kind: str = "tiny-decoder", **settings: object) -> Model:
    """Build the same small model each time."""
    torch.manual_seed(0)
    return build_random(gh.preset(kind, vocab_size=11, **settings))


def inputs(model: Model, ids: Tensor = IDS) -> tuple[Tensor, ...]:
    """Return what a model takes; an encoder-decoder writes other ids than it reads, and fewer."""
    return (ids, ids.flip(1)[:, :-1]) if isinstance(model, Seq2Seq) else (ids,)


def assert_close(a: Tensor, b: Tensor, tolerance: float = 1e-10) -> None:
    """Hold two tensors equal but for rounding, relative to the largest entry."""
    assert a.shape == b.shape
    finite = b.isfinite()
    assert torch.equal(finite, a.isfinite())
    if finite.any():
        a, b = a[finite].detach(), b[finite].detach()
        assert (a - b).abs().max() <= tolerance * max(1.0, float(b.abs().max()))
