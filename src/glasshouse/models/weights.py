"""Weights: initialization by the scheme of a spec, and assignment to modules that were built without them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from glasshouse import spec
from glasshouse.layers.embedding import Embedding
from glasshouse.layers.linear.linear import Linear
from glasshouse.layers.norm import Norm
from glasshouse.layers.position import LearnedPosition
from glasshouse.layers.sublayer import Sublayer
from glasshouse.layers.value_embedding import ValueTable
from glasshouse.models.heads import LMHead, UntiedLMHead
from glasshouse.models.stack import Stack


def first_names(model: nn.Module) -> dict[str, str]:
    """Return, for every weight by name, the first name of the same one: its own, unless modules share it.

    Weights are parameters, and buffers that are saved.

    >>> model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    >>> model[1].weight = model[0].weight
    >>> first_names(model)
    {'0.weight': '0.weight', '1.weight': '0.weight'}
    """
    first: dict[Tensor, str] = {}
    return {name: first.setdefault(weight, name) for name, weight in model.state_dict(keep_vars=True).items()}


@torch.no_grad()
def assign_weights(model: nn.Module, weights: Mapping[str, Tensor], *, buffers_of: nn.Module | None = None) -> None:
    """Give a model its weights, without copying them; what its modules share stays shared.

    Buffers that are not saved are copied from another model, if one is given.

    >>> with torch.device("meta"):
    ...     model = nn.Linear(1, 1)
    >>> assign_weights(model, {"weight": torch.ones(1, 1), "bias": torch.zeros(1)})
    >>> model(torch.tensor([[3.0]])).item()
    3.0
    """
    names = first_names(model)
    model.load_state_dict({name: weights[first] for name, first in names.items()}, assign=True)
    for name, first in names.items():
        if name != first:
            _set(model, name, dict(model.state_dict(keep_vars=True))[first])
    if buffers_of is not None:
        device = next(iter(weights.values())).device
        for name, buffer in buffers_of.named_buffers():
            if name not in names:
                _set(model, name, buffer.to(device, copy=True))


def _set(model: nn.Module, name: str, tensor: Tensor) -> None:
    above, _, last = name.rpartition(".")
    setattr(model.get_submodule(above), last, tensor)


@torch.no_grad()
def init_weights(
    model: nn.Module, s: spec.TransformerSpec, needs_values: Callable[[Tensor], bool] = lambda weight: True
) -> None:
    """Initialize what our modules leave to the spec, as far as it `needs_values`.

    Linear layers and embeddings are initialized by the spec's scheme, norms to 1, biases to 0.
    """
    drawn = set()
    for module in model.modules():
        match module:
            case Linear() | Embedding() | UntiedLMHead() if needs_values(module.weight):
                drawn.add(module.weight)
                _draw(module, s)
            case Norm():
                for name, weight in module.named_parameters():
                    if not name.endswith("bias") and needs_values(weight):
                        nn.init.ones_(weight)
        if isinstance(module, Linear | LMHead | Norm):
            bias = getattr(module, "bias", None)
            if isinstance(bias, Tensor) and needs_values(bias):
                nn.init.zeros_(bias)

    for position in model.modules():
        if isinstance(position, LearnedPosition) and s.embed_scale and position.table.weight in drawn:
            position.table.weight.mul_(s.d_model**0.5)  # added to token embeddings that are scaled

    for stack in model.modules():
        if isinstance(stack, Stack):
            weights = residual_projections(stack)
            for projection in filter(drawn.__contains__, weights):
                match s.init:
                    case spec.DepthScaled():
                        projection.div_(len(weights) ** 0.5)
                    case spec.ZeroOutput() | spec.FanIn():
                        projection.zero_()


def _draw(module: Linear | Embedding | UntiedLMHead, s: spec.TransformerSpec) -> None:
    """Draw the weight of a module by the spec's scheme."""
    match s.init, module:
        case spec.Xavier(), Linear():
            nn.init.xavier_uniform_(module.weight)
        case spec.FanIn(), Linear():
            nn.init.normal_(module.weight, std=module.in_features**-0.5)
        case spec.FanIn(), ValueTable():
            nn.init.normal_(module.weight, std=s.d_model**-0.5)
        case spec.FanIn(), Embedding() if getattr(getattr(s, "head", None), "tied", False):
            nn.init.normal_(module.weight, std=s.d_model**-0.5)
        case spec.FanIn(embedding_std, head_std), _:
            nn.init.normal_(module.weight, std=head_std if isinstance(module, UntiedLMHead) else embedding_std)
        case _:
            nn.init.normal_(module.weight, std=getattr(s.init, "std", s.d_model**-0.5))


def residual_projections(stack: Stack) -> list[Tensor]:
    """Return the weights of the layers whose output is added to the residual stream."""
    layers = (module for module in stack.modules() if isinstance(module, Sublayer))
    return [layer.residual_projection.weight for layer in layers]
