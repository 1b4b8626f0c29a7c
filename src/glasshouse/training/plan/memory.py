"""Memory of a training step, by part: what the weights, the optimizer, the activations and the loss hold at its peak.

Memory may peak at several moments of a step: the loss, when all activations and a chunk of logits are there; the
start of the backward pass, with the gradients inside a block; its end, when all gradients are there; the update.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

from glasshouse.layers.linear.frozen_quantized import frozen_quantized_layers
from glasshouse.layers.norm import Norm
from glasshouse.layers.sublayer import Sublayer
from glasshouse.models import Model
from glasshouse.models.heads import LMHead
from glasshouse.models.stack import Stack
from glasshouse.objectives.loss.linear import ALIGNED, CHUNK_LOGITS
from glasshouse.training.distributed.layout import SINGLE, Layout
from glasshouse.training.optimizer import STACKED, Muon, Optimizer, block_matrices

FULL = 4  # bytes of a float32: master weights, their gradients and the optimizer's state
STATISTICS = 8  # bytes per token that a norm stores: mean and deviation
WHOLE_LOGITS = 4  # float32 numbers per token and vocabulary entry where logits are not in chunks: with their gradient
MUON_BYTES = 22  # per element of the matrices that are orthogonalized at once: gradient, momentum, update, products

Parts = dict[str, int]


@dataclass(frozen=True)
class Activations:
    """Bytes per token that the forward pass stores for the backward pass."""

    stream: int  # inputs and outputs of norms, which tensor parallelism does not divide
    inside: int  # inside attention and feed-forward layers
    recomputed: int  # of the largest block; with activation checkpointing, one block is recomputed at a time
    working: int  # gradients inside the largest layer

    @property
    def stored(self) -> int:
        """All that is stored."""
        return self.stream + self.inside


def activation_bytes(model: Model, itemsize: int, *, checkpointing: bool = False, tensor: int = 1) -> Activations:
    """Return what a model stores, by what its layers say of themselves; compiled, with a fused attention kernel.

    >>> import glasshouse as gh
    >>> model = gh.build(gh.preset("gpt2", dropout=0.0, embed_dropout=0.0), device="meta")
    >>> activation_bytes(model, itemsize=2).stored  # twelve layers of 16 numbers per d_model, and 2 after them
    298760
    """
    width = model.spec.d_model * itemsize
    stacks = [module for module in model.modules() if isinstance(module, Stack)]
    blocks = [
        _block_bytes(block, model.spec.d_model, itemsize, rotates=stack.position.rotates)
        for stack in stacks
        for block in stack.blocks
    ]
    ends = len(stacks) * (2 * width + STATISTICS)  # input and output of the final norm
    layers = (one for one in model.modules() if isinstance(one, Sublayer))
    working = 2 * width + max(one.stored_bytes(itemsize) for one in layers) // tensor
    if checkpointing:
        largest = max(stream + inside // tensor for stream, inside in blocks)
        return Activations(ends + len(blocks) * width, 0, largest, working)
    stream, inside = (sum(part) for part in zip(*blocks, strict=True))
    return Activations(ends + stream, inside // tensor, 0, working)


def _block_bytes(block: nn.Module, d_model: int, itemsize: int, *, rotates: bool) -> tuple[int, int]:
    """Return what the residual connections of a block store, and what the layers inside them do."""
    stream = inside = 0
    for residual in block.children():
        layer = next(module for module in residual.modules() if isinstance(module, Sublayer))
        norms = sum(isinstance(module, Norm) for module in residual.children())
        drops = sum(isinstance(module, nn.Dropout) and module.p > 0 for module in residual.children())
        stream += (1 + norms) * d_model * itemsize + norms * STATISTICS + drops * d_model  # a mask takes bytes
        inside += layer.stored_bytes(itemsize)
        if rotates and hasattr(layer, "kv_shape"):
            # Rotated queries are laid out by head, and so is the kernel's output, which is copied to merge the heads.
            inside += itemsize * layer.residual_projection.in_features
    return stream, inside


def loss_bytes(model: Model, n_tokens: int, itemsize: int, *, deferred: bool, tensor: int = 1) -> int:
    """Return what the loss of a language model allocates: logits in chunks if `deferred`, and their gradients."""
    s = model.spec
    if not isinstance(model.head, LMHead):
        return 0
    if not deferred:
        return FULL * WHOLE_LOGITS * n_tokens * s.vocab_size // tensor
    padded = s.vocab_size + -s.vocab_size % ALIGNED
    chunk = min(n_tokens, max(1, CHUNK_LOGITS // padded))
    logits = itemsize * chunk * padded  # their gradient takes their place
    matrix = padded * s.d_model  # its gradient is a float32 sum, to which a chunk's is added
    matrices = (FULL + itemsize + (itemsize if padded != s.vocab_size else 0)) * matrix
    return (logits + matrices) // tensor + 2 * itemsize * n_tokens * s.d_model  # gradients of hidden states


@dataclass(frozen=True)
class StepMemory:
    """Bytes on one GPU at the peak of a step, by part, and at which moment that is."""

    parts: Parts
    moment: str

    @property
    def peak(self) -> int:
        """The sum of the parts."""
        return sum(self.parts.values())


class MemoryModel:
    """The memory of training steps of a model on one of the GPUs of a layout.

    >>> import glasshouse as gh
    >>> from glasshouse.training.optimizer import AdamW
    >>> model = gh.build(gh.preset("gpt2"), device="meta")
    >>> memory = MemoryModel(model, AdamW(), precision=torch.bfloat16).at(rows=8, seq_len=1024)
    >>> memory.moment, memory.parts["optimizer"] == 8 * 124_439_808
    ('the loss', True)
    """

    def __init__(
        self,
        model: Model,
        optimizer: Optimizer,
        *,
        precision: torch.dtype = torch.float32,
        checkpointing: bool = False,
        ema: bool = False,
        beside: int = 0,
        whole_logits: bool = False,
        layout: Layout = SINGLE,
    ) -> None:
        self.model, self.optimizer, self.checkpointing, self.layout = model, optimizer, checkpointing, layout
        self.low = precision == torch.bfloat16  # float16 is by autocast, whose residual stream is in float32
        self.itemsize = 2 if self.low else FULL
        self.deferred = self.low and not whole_logits  # an objective with a loss of its own needs logits
        self.activations = activation_bytes(model, self.itemsize, checkpointing=checkpointing, tensor=layout.tensor)
        weights = list(model.parameters())
        self.n_parameters = sum(weight.numel() for weight in weights)  # without those that are quantized
        self.n_trained = sum(weight.numel() for weight in weights if weight.requires_grad)
        quantized = list(frozen_quantized_layers(model).values())
        # Every GPU has them whole, a copy in bfloat16 shares them, and one layer at a time is dequantized.
        self.quantized_bytes = sum(one.values.nbytes + one.scale.nbytes for one in quantized)
        self.dequantized_bytes = self.itemsize * max((one.n_weights for one in quantized), default=0)
        self.own = self._shard_of(weights)
        self.own_trained = self._shard_of(weight for weight in weights if weight.requires_grad)
        blocks = [block for stack in model.modules() if isinstance(stack, Stack) for block in stack.blocks]
        sizes = [layout.shards * self._shard_of(block.parameters()) for block in blocks]
        # As they are gathered, padded to whole shards.
        self.n_blocks, self.block, self.in_blocks = len(blocks), max(sizes), sum(sizes)
        self.outside = layout.shards * self.own - self.in_blocks
        self.ema_bytes = FULL * self.own // layout.tensor if ema else 0
        self.beside_bytes = FULL * beside  # parameters of another model, such as a teacher
        self.momentum_bytes = 0  # of Muon, gathered
        self.optimizer_bytes, self.update_bytes = self._optimizer(optimizer)

    def _shard_of(self, weights: Iterable[nn.Parameter]) -> int:
        """Return the elements of the first shard of weights, which FSDP cuts by rows."""
        return sum(-(-len(weight) // self.layout.shards) * (weight.numel() // len(weight)) for weight in weights)

    def _optimizer(self, choice: Optimizer) -> tuple[int, int]:
        """Return the bytes of the optimizer's state on this GPU, and what an update allocates."""
        state = 2 * FULL * self.own_trained // self.layout.tensor
        if not isinstance(choice, Muon):
            return state, 0
        matrices = [weight for weight in block_matrices(self.model) if weight.requires_grad]
        inside = self._shard_of(matrices)
        counts = Counter((weight.shape, weight.numel()) for weight in matrices)
        at_once = max(size * min(count, max(1, STACKED // size)) for (_, size), count in counts.items())
        self.momentum_bytes = FULL * inside * self.layout.shards
        return state - FULL * inside // self.layout.tensor, MUON_BYTES * at_once

    def at(self, rows: int, seq_len: int, grad_accum: int = 1) -> StepMemory:
        """Return the peak of a step with micro-batches of `rows` sequences."""
        moments = (self._alone if self.layout.gpus == 1 else self._sharded)(rows * seq_len, grad_accum)
        kept = {"optimizer": self.optimizer_bytes, "ema": self.ema_bytes, "objective": self.beside_bytes}
        moment = max(moments, key=lambda name: sum(moments[name].values()))
        parts = {"weights": moments[moment].pop("weights"), **kept, **moments[moment]}
        return StepMemory({part: size for part, size in parts.items() if size}, moment)

    def _alone(self, n_tokens: int, grad_accum: int) -> dict[str, Parts]:
        """Return what one GPU has at each moment: with bfloat16 copies of float32 weights and gradients."""
        weights = (FULL + self.itemsize if self.low else FULL) * self.n_parameters + self.quantized_bytes
        gradients, low = FULL * self.n_trained, self.itemsize * self.n_trained if self.low else 0
        accumulated = gradients if grad_accum > 1 else 0
        head = self.itemsize * self.model.spec.vocab_size * self.model.spec.d_model
        moments: dict[str, Parts] = {
            "the loss": {"gradients": accumulated, **self._loss(n_tokens)},
            "the start of the backward pass": {"gradients": accumulated + head, **self._backward(n_tokens)},
            "the end of the backward pass": {"gradients": gradients + low},
            "the update": {"gradients": gradients, "working": self.update_bytes},
        }
        return {name: {"weights": weights, **parts} for name, parts in moments.items()}

    def _sharded(self, n_tokens: int, grad_accum: int) -> dict[str, Parts]:
        """Return what a GPU has under FSDP: its shards, gathered weights, and gradients that are being reduced."""
        tensor = self.layout.tensor
        shard, outside = FULL * self.own // tensor + self.quantized_bytes, self.itemsize * self.outside // tensor
        # One block computes while the next is gathered; a replica keeps all. What is outside the blocks stays.
        block = (2 * self.block if self.layout.shards > 1 else self.in_blocks) * self.itemsize // tensor
        weights = {"weights": shard + outside + block}
        own = FULL * self.own_trained // tensor
        # The gradients of micro-batches are summed unsharded, and reduced with the last.
        accumulated = FULL * self.n_trained // tensor if grad_accum > 1 else 0
        reduced = (self.itemsize + FULL) * self.block // tensor
        backward = self._backward(n_tokens)
        one_less = {**backward, "activations": backward["activations"] * (self.n_blocks - 1) // self.n_blocks}
        return {
            "the loss": {**weights, "gradients": accumulated, **self._loss(n_tokens)},
            "the start of the backward pass": {**weights, "gradients": accumulated, **backward},
            "the reduction of the last block": {**weights, "gradients": accumulated + reduced, **one_less},
            "the reduction of the first block": {**weights, "gradients": accumulated + reduced + own},
            "the end of the backward pass": {
                "weights": shard + outside,
                "gradients": accumulated + own + (self.itemsize + FULL) * self.outside // tensor,
            },
            "the update": {"weights": shard, "gradients": own, "working": self.update_bytes},
        }

    def _loss(self, n_tokens: int) -> Parts:
        logits = loss_bytes(self.model, n_tokens, self.itemsize, deferred=self.deferred, tensor=self.layout.tensor)
        return {"activations": n_tokens * self.activations.stored, "logits": logits}

    def _backward(self, n_tokens: int) -> Parts:
        kept = self.activations.stored + self.activations.recomputed
        working = n_tokens * self.activations.working + self.dequantized_bytes
        return {"activations": n_tokens * kept, "working": working}

    def largest_micro_batch(self, seq_len: int, limit: float, most: int, grad_accum: int = 2) -> int:
        """Return how many sequences at a time fit into `limit` bytes, at most `most`; 0 if none does."""
        low, high = 0, most
        while low < high:
            middle = (low + high + 1) // 2
            fits = self.at(middle, seq_len, grad_accum).peak <= limit
            low, high = (middle, high) if fits else (low, middle - 1)
        return low
