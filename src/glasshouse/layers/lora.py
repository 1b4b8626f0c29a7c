"""LoRA: low-rank adapters on frozen linear layers, and what is trained with them; merged in the end."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

from glasshouse.config import Settings, did_you_mean, require
from glasshouse.errors import InputError
from glasshouse.layers.flops import FlopCount, product
from glasshouse.layers.linear.frozen_quantized import (
    FrozenInt4Linear,
    FrozenInt8Linear,
    FrozenQuantizedLinear,
    frozen_quantized_layers,
)
from glasshouse.layers.linear.int4 import GROUP
from glasshouse.layers.linear.linear import is_plain_linear
from glasshouse.layers.module_swap import HOOK_ATTRIBUTES
from glasshouse.layers.sublayer import Sublayer

EVERY = "*"
FrozenWeights = Literal["own", "int8", "int4"]  # the model's own; one byte per weight; half a byte
QUANTIZED: dict[FrozenWeights, type[FrozenQuantizedLinear]] = {"int8": FrozenInt8Linear, "int4": FrozenInt4Linear}


@dataclass(frozen=True)
class LoRA(Settings):
    """Which linear layers of the blocks get a LoRA adapter, and its rank.

    >>> LoRA(rank=4, targets=("query", "key", "value")).scale
    4.0
    """

    kind: ClassVar[str] = "lora"
    rank: int = 8  # rank of the update
    alpha: float = 16.0  # the adapter's output is scaled by alpha / rank
    dropout: float = 0.0  # dropout probability on the adapter's input
    # layers that get an adapter, by the last component of their name; "*": every linear layer of the blocks
    targets: tuple[str, ...] = ("query", "value")
    # modules that are trained whole, by name with wildcards, such as "stack.norm"
    modules_to_save: tuple[str, ...] = ()
    # tokens whose rows of the embedding and of an untied head are trained; empty: in a run, those new to the model
    token_ids: tuple[int, ...] = ()
    # of the frozen linear layers of the blocks: the model's own, or quantized to int8 or int4 (QLoRA)
    weights: FrozenWeights = "own"

    @property
    def scale(self) -> float:
        """The scale of the adapter's output."""
        return self.alpha / self.rank

    def check(self) -> None:
        require(self.rank > 0, "lora.rank", self.rank, "above 0")
        require(self.alpha > 0 and math.isfinite(self.alpha), "lora.alpha", self.alpha, "above 0")
        require(0 <= self.dropout < 1, "lora.dropout", self.dropout, "from 0 to below 1")
        require(len(self.targets) > 0, "lora.targets", self.targets, "at least one name")
        require(len({*self.token_ids}) == len(self.token_ids), "lora.token_ids", self.token_ids, "all different")


class LoRALinear(nn.Module):
    """A frozen linear layer plus a trained low-rank update, which is zero at first."""

    def __init__(self, base: nn.Linear, config: LoRA) -> None:
        super().__init__()
        self.config = config
        self.in_features, self.out_features = base.in_features, base.out_features
        self.base = base.requires_grad_(False)
        self.drop = nn.Dropout(config.dropout)
        weight = base.weight  # dequantized here, if it is quantized
        self.lora_a = nn.Parameter(weight.new_empty(config.rank, base.in_features))
        self.lora_b = nn.Parameter(weight.new_zeros(base.out_features, config.rank))
        self.init_weights()
        self.train(base.training)

    def init_weights(self) -> None:
        """Draw the first matrix; the second is zero."""
        nn.init.kaiming_uniform_(self.lora_a, a=math.sqrt(5))  # as nn.Linear and PEFT do

    def forward(self, x: Tensor) -> Tensor:
        """Map x [..., in] to [..., out]."""
        update = F.linear(F.linear(self.drop(x), self.lora_a), self.lora_b)
        return self.base(x) + update * self.config.scale

    def add_flops(self, count: FlopCount, trained: bool) -> bool:
        """Add the FLOPs of the frozen layer and of the update."""
        count.add(self.base, trained)
        count.maps += product(self.lora_a, trained) + product(self.lora_b, True)
        return True

    @torch.no_grad()
    def merged(self) -> nn.Linear:
        """Return the linear layer with the update added to its weight.

        The old weight tensor is not changed, as an engine may share it and add the update itself. A quantized one is
        dequantized.
        """
        base = self.base.to_linear() if isinstance(self.base, FrozenQuantizedLinear) else self.base
        weight = torch.addmm(base.weight, self.lora_b, self.lora_a, alpha=self.config.scale)
        base.weight = nn.Parameter(weight)
        return base


class TrainedRows(nn.Module):
    """A frozen matrix with trained rows in the place of some; a parametrization, so `module.weight` has them.

    >>> TrainedRows(torch.zeros(3, 1), (2,))(torch.ones(3, 1)).flatten().tolist()
    [1.0, 1.0, 0.0]
    """

    ids: Tensor

    def __init__(self, weight: Tensor, ids: tuple[int, ...]) -> None:
        super().__init__()
        where = torch.tensor(ids, device=weight.device)
        self.register_buffer("ids", where, persistent=False)
        self.rows = nn.Parameter(weight.detach()[where])  # as in the matrix, at first

    def forward(self, weight: Tensor) -> Tensor:
        """Map the matrix [V, D] to the one with trained rows."""
        return weight.index_copy(0, self.ids, self.rows)


def attach(model: nn.Module, config: LoRA) -> None:
    """Freeze a model and attach trainable adapters to the layers that `config` names.

    The rows of its `token_ids` and its `modules_to_save` are trained, too. The output of the model does not change
    until they are trained, unless `weights` quantizes the linear layers of the blocks. Other parameters, such as a
    new classification head, are for the caller to unfreeze.

    >>> from glasshouse.models import build
    >>> from glasshouse.spec import preset
    >>> model = build(preset("tiny-decoder", n_layers=1))
    >>> attach(model, LoRA(rank=2, targets=("query",)))
    >>> trained = [(name, list(weight.shape)) for name, weight in model.named_parameters() if weight.requires_grad]
    >>> [(name.removeprefix("stack.blocks.0.attention.layer."), shape) for name, shape in trained]
    [('query.lora_a', [2, 64]), ('query.lora_b', [64, 2])]
    """
    linears = block_linears(model)
    known = sorted({_last(name) for name in linears})
    for target in config.targets:
        if target not in (EVERY, *known):
            raise InputError(
                f"targets names {target!r}, but the blocks have no such layer; {did_you_mean(target, known)}"
            )
    adapted = [name for name in linears if EVERY in config.targets or _last(name) in config.targets]
    whole = _modules_to_save(model, config, adapted)
    matrices = _token_matrices(model, config)
    quantized = _quantized(linears, config.weights, whole)
    model.requires_grad_(False)
    for module in whole.values():
        module.requires_grad_(True)
    for owner in (one for one in matrices.values() if not one.weight.requires_grad):  # else it is trained whole
        parametrize.register_parametrization(owner, "weight", TrainedRows(owner.weight, config.token_ids))
    for name, layer in quantized.items():
        _replace(model, name, layer)
    for name in adapted:
        _replace(model, name, LoRALinear(quantized.get(name, linears[name]), config))


def _quantized(
    linears: Mapping[str, nn.Linear], weights: FrozenWeights, whole: Mapping[str, nn.Module]
) -> dict[str, FrozenQuantizedLinear]:
    """Return the quantized layers in the place of the linear layers that are not trained."""
    if weights == "own":
        return {}
    trained = tuple(f"{name}." for name in whole)
    frozen = {name: linear for name, linear in linears.items() if not f"{name}.".startswith(trained)}
    for name, linear in frozen.items():
        if weights == "int4" and linear.in_features % GROUP:
            raise InputError(
                f"weights is 'int4', but {name} has {linear.in_features} inputs, which is no multiple of "
                f"{GROUP}; use 'int8'."
            )
    return {name: QUANTIZED[weights].quantize(linear) for name, linear in frozen.items()}


def _modules_to_save(model: nn.Module, config: LoRA, adapted: list[str]) -> dict[str, nn.Module]:
    """Return the modules that are trained whole; none may have a layer that gets an adapter."""
    found: dict[str, nn.Module] = {}
    for pattern in config.modules_to_save:
        matched = matching_modules(model, pattern, "modules_to_save")
        for name in matched:
            if within := next((one for one in adapted if f"{one}.".startswith(f"{name}.")), None):
                raise InputError(
                    f"modules_to_save has {pattern!r}, which matches {name}, but {within} gets an adapter; choose "
                    "other targets, or other modules."
                )
        found |= matched
    return found


def matching_modules(model: nn.Module, pattern: str, setting: str) -> dict[str, nn.Module]:
    """Return the modules whose names match a pattern with wildcards; raise, with the `setting`, if there are none."""
    modules = {name: module for name, module in model.named_modules() if name}
    matched = {name: module for name, module in modules.items() if fnmatchcase(name, pattern)}
    if not matched:
        raise InputError(f"{setting} has {pattern!r}, which matches no module; {did_you_mean(pattern, modules)}")
    return matched


def _token_matrices(model: nn.Module, config: LoRA) -> dict[str, Any]:
    """Return the modules with a row for each token: the embedding, and a head that is not tied to it."""
    if not config.token_ids:
        return {}
    table: Any = model.get_submodule("token_embedding.table")
    if not 0 <= min(config.token_ids) <= max(config.token_ids) < len(table.weight):
        raise InputError(f"token_ids has {max(config.token_ids)}, but the vocabulary has {len(table.weight)} tokens.")
    head = model.get_submodule("head")
    untied = {"head": head} if isinstance(getattr(head, "weight", None), nn.Parameter) else {}
    return {"token_embedding.table": table, **untied}


def merge(model: nn.Module) -> None:
    """Merge every adapter into its linear layer, and make all parameters trainable again.

    Quantized weights are dequantized: the merged model is the one that was trained, up to rounding.

    >>> from glasshouse.models import build
    >>> from glasshouse.spec import preset
    >>> model = build(preset("tiny-decoder"))
    >>> attach(model, LoRA())
    >>> merge(model)
    >>> type(model.stack.blocks[0].attention.layer.query).__name__
    'Linear'
    """
    for name, layer in _require_lora_layers(model).items():
        _replace(model, name, layer.merged())
    for name, quantized in frozen_quantized_layers(model).items():
        _replace(model, name, quantized.to_linear())
    for owner, _ in trained_rows(model).values():
        parametrize.remove_parametrizations(owner, "weight")
    model.requires_grad_(True)


def adapter_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """Return the adapter's tensors, by their names in the model: all that LoRA trains.

    >>> from glasshouse.models import build
    >>> from glasshouse.spec import preset
    >>> model = build(preset("tiny-decoder", n_layers=1))
    >>> attach(model, LoRA(targets=("out",)))
    >>> sorted(adapter_state_dict(model))
    ['stack.blocks.0.attention.layer.out.lora_a', 'stack.blocks.0.attention.layer.out.lora_b']
    """
    layers, rows = lora_layers(model), trained_rows(model)
    found = {f"{name}.{end}": getattr(layer, end) for name, layer in layers.items() for end in ("lora_a", "lora_b")}
    found |= {f"{name}.rows": one.rows for name, (_, one) in rows.items()}
    if config := attached(model):
        found |= saved_weights(model, config)
    return {name: weight.detach() for name, weight in found.items()}


def saved_weights(model: nn.Module, config: LoRA) -> dict[str, Tensor]:
    """Return the weights of the modules that are trained whole, by their names in the model."""
    modules = _modules_to_save(model, config, [])
    return {f"{name}.{last}": weight for name, one in modules.items() for last, weight in one.named_parameters()}


def trained_rows(model: nn.Module) -> dict[str, tuple[nn.Module, TrainedRows]]:
    """Return the modules that have trained rows, with these, by name."""
    found = {}
    for name, module in model.named_modules():
        if parametrize.is_parametrized(module, "weight"):
            (rows,) = (one for one in module.parametrizations["weight"] if isinstance(one, TrainedRows))
            found[name] = (module, rows)
    return found


def load_adapter(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Copy an adapter's tensors into a model with the same layers attached; on a mismatch nothing is copied.

    >>> from glasshouse.models import build
    >>> from glasshouse.spec import preset
    >>> one, two = (build(preset("tiny-decoder")) for _ in range(2))
    >>> for model in (one, two):
    ...     attach(model, LoRA())
    >>> load_adapter(two, adapter_state_dict(one))
    >>> all(tensor.equal(adapter_state_dict(two)[name]) for name, tensor in adapter_state_dict(one).items())
    True
    """
    _require_lora_layers(model)
    own = adapter_state_dict(model)
    if names := sorted(own.keys() ^ tensors.keys()):
        owner = "the adapter lacks" if names[0] in own else "the model lacks"
        raise InputError(
            f"{owner} {names[0]} ({len(names)} differ in all); attach the layers the adapter was trained with."
        )
    for name, weight in own.items():
        if weight.shape != tensors[name].shape:
            raise InputError(
                f"{name} has shape {list(tensors[name].shape)}, but the model's has {list(weight.shape)}; "
                "attach the layers the adapter was trained with."
            )
    for name, weight in own.items():
        weight.copy_(tensors[name])


def lora_layers(model: nn.Module) -> dict[str, LoRALinear]:
    """Return the LoRA layers of a model, by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, LoRALinear)}


def attached(model: nn.Module) -> LoRA | None:
    """Return the settings of the LoRA that a model has; None: it has none."""
    return next((layer.config for layer in lora_layers(model).values()), None)


def block_linears(model: nn.Module) -> dict[str, nn.Linear]:
    """Return the linear layers in the blocks of a model without LoRA, by name: those that can get an adapter."""
    if lora_layers(model):
        raise InputError("the model has LoRA attached already; merge it first.")
    return {
        f"{above}.{name}": module
        for above, layer in model.named_modules()
        if isinstance(layer, Sublayer)
        for name, module in layer.named_modules()
        if is_plain_linear(module)
    }


def _require_lora_layers(model: nn.Module) -> dict[str, LoRALinear]:
    layers = lora_layers(model)
    if not layers:
        raise InputError("the model has no LoRA; attach it first.")
    return layers


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def _replace(model: nn.Module, name: str, replacement: nn.Module) -> None:
    """Replace a module and move its hook dictionaries to the new one, where their handles find them."""
    above, _, last = name.rpartition(".")
    original = model.get_submodule(name)
    for hooks in HOOK_ATTRIBUTES:
        hooks_of_original, other = getattr(original, hooks), getattr(replacement, hooks)
        setattr(replacement, hooks, hooks_of_original)
        setattr(original, hooks, other)
    setattr(model.get_submodule(above), last, replacement)
