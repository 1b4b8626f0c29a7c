"""Weight initialization by the scheme that a spec names."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from glasshouse import spec
from glasshouse.layers.norm import Norm
from glasshouse.layers.position import LearnedPosition
from glasshouse.layers.sublayer import Sublayer
from glasshouse.models.heads import UntiedLMHead
from glasshouse.models.stack import Stack


@torch.no_grad()
def init_weights(model: nn.Module, s: spec.TransformerSpec) -> None:
    """Initialize every parameter: linear layers and embeddings by the spec's scheme, norms with 1, biases with 0."""
    xavier = isinstance(s.init, spec.Xavier)
    std = getattr(s.init, "std", s.d_model**-0.5)

    for module in model.modules():
        match module:
            case nn.Linear() if xavier:
                nn.init.xavier_uniform_(module.weight)
            case nn.Linear():
                nn.init.normal_(module.weight, std=std)
            case nn.Embedding() | UntiedLMHead():
                nn.init.normal_(module.weight, std=std)
            case Norm():
                module.init_weights()
        if isinstance(bias := getattr(module, "bias", None), Tensor):
            nn.init.zeros_(bias)

    for position in model.modules():
        if isinstance(position, LearnedPosition) and s.embed_scale:  # added to token embeddings that are scaled
            position.table.weight.mul_(s.d_model**0.5)

    for stack in model.modules():
        if isinstance(stack, Stack):
            for weight in (weights := residual_projections(stack)):
                match s.init:
                    case spec.DepthScaled():
                        weight.div_(len(weights) ** 0.5)
                    case spec.ZeroOutput():
                        weight.zero_()


def residual_projections(stack: Stack) -> list[Tensor]:
    """Return the weights of the layers whose output is added to the residual stream."""
    layers = (module for module in stack.modules() if isinstance(module, Sublayer))
    return [layer.residual_projection.weight for layer in layers]
