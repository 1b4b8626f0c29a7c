"""Frozen linear layers with int8 or int4 weights, for fine-tuning adapters beside them (QLoRA).

They hold what the inference layers are packed from, and dequantize it at each use: forward, and again for the
gradient of the input. Both products are operators of their own, since torch.compile would otherwise keep the
dequantized matrix from one to the other. They run on every device, in the dtype of the input.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, Self, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from glasshouse.layers.flops import FlopCount
from glasshouse.layers.linear.int4 import dequantize_pairs, pack_pairs, quantize_groups
from glasshouse.layers.linear.int8 import dequantize_rows, quantize_rows
from glasshouse.layers.linear.linear import Linear

Tree = TypeVar("Tree", bound=nn.Module)
Dequantize = Callable[[Tensor, Tensor, torch.dtype], Tensor]  # values, scale, dtype -> weight [N, K]
Matmul = Callable[[Tensor, Tensor, Tensor], Tensor]  # x [..., K], values, scale -> [..., N]


def define_matmul(name: str, dequantize: Dequantize) -> Matmul:
    """Define the operator that maps x [..., K] by a dequantized weight, and the one of its gradient."""

    def multiply(x: Tensor, values: Tensor, scale: Tensor) -> Tensor:
        return F.linear(x, dequantize(values, scale, x.dtype))

    def multiply_transposed(grad: Tensor, values: Tensor, scale: Tensor) -> Tensor:
        return grad @ dequantize(values, scale, grad.dtype)

    forward = torch.library.custom_op(f"glasshouse::{name}", multiply, mutates_args=())
    backward = torch.library.custom_op(f"glasshouse::{name}_backward", multiply_transposed, mutates_args=())
    forward.register_fake(multiply)
    backward.register_fake(multiply_transposed)

    def keep(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:  # noqa: ANN401
        ctx.save_for_backward(*inputs[1:])

    def differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # noqa: ANN401
        return backward(grad, *ctx.saved_tensors), None, None

    forward.register_autograd(differentiate, setup_context=keep)
    return forward


class FrozenQuantizedLinear(nn.Linear):
    """A linear layer with quantized weights that are not trained, and through which gradients flow."""

    dequantize: Dequantize
    matmul: Matmul
    values: Tensor
    scale: Tensor
    like: Tensor

    def __init__(self, values: Tensor, scale: Tensor, linear: nn.Linear) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.register_buffer("values", values)
        self.register_buffer("scale", scale)
        self.register_buffer("like", linear.weight.new_empty(0), persistent=False)  # has the dtype of the model
        self.bias = linear.bias
        self.requires_grad_(False)
        self.train(linear.training)

    @classmethod
    def quantize(cls, linear: nn.Linear) -> Self:
        """Return the layer with the quantized weight of a linear layer, and its bias."""
        raise NotImplementedError

    @property
    def n_weights(self) -> int:
        """The number of weights, whatever they are packed in."""
        return self.in_features * self.out_features

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """The dequantized weight [N, K], new at each use."""
        return self.dequantize(self.values, self.scale, self.like.dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Map x [..., K] to [..., N]."""
        if torch.is_autocast_enabled(x.device.type):  # which does not reach into our operators
            x = x.to(torch.get_autocast_dtype(x.device.type))
        y = self.matmul(x, self.values, self.scale)
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def add_flops(self, count: FlopCount, trained: bool) -> bool:
        """Add the FLOPs of the product, and of the gradient of its input if that is `trained`."""
        count.maps += self.n_weights * (2 + 2 * trained)
        return trained

    def to_linear(self) -> nn.Linear:
        """Return the plain layer with the dequantized weight."""
        made = Linear(self.in_features, self.out_features, bias=self.bias is not None, device="meta")
        made.weight, made.bias = nn.Parameter(self.weight), self.bias
        return made


class FrozenInt8Linear(FrozenQuantizedLinear):
    """A frozen linear layer with int8 weights and a float32 scale per row.

    >>> layer = FrozenInt8Linear.quantize(nn.Linear(2, 3))
    >>> x = torch.ones(1, 2, requires_grad=True)
    >>> layer(x).sum().backward()
    >>> x.grad.equal(layer.weight.sum(0, keepdim=True))
    True
    """

    dequantize = staticmethod(dequantize_rows)
    matmul = staticmethod(define_matmul("frozen_int8_linear", dequantize_rows))

    @classmethod
    def quantize(cls, linear: nn.Linear) -> Self:
        """Return the layer with a weight that is quantized by rows."""
        return cls(*quantize_rows(linear.weight), linear)


class FrozenInt4Linear(FrozenQuantizedLinear):
    """A frozen linear layer with int4 weights, two in a byte, and a bfloat16 scale per group of 32.

    >>> FrozenInt4Linear.quantize(nn.Linear(64, 3)).values.shape
    torch.Size([3, 32])
    """

    dequantize = staticmethod(dequantize_pairs)
    matmul = staticmethod(define_matmul("frozen_int4_linear", dequantize_pairs))

    @classmethod
    def quantize(cls, linear: nn.Linear) -> Self:
        """Return the layer with a weight that is quantized by groups."""
        values, scale = quantize_groups(linear.weight)
        return cls(pack_pairs(values), scale.bfloat16(), linear)


def copy_sharing_quantized(model: Tree) -> Tree:
    """Return a deep copy of a model that shares its quantized weights, which nothing changes.

    >>> layer = FrozenInt8Linear.quantize(nn.Linear(2, 3))
    >>> copied = copy_sharing_quantized(layer)
    >>> copied.values is layer.values, copied.bias is layer.bias
    (True, False)
    """
    layers = frozen_quantized_layers(model).values()
    return copy.deepcopy(model, {id(one): one for layer in layers for one in (layer.values, layer.scale)})


def count_weights(model: nn.Module) -> int:
    """Return the number of parameters of a model, those that are quantized included.

    >>> count_weights(FrozenInt4Linear.quantize(nn.Linear(64, 3))) == 64 * 3 + 3
    True
    """
    quantized = sum(layer.n_weights for layer in frozen_quantized_layers(model).values())
    return quantized + sum(weight.numel() for weight in model.parameters())


def frozen_quantized_layers(model: nn.Module) -> dict[str, FrozenQuantizedLinear]:
    """Return the frozen layers with quantized weights, by name.

    >>> model = nn.Sequential(FrozenInt8Linear.quantize(nn.Linear(2, 3)), nn.ReLU())
    >>> list(frozen_quantized_layers(model))
    ['0']
    """
    return {name: module for name, module in model.named_modules() if isinstance(module, FrozenQuantizedLinear)}
