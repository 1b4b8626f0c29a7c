"""Optimizers: AdamW for all parameters, or Muon for the weight matrices of the blocks and AdamW for the rest.

Either is one `torch.optim.Optimizer` whose state is all tensors and whose param groups hold the settings.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar, overload

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from glasshouse import registry
from glasshouse.config import Settings, require, require_positive
from glasshouse.device import compute_dtype
from glasshouse.errors import InputError
from glasshouse.layers.embedding import Embedding
from glasshouse.models import Decoder, Encoder, Seq2Seq
from glasshouse.models.heads import LMHead, UntiedLMHead
from glasshouse.models.stack import Stack
from glasshouse.training.distributed.fsdp import is_sharded, local, shard_like, whole_like

NS_COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # a, b, c of a x + b x^3 + c x^5, as published: steep at 0, inexact at 1
MOMENTUM_START = 0.85  # where a warm-up of Muon's momentum begins
STACKED = 2**26  # elements of one batched product; larger ones gain no speed and cost memory

Named = list[tuple[str, nn.Parameter]]
Group = dict[str, Any]


# Settings ---------------------------------------------------------------------------------------------------


def _require_fraction(choice: Settings, *fields: str) -> None:
    for name in fields:
        value = getattr(choice, name)
        require(0 <= value < 1, f"{choice.kind}.{name}", value, "at least 0 and below 1")


def _require_decay(choice: AdamW | Muon) -> None:
    decay = choice.weight_decay
    require(0 <= decay < math.inf, f"{choice.kind}.weight_decay", decay, "0 or above")


@dataclass(frozen=True)
class Optimizer(Settings, registry.Kind):
    """Base class of optimizer settings: the peak learning rate, which `train.lr` overrides."""

    build_arguments = "its settings and the model"
    lr: float = 1e-3  # peak learning rate


@dataclass(frozen=True)
class AdamW(Optimizer):
    """Adam with decoupled weight decay.

    >>> AdamW(beta2=1.0)
    Traceback (most recent call last):
    ...
    glasshouse.errors.ConfigError: adamw.beta2 is 1.0, but it must be at least 0 and below 1.
    """

    kind: ClassVar[str] = "adamw"
    beta1: float = 0.9  # decay of the mean of the gradients
    beta2: float = 0.95  # decay of the mean of their squares
    eps: float = 1e-8  # added to the denominator of the update
    weight_decay: float = 0.1  # decoupled weight decay of matrices; not applied to norms and biases

    def check(self) -> None:
        require_positive(self, "lr", "eps")
        _require_fraction(self, "beta1", "beta2")
        _require_decay(self)


@dataclass(frozen=True)
class Muon(Optimizer):
    """Orthogonalized momentum for the weight matrices of the blocks; `adamw` for all other parameters.

    The update of a matrix is scaled by max(1, rows / columns) ** 0.5, which is `adjust_lr_fn="original"` of
    `torch.optim.Muon`. Learning rate and weight decay are those of the published example. With `beta2` each row of an
    update is divided by its root mean square over the steps, and the update scaled to the norm it had (NorMuon).

    >>> Muon(ns_steps=0)
    Traceback (most recent call last):
    ...
    glasshouse.errors.ConfigError: muon.ns_steps is 0, but it must be above 0.
    """

    kind: ClassVar[str] = "muon"
    lr: float = 0.02  # peak learning rate of the matrices of the blocks
    momentum: float = 0.95  # decay of the mean of the gradients (Nesterov)
    weight_decay: float = 0.01  # decoupled weight decay of these matrices
    ns_steps: int = 5  # Newton-Schulz iterations
    adamw: AdamW = AdamW()  # the optimizer of all other parameters
    # [steps] over which the momentum rises from 0.85 to its value
    momentum_warmup: int = field(default=0, metadata={"omit_default": True})
    # decay of the mean square of each row of the update; 0: rows are not normalized
    beta2: float = field(default=0.0, metadata={"omit_default": True})
    # weight decay only of the weights that the update moves towards zero
    cautious: bool = field(default=False, metadata={"omit_default": True})
    # the optimizer of the embeddings, besides one that is tied to the head; None: adamw
    embedding: AdamW | None = field(default=None, metadata={"omit_default": True})
    # the optimizer of the matrix that makes the logits; None: adamw
    head: AdamW | None = field(default=None, metadata={"omit_default": True})

    def check(self) -> None:
        require_positive(self, "lr", "ns_steps")
        _require_fraction(self, "momentum", "beta2")
        _require_decay(self)
        rises = self.momentum_warmup >= 0 and (self.momentum_warmup == 0 or self.momentum >= MOMENTUM_START)
        rule = f"0 or more, and 0 where momentum is below {MOMENTUM_START}"
        require(rises, "muon.momentum_warmup", self.momentum_warmup, rule)


registry.add(AdamW, Muon)


# Parameter groups -------------------------------------------------------------------------------------------


def make_optimizer(model: nn.Module, choice: Optimizer) -> torch.optim.Optimizer:
    """Build the optimizer of the trainable parameters of a model; shared parameters appear once.

    >>> import glasshouse as gh
    >>> model = gh.build(gh.preset("tiny-decoder"))
    >>> for group in make_optimizer(model, Muon()).param_groups:
    ...     print(group["kind"], group["lr"], group["weight_decay"], len(group["params"]), group["param_names"][0])
    muon 0.02 0.01 14 stack.blocks.0.attention.layer.query.weight
    adamw 0.001 0.1 2 token_embedding.table.weight
    adamw 0.001 0.0 9 stack.blocks.0.attention.norm.weight
    """
    named = [(name, weight) for name, weight in model.named_parameters() if weight.requires_grad]
    if not named:
        raise InputError(
            "no parameter of the model requires a gradient, so there is nothing to train; unfreeze some."
        )
    if (made := registry.build(choice, torch.optim.Optimizer, choice, model)) is not None:
        for group in made.param_groups:  # which the schedule scales
            group.setdefault("initial_lr", group["lr"])
        return made
    match choice:
        case AdamW() if is_sharded(named[0][1]):  # torch's would ask each shard for its layout in every operation
            return MuonAdamW(_adamw_groups(named, choice))
        case AdamW():
            return torch.optim.AdamW(_adamw_groups(named, choice))
        case Muon(lr, momentum, weight_decay, ns_steps):
            inside = set(block_matrices(model))
            heads = _unembeddings(model)
            embeddings = {one.weight for one in model.modules() if isinstance(one, Embedding)} - heads
            matrices = [(name, weight) for name, weight in named if weight in inside]
            if not matrices:
                raise InputError("muon updates the matrices inside the blocks, and none is trainable; choose adamw.")
            group = {"params": matrices, "momentum": momentum, "weight_decay": weight_decay, "ns_steps": ns_steps}
            group |= {"beta2": choice.beta2, "cautious": choice.cautious}
            if choice.momentum_warmup:
                group |= {"peak_momentum": momentum, "momentum_warmup": choice.momentum_warmup}
            groups = [_with_lr(lr, kind="muon", **group)]
            rest = [(name, weight) for name, weight in named if weight not in inside]
            for special, own in ((embeddings, choice.embedding), (heads, choice.head)):
                if own is not None:
                    groups += _adamw_groups([one for one in rest if one[1] in special], own)
                    rest = [one for one in rest if one[1] not in special]
            return MuonAdamW([*groups, *_adamw_groups(rest, choice.adamw)])
    raise AssertionError(choice)


def set_lr(optimizer: torch.optim.Optimizer, factor: float) -> None:
    """Set the learning rate of every param group to `factor` times its initial one.

    >>> optimizer = make_optimizer(nn.Linear(2, 3), AdamW(lr=0.5))
    >>> set_lr(optimizer, 0.5)
    >>> [group["lr"] for group in optimizer.param_groups]
    [0.25, 0.25]
    """
    for group in optimizer.param_groups:
        group["lr"] = group["initial_lr"] * factor


def set_momentum(optimizer: torch.optim.Optimizer, step: int) -> None:
    """Set the momentum of Muon at a step, counted from 0, where it has a warm-up.

    >>> import glasshouse as gh
    >>> optimizer = make_optimizer(gh.build(gh.preset("tiny-decoder")), Muon(momentum_warmup=10))
    >>> for step in (0, 5, 10, 100):
    ...     set_momentum(optimizer, step)
    ...     print(round(optimizer.param_groups[0]["momentum"], 3))
    0.85
    0.9
    0.95
    0.95
    """
    for group in optimizer.param_groups:
        if steps := group.get("momentum_warmup"):
            rise = min(1.0, step / steps) * (group["peak_momentum"] - MOMENTUM_START)
            group["momentum"] = MOMENTUM_START + rise


def skips_nonfinite(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether a step changes nothing where the tensor `optimizer.found_inf` is 1, without a host sync.

    >>> skips_nonfinite(make_optimizer(nn.Linear(2, 3), AdamW())), skips_nonfinite(torch.optim.SGD([torch.ones(1)]))
    (True, False)
    """
    known = isinstance(optimizer, MuonAdamW | torch.optim.AdamW)
    return known and all(group.get("fused") or group.get("kind") == "muon" for group in optimizer.param_groups)


def block_matrices(model: nn.Module) -> Iterator[nn.Parameter]:
    """Yield the matrices inside the blocks, which Muon updates."""
    for stack in model.modules():
        if isinstance(stack, Stack):
            for module in stack.blocks.modules():
                if not isinstance(module, Embedding):  # a lookup: its gradient is zero for most rows
                    yield from (weight for weight in module.parameters(recurse=False) if weight.dim() == 2)


def _unembeddings(model: nn.Module) -> set[Tensor]:
    """Return the matrices that make logits over the vocabulary, a tied one being the token embedding."""
    models = [one for one in model.modules() if isinstance(one, Decoder | Encoder | Seq2Seq)]
    heads = {one.weight for one in model.modules() if isinstance(one, UntiedLMHead)}
    tied = (one for one in models if isinstance(one.head, LMHead) and not isinstance(one.head, UntiedLMHead))
    return heads | {one.token_embedding.table.weight for one in tied}


def _adamw_groups(named: Named, choice: AdamW) -> list[Group]:
    """Split parameters into matrices, with weight decay, and others, without."""
    groups = []
    for weight_decay, matrices in ((choice.weight_decay, True), (0.0, False)):
        part = [(name, weight) for name, weight in named if (weight.dim() >= 2) == matrices]
        if part:
            fused = all(weight.device.type in ("cuda", "cpu") for _, weight in part) or None  # None: torch decides
            group = {"params": part, "betas": (choice.beta1, choice.beta2), "eps": choice.eps, "fused": fused}
            groups.append(_with_lr(choice.lr, kind="adamw", weight_decay=weight_decay, **group))
    return groups


def _with_lr(lr: float, **group: object) -> Group:
    return {**group, "lr": lr, "initial_lr": lr}


# Muon -------------------------------------------------------------------------------------------------------


class MuonAdamW(torch.optim.Optimizer):
    """Updates each param group by Muon or AdamW, with one state; made by `make_optimizer`.

    >>> import glasshouse as gh
    >>> type(make_optimizer(gh.build(gh.preset("tiny-encoder")), Muon())).__name__
    'MuonAdamW'
    """

    found_inf: Tensor | None = None  # 1 where a step is to change nothing, as in torch's fused optimizers

    def __init__(self, groups: list[Group]) -> None:
        super().__init__(groups, {})

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            weights = [weight for weight in group["params"] if weight.grad is not None]
            if group["kind"] == "muon":
                for alike in _stacks(weights):
                    self._muon(group, alike)
            else:
                self._adamw(group, weights)
        return loss

    def _muon(self, group: Group, weights: list[Tensor]) -> None:
        """Update matrices of one shape."""
        for weight in weights:
            if not self.state[weight]:
                self.state[weight]["momentum_buffer"] = torch.zeros_like(weight)
        gradients = _gradients(weights)
        buffers = [local(self.state[weight]["momentum_buffer"]) for weight in weights]
        if self.found_inf is not None:  # a buffer that is its own gradient does not change
            pairs = zip(buffers, gradients, strict=True)
            gradients = [torch.where(self.found_inf > 0, buffer, gradient) for buffer, gradient in pairs]
        torch._foreach_lerp_(buffers, gradients, 1 - group["momentum"])
        nesterov = torch._foreach_lerp(gradients, buffers, group["momentum"])

        # Of sharded matrices, every process computes the whole update, as one alone would, and keeps its shard.
        updates = torch.stack([whole_like(one, weight) for one, weight in zip(nesterov, weights, strict=True)])
        updates = updates / torch.linalg.matrix_norm(updates, keepdim=True).clamp(min=1e-7)  # no overflow in float16
        low = updates.dtype if updates.dtype == torch.float64 else compute_dtype(updates.device)
        updates = newton_schulz(updates.to(low), group["ns_steps"]).to(updates.dtype)
        if group.get("beta2"):
            updates = self._normalize_rows(group, weights, updates)

        rows, columns = weights[0].shape
        decay = group["lr"] * group["weight_decay"]
        if self.found_inf is not None:
            decay = decay * (1 - self.found_inf)
            updates = updates * (1 - self.found_inf)
        shards = [local(weight) for weight in weights]
        own = [shard_like(update, weight) for update, weight in zip(updates, weights, strict=True)]
        if group.get("cautious"):
            for shard, update in zip(shards, own, strict=True):
                shard.mul_(1 - decay * (shard * update > 0))
        else:
            torch._foreach_mul_(shards, 1 - decay)
        torch._foreach_add_(shards, own, alpha=-group["lr"] * max(1, rows / columns) ** 0.5)

    def _normalize_rows(self, group: Group, weights: list[Tensor], updates: Tensor) -> Tensor:
        """Divide each row of updates [N, rows, columns] by its root mean square, and keep the norm of each matrix."""
        for weight in weights:
            if "row_mean_square" not in self.state[weight]:
                self.state[weight]["row_mean_square"] = torch.zeros_like(weight[:, :1])
        means = [self.state[weight]["row_mean_square"] for weight in weights]
        now = updates.square().mean(-1, keepdim=True)
        own = [shard_like(one, mean) for one, mean in zip(now, means, strict=True)]
        if self.found_inf is not None:
            own = [torch.where(self.found_inf > 0, local(mean), one) for one, mean in zip(own, means, strict=True)]
        torch._foreach_lerp_([local(mean) for mean in means], own, 1 - group["beta2"])
        scales = torch.stack([whole_like(local(mean), mean) for mean in means]).clamp(min=1e-10).sqrt()
        norms = torch.linalg.matrix_norm(updates, keepdim=True)
        updates = updates / scales
        return updates * (norms / torch.linalg.matrix_norm(updates, keepdim=True).clamp(min=1e-7))

    def _adamw(self, group: Group, weights: list[Tensor]) -> None:
        """Update parameters as `torch.optim.AdamW` does, with the same state."""
        for weight in weights:
            if not self.state[weight]:
                where = weight.device if group["fused"] else "cpu"
                step = torch.zeros((), dtype=torch.float32, device=where)
                average, square = torch.zeros_like(weight), torch.zeros_like(weight)
                self.state[weight].update(step=step, exp_avg=average, exp_avg_sq=square)
        adamw(
            [local(weight) for weight in weights],
            _gradients(weights),
            [local(self.state[weight]["exp_avg"]) for weight in weights],
            [local(self.state[weight]["exp_avg_sq"]) for weight in weights],
            [],
            [self.state[weight]["step"] for weight in weights],
            fused=group["fused"],
            found_inf=self.found_inf,
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )


def newton_schulz(x: Tensor, steps: int) -> Tensor:
    """Orthogonalize matrices x [N, rows, columns], whose singular values are at most 1, by Newton-Schulz iteration.

    Five steps bring singular values above about 0.002 to between 0.68 and 1.21; 0 stays 0. More steps bring them no
    closer to 1, and training gains nothing from it.

    >>> after = torch.linalg.svdvals(newton_schulz(torch.diag(torch.tensor([0.9, 0.01, 0.0]))[None], 5))[0]
    >>> bool(0.68 < after[1] < after[0] < 1.21), after[2].item()
    (True, 0.0)
    """
    a, b, c = NS_COEFFICIENTS
    tall = x.shape[1] > x.shape[2]
    x = x.mT if tall else x  # x @ x.mT is then the smaller product
    for _ in range(steps):
        products = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(products, products, products, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def _stacks(weights: list[Tensor]) -> Iterator[list[Tensor]]:
    """Group matrices for one batched product, which is much faster for small ones."""
    alike = defaultdict(list)
    for weight in weights:
        alike[weight.shape, weight.dtype, weight.device].append(weight)
    for stack in alike.values():
        size = max(1, STACKED // stack[0].numel())
        for start in range(0, len(stack), size):
            yield stack[start : start + size]


def _gradients(weights: list[Tensor]) -> list[Tensor]:
    """Return the gradients, or of sharded weights their shards."""
    return [local(weight.grad) for weight in weights if weight.grad is not None]
