"""LoRA: beside each frozen linear map a thin one that is trained, and folded into it in the end."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from glasshouse.config import Settings, did_you_mean, require
from glasshouse.errors import InputError
from glasshouse.layers.block import Block, CrossBlock
from glasshouse.layers.module_swap import HOOK_ATTRIBUTES

EVERY = "*"


@dataclass(frozen=True)
class LoRA(Settings):
    """Which linear maps of the blocks get a thin one beside them, and how thin.

    >>> LoRA(rank=4, targets=("query", "key", "value")).scale
    4.0
    """

    kind: ClassVar[str] = "lora"
    rank: int = 8
    alpha: float = 16.0  # what the thin map gives is multiplied by alpha / rank
    dropout: float = 0.0  # of what goes into the thin map
    targets: tuple[str, ...] = ("query", "value")  # the last part of a map's name; "*": every map of the blocks

    @property
    def scale(self) -> float:
        """What the output of a thin map is multiplied by."""
        return self.alpha / self.rank

    def check(self) -> None:
        require(self.rank > 0, "lora.rank", self.rank, "above 0")
        require(self.alpha > 0 and math.isfinite(self.alpha), "lora.alpha", self.alpha, "above 0")
        require(0 <= self.dropout < 1, "lora.dropout", self.dropout, "from 0 to below 1")
        require(len(self.targets) > 0, "lora.targets", self.targets, "at least one name")


class LoRALinear(nn.Module):
    """A frozen linear map plus a thin trained one, which gives zero at first."""

    def __init__(self, base: nn.Linear, choice: LoRA) -> None:
        super().__init__()
        self.config = choice
        self.base = base.requires_grad_(False)
        self.drop = nn.Dropout(choice.dropout)
        self.lora_a = nn.Parameter(base.weight.new_empty(choice.rank, base.in_features))
        self.lora_b = nn.Parameter(base.weight.new_zeros(base.out_features, choice.rank))
        nn.init.kaiming_uniform_(self.lora_a, a=math.sqrt(5))  # as torch draws a linear map, and as PEFT does
        self.train(base.training)

    def forward(self, x: Tensor) -> Tensor:
        """Map x [..., in] to [..., out]."""
        thin = F.linear(F.linear(self.drop(x), self.lora_a), self.lora_b)
        return self.base(x) + thin * self.config.scale

    @torch.no_grad()
    def merged(self) -> nn.Linear:
        """Return the map as it was, with the sum of both matrices in it.

        The old matrix stays as it is, for an engine that shares it and adds the thin map itself.
        """
        weight = torch.addmm(self.base.weight, self.lora_b, self.lora_a, alpha=self.config.scale)
        self.base.weight = nn.Parameter(weight)
        return self.base


def attach(model: nn.Module, choice: LoRA) -> None:
    """Freeze a model and put thin maps, the only thing trained from now on, beside those that `choice` names.

    Right after it the model gives what it gave before. Whatever is to be trained as well, such as a new head for
    labels, is for the caller to thaw.

    >>> from glasshouse.models import build
    >>> from glasshouse.spec import preset
    >>> model = build(preset("tiny-decoder", n_layers=1))
    >>> attach(model, LoRA(rank=2, targets=("query",)))
    >>> [(name, list(weight.shape)) for name, weight in model.named_parameters() if weight.requires_grad]
    [('stack.blocks.0.attention.layer.query.lora_a', [2, 64]), ('stack.blocks.0.attention.layer.query.lora_b', [64, 2])]
    """
    maps = block_linears(model)
    known = sorted({_last(name) for name in maps})
    for target in choice.targets:
        if target not in (EVERY, *known):
            raise InputError(
                f"targets names {target!r}, but the blocks have no such map; {did_you_mean(target, known)}"
            )
    model.requires_grad_(False)
    for name, base in maps.items():
        if EVERY in choice.targets or _last(name) in choice.targets:
            _exchange(model, name, LoRALinear(base, choice))


def merge(model: nn.Module) -> None:
    """Fold every thin map into the one it stands beside, and let all parameters be trained again.

    >>> from glasshouse.models import build
    >>> from glasshouse.spec import preset
    >>> model = build(preset("tiny-decoder"))
    >>> attach(model, LoRA())
    >>> merge(model)
    >>> type(model.stack.blocks[0].attention.layer.query).__name__
    'Linear'
    """
    for name, layer in _some_attached(model).items():
        _exchange(model, name, layer.merged())
    model.requires_grad_(True)


def adapter_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """Return the thin maps, by their names in the model: all that LoRA has trained.

    >>> from glasshouse.models import build
    >>> from glasshouse.spec import preset
    >>> model = build(preset("tiny-decoder", n_layers=1))
    >>> attach(model, LoRA(targets=("out",)))
    >>> sorted(adapter_state_dict(model))
    ['stack.blocks.0.attention.layer.out.lora_a', 'stack.blocks.0.attention.layer.out.lora_b']
    """
    layers = lora_layers(model).items()
    return {f"{name}.{end}": getattr(layer, end).detach() for name, layer in layers for end in ("lora_a", "lora_b")}


def load_adapter(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Copy what `adapter` returned into a model with the same maps attached; one that differs is left as it was.

    >>> from glasshouse.models import build
    >>> from glasshouse.spec import preset
    >>> one, two = (build(preset("tiny-decoder")) for _ in range(2))
    >>> for model in (one, two):
    ...     attach(model, LoRA())
    >>> load_adapter(two, adapter_state_dict(one))
    >>> all(tensor.equal(adapter_state_dict(two)[name]) for name, tensor in adapter_state_dict(one).items())
    True
    """
    _some_attached(model)
    own = adapter_state_dict(model)
    if odd := sorted(own.keys() ^ tensors.keys()):
        where = "the adapter lacks" if odd[0] in own else "the model lacks"
        raise InputError(f"{where} {odd[0]} ({len(odd)} differ in all); attach what the adapter was trained with.")
    for name, weight in own.items():
        if weight.shape != tensors[name].shape:
            raise InputError(
                f"{name} has shape {list(tensors[name].shape)}, but the model's has {list(weight.shape)}; "
                "attach what the adapter was trained with."
            )
    for name, weight in own.items():
        weight.copy_(tensors[name])


def lora_layers(model: nn.Module) -> dict[str, LoRALinear]:
    """Return the maps of a model that have a thin one beside them, by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, LoRALinear)}


def block_linears(model: nn.Module) -> dict[str, nn.Linear]:
    """Return the linear maps in the blocks of a model without LoRA, by name: those that can get it."""
    if lora_layers(model):
        raise InputError("the model has LoRA attached already; merge it first.")
    return {
        f"{above}.{name}": module
        for above, block in model.named_modules()
        if isinstance(block, Block | CrossBlock)
        for name, module in block.named_modules()
        if type(module) is nn.Linear
    }


def _some_attached(model: nn.Module) -> dict[str, LoRALinear]:
    layers = lora_layers(model)
    if not layers:
        raise InputError("the model has no LoRA; attach it first.")
    return layers


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def _exchange(model: nn.Module, name: str, heir: nn.Module) -> None:
    """Put a module in the place of another, which hands its hooks over: the dictionaries, where handles find them."""
    above, _, last = name.rpartition(".")
    former = model.get_submodule(name)
    for hooks in HOOK_ATTRIBUTES:
        handed, other = getattr(former, hooks), getattr(heir, hooks)
        setattr(heir, hooks, handed)
        setattr(former, hooks, other)
    setattr(model.get_submodule(above), last, heir)
