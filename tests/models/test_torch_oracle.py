"""Equality with torch.nn.Transformer: copied weights, layers and whole stacks, forward and gradients."""

from __future__ import annotations

import copy
import re

import pytest
import torch
from torch import Tensor, nn

from glasshouse import spec
from glasshouse.layers.attend.layout import make_layout
from glasshouse.models.stack import Stack

D_MODEL, N_HEADS, D_FF = 32, 4, 48

# Ours on the left. Torch numbers its norms by sublayer, and has query, key and value projections in one matrix.
NAMES = {
    "blocks.": "layers.",
    "attention.layer.query.": "self_attn.in_proj_",
    "attention.layer.key.": "self_attn.in_proj_",
    "attention.layer.value.": "self_attn.in_proj_",
    "attention.layer.out.": "self_attn.out_proj.",
    "attention.norm.": "norm1.",
    "cross.layer.query.": "multihead_attn.in_proj_",
    "cross.layer.key.": "multihead_attn.in_proj_",
    "cross.layer.value.": "multihead_attn.in_proj_",
    "cross.layer.out.": "multihead_attn.out_proj.",
    "cross.norm.": "norm2.",
    "feedforward.layer.up.": "linear1.",
    "feedforward.layer.down.": "linear2.",
}


def in_our_names(ours: nn.Module, theirs: dict[str, Tensor], cross: bool) -> dict[str, Tensor]:
    """Return torch's parameters, or their gradients, under our names."""
    result = {}
    for name, _ in ours.named_parameters():
        place = name.replace("feedforward.norm.", "norm3." if cross else "norm2.")
        for mine, other in NAMES.items():
            place = place.replace(mine, other)
        parts = [n for n, part in enumerate((".query.", ".key.", ".value.")) if part in name]
        result[name] = theirs[place].chunk(3)[parts[0]] if parts else theirs[place]
    return result


def torch_stack(order: str, bias: bool, n_layers: int, final_norm: bool, cross: bool) -> nn.Module:
    kind = nn.TransformerDecoderLayer if cross else nn.TransformerEncoderLayer
    layer = kind(D_MODEL, N_HEADS, D_FF, 0.0, batch_first=True, norm_first=order == "pre", bias=bias)
    norm = nn.LayerNorm(D_MODEL, bias=bias) if final_norm else None
    if cross:
        return nn.TransformerDecoder(layer, n_layers, norm)
    return nn.TransformerEncoder(layer, n_layers, norm, enable_nested_tensor=False)


def our_stack(order: str, bias: bool, n_layers: int, final_norm: bool, causal: bool, cross: bool) -> Stack:
    s = spec.DecoderSpec(
        vocab_size=1,
        d_model=D_MODEL,
        n_layers=n_layers,
        n_heads=N_HEADS,
        d_ff=D_FF,
        position=spec.NoPosition(),
        norm=spec.LayerNorm(bias=bias),
        norm_placement=order,
        final_norm=final_norm,
        feedforward=spec.Relu(),
        qkv_bias=bias,
        out_bias=bias,
        ffn_bias=bias,
    )
    return Stack(s, n_layers, causal=causal, cross=cross)


class Case:
    """Both stacks with the same weights, and one input: causal, padded, or with a padded source."""

    def __init__(self, order: str, bias: bool, n_layers: int, final_norm: bool, causal: bool, cross: bool) -> None:
        torch.manual_seed(0)
        self.causal, self.cross = causal, cross
        self.theirs = torch_stack(order, bias, n_layers, final_norm, cross)
        self.ours = our_stack(order, bias, n_layers, final_norm, causal, cross)
        for weight in self.theirs.parameters():
            nn.init.normal_(weight, mean=float(weight.dim() == 1), std=0.3)
        self.ours.load_state_dict(in_our_names(self.ours, dict(self.theirs.named_parameters()), cross))
        self.x, self.memory = torch.randn(3, 9, D_MODEL), torch.randn(3, 7, D_MODEL)
        self.lengths = torch.tensor([7, 2, 5])
        self.pull = torch.randn(3, 9, D_MODEL)  # the gradient that arrives at the output

    def run_theirs(self, dtype: torch.dtype) -> dict[str, Tensor]:
        model, x, memory = self.prepared(self.theirs, dtype)
        mask = nn.Transformer.generate_square_subsequent_mask(9, dtype=dtype) if self.causal else None
        if self.cross:
            padding = torch.arange(7) >= self.lengths[:, None]
            out = model(x, memory, tgt_mask=mask, memory_key_padding_mask=padding)
        else:
            padding = None if self.causal else torch.arange(9) >= self.lengths[:, None]
            out = model(x, mask=mask, src_key_padding_mask=padding)
        gradients = self.gradients(model, out, x, memory)
        named = in_our_names(self.ours, {n: p.grad for n, p in model.named_parameters()}, self.cross)
        return gradients | named

    def run_ours(self, dtype: torch.dtype) -> dict[str, Tensor]:
        model, x, memory = self.prepared(self.ours, dtype)
        lengths = None if self.cross or self.causal else self.lengths
        layout = make_layout(x[..., 0], lengths=lengths)
        if self.cross:
            out = model(x, layout, None, memory, make_layout(memory[..., 0], lengths=self.lengths))
        else:
            out = model(x, layout)
        gradients = self.gradients(model, out, x, memory)
        return gradients | {n: p.grad for n, p in model.named_parameters()}

    def prepared(self, model: nn.Module, dtype: torch.dtype) -> tuple[nn.Module, Tensor, Tensor]:
        x, memory = (t.to(dtype, copy=True).requires_grad_() for t in (self.x, self.memory))
        return copy.deepcopy(model).to(dtype), x, memory

    def gradients(self, model: nn.Module, out: Tensor, x: Tensor, memory: Tensor) -> dict[str, Tensor]:
        (out * self.pull.to(out.dtype)).sum().backward()
        result = {"out": out.detach(), "x": x.grad}
        return result | {"memory": memory.grad} if self.cross else result


@pytest.mark.few(8)
@pytest.mark.parametrize("order", ["pre", "post"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("n_layers", "final_norm"), [(1, False), (4, True)], ids=["layer", "stack"])
@pytest.mark.parametrize(
    ("causal", "cross"),
    [(False, False), (True, False), (True, True)],
    ids=["encoder padded", "decoder", "decoder with source"],
)
def test_equals_torch(order: str, bias: bool, n_layers: int, final_norm: bool, causal: bool, cross: bool) -> None:
    case = Case(order, bias, n_layers, final_norm, causal, cross)
    ours, theirs = case.run_ours(torch.float64), case.run_theirs(torch.float64)
    ours_32, theirs_32 = case.run_ours(torch.float32), case.run_theirs(torch.float32)
    assert ours.keys() == theirs.keys()
    error = their_error = 0.0
    for name, exact in theirs.items():
        # Torch has the three projections in one matrix, whose largest entry is the scale: the gradient of a bias
        # of all keys, which shifts all scores of a query, is 0 but for rounding and has no scale of its own.
        sisters = {re.sub(r"\.(query|key|value)\.", f".{part}.", name) for part in ("query", "key", "value")}
        size = max(float(theirs[sister].abs().max()) for sister in sisters)
        assert (ours[name] - exact).abs().max() <= 1e-12 * size, name
        error = max(error, float((ours_32[name] - exact).abs().max()) / size)
        their_error = max(their_error, float((theirs_32[name] - exact).abs().max()) / size)
    # The worst of all tensors on either side: a single tensor's rounding is luck.
    assert error <= 2 * their_error


@pytest.mark.parametrize("order", ["pre", "post"])
def test_a_whole_encoder_decoder_equals_nn_transformer(order: str) -> None:
    """nn.Transformer puts a final norm on both stacks in either order."""
    torch.manual_seed(0)
    theirs = nn.Transformer(D_MODEL, N_HEADS, 3, 2, D_FF, 0.0, batch_first=True, norm_first=order == "pre").double()
    encoder = our_stack(order, True, 3, True, causal=False, cross=False).double()
    decoder = our_stack(order, True, 2, True, causal=True, cross=True).double()
    encoder.load_state_dict(in_our_names(encoder, dict(theirs.encoder.named_parameters()), cross=False))
    decoder.load_state_dict(in_our_names(decoder, dict(theirs.decoder.named_parameters()), cross=True))
    source, target = (torch.randn(2, n, D_MODEL).double().requires_grad_() for n in (6, 5))

    mask = nn.Transformer.generate_square_subsequent_mask(5, dtype=torch.float64)
    expected = theirs(source, target, tgt_mask=mask)

    read, written = make_layout(source[..., 0]), make_layout(target[..., 0])
    out = decoder(target, written, None, encoder(source, read), read)
    pull = torch.randn_like(out)
    first, second = ([y, *torch.autograd.grad((y * pull).sum(), (source, target))] for y in (out, expected))
    for ours, reference in zip(first, second, strict=True):
        assert (ours - reference).abs().max() <= 1e-12 * reference.abs().max()
