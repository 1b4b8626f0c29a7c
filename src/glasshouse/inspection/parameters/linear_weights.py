"""The weight and bias of a linear layer, as the tools that decompose a model need them."""

from __future__ import annotations

from torch import Tensor, nn

from glasshouse.errors import InputError
from glasshouse.inspection.sites import unwrap_compiled
from glasshouse.layers.lora import LoRALinear


def weight_and_bias(linear: nn.Module, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return the weight and bias of a linear layer, with LoRA merged.

    >>> import torch
    >>> weight, bias = weight_and_bias(nn.Linear(2, 3, bias=False), torch.zeros(1))
    >>> weight.shape, bias
    (torch.Size([3, 2]), tensor([0., 0., 0.]))
    """
    linear = unwrap_compiled(linear)
    base = linear.base if isinstance(linear, LoRALinear) else linear
    if not isinstance(base, nn.Linear):
        raise InputError(
            f"{type(base).__name__} has no weight matrix to take apart; use the model before quantization."
        )
    weight = base.weight.to(like)
    if isinstance(linear, LoRALinear):
        weight = weight + linear.config.scale * (linear.lora_b @ linear.lora_a).to(like)
    bias = base.bias.to(like) if base.bias is not None else weight.new_zeros(len(weight))
    return weight, bias
