"""Time of a training step: matmuls, memory bandwidth, and communication between GPUs."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from glasshouse.models import Model, Seq2Seq
from glasshouse.models.flops import FlopEstimator
from glasshouse.models.heads import LMHead
from glasshouse.training.distributed.layout import Layout
from glasshouse.training.optimizer import Muon, Optimizer, block_matrices
from glasshouse.training.plan.hardware import Gpu
from glasshouse.training.plan.memory import MemoryModel

# Of a step of gpt2 on an H200 (docs/lab/training-gpu.md): matmuls reach 89% of a large one; attention, counted
# without its mask, half of it; the other kernels move the stored activations four times and the logits five times.
MATMUL_SHARE, ATTENTION_SHARE = 0.89, 0.5
UPDATE_SHARE = 0.62  # of Muon's products on llama-1b: symmetric ones are whole, and many matrices are small
ACTIVATION_PASSES, LOGIT_PASSES = 4, 5
ACCUMULATE_BYTES = 10  # per parameter and micro-batch: float32 sum read and written, bfloat16 gradient read
UPDATE_BYTES = 46  # per parameter and step: clipping 12, AdamW 28, the bfloat16 copy 6
RECOMPUTED = 1 / 3  # the forward pass is a third of the FLOPs; activation checkpointing repeats it
LAUNCH_SECONDS = 150e-6  # that the host needs, per block and micro-batch, to launch its kernels; an estimate


@dataclass(frozen=True)
class TokenFlops:
    """FLOPs of the forward and backward pass, per token."""

    matmul: float
    attention: float

    @property
    def total(self) -> float:
        """Both, as the MFU counts them."""
        return self.matmul + self.attention


def token_flops(model: Model, seq_len: int) -> TokenFlops:
    """Return the FLOPs per token of sequences of a length; in an encoder-decoder, of a target and a source token.

    >>> import glasshouse as gh
    >>> model = gh.build(gh.preset("gpt2"), device="meta")
    >>> token_flops(model, 1024).matmul == 6 * (12 * 12 * 768**2 + 50_257 * 768)
    True
    """
    ids = torch.empty(1, seq_len, dtype=torch.long, device="meta")
    source = ids if isinstance(model, Seq2Seq) else None
    estimator = FlopEstimator(model)
    attention = estimator.attention(ids, source)
    return TokenFlops((estimator(ids, source) - attention) / seq_len, attention / seq_len)


def compute_seconds(memory: MemoryModel, gpu: Gpu, *, rows: int, seq_len: int, grad_accum: int) -> float:
    """Return the seconds of the kernels of a step on one GPU, without communication."""
    model, layout = memory.model, memory.layout
    tokens = rows * seq_len * grad_accum
    flops = token_flops(model, seq_len)
    repeated = 1 + RECOMPUTED * memory.checkpointing
    share = tokens * repeated / layout.tensor / gpu.flops
    products = share * (flops.matmul / MATMUL_SHARE + flops.attention / ATTENTION_SHARE)
    stored = memory.activations.stored + memory.activations.recomputed * memory.n_blocks
    logits = model.spec.vocab_size * memory.itemsize // layout.tensor if isinstance(model.head, LMHead) else 0
    moved = tokens * (ACTIVATION_PASSES * repeated * stored + LOGIT_PASSES * logits)
    weights = memory.n_trained / layout.tensor
    moved += weights * (ACCUMULATE_BYTES * grad_accum + UPDATE_BYTES / layout.shards)
    # Of sharded matrices, every process computes the whole update of Muon.
    update = update_flops(model, memory.optimizer) / (UPDATE_SHARE * gpu.flops)
    return max(products + moved / gpu.bandwidth + update, LAUNCH_SECONDS * memory.n_blocks * grad_accum)


def update_flops(model: Model, optimizer: Optimizer) -> int:
    """Return the FLOPs of Muon's Newton-Schulz iterations over all matrices; AdamW has next to none.

    >>> import glasshouse as gh
    >>> update_flops(gh.build(gh.preset("tiny-decoder", n_layers=1)), Muon(ns_steps=1)) > 0
    True
    """
    if not isinstance(optimizer, Muon):
        return 0
    total = 0
    for weight in block_matrices(model):
        small, large = sorted(weight.shape)
        total += optimizer.ns_steps * (4 * small**2 * large + 2 * small**3)
    return total


@dataclass(frozen=True)
class Traffic:
    """Bytes that each GPU sends in a step, and as many that it receives, by collective."""

    all_gather: int = 0  # of weights, over the shards
    reduce_scatter: int = 0  # of gradients, over the shards
    all_reduce: int = 0  # of gradients, over the replicas
    tensor: int = 0  # all-reduces of activations, which no computation hides

    @property
    def total(self) -> int:
        """All of them."""
        return self.all_gather + self.reduce_scatter + self.all_reduce + self.tensor

    def seconds(self, layout: Layout, gpu: Gpu) -> tuple[float, float]:
        """Return how long the collectives take that computation can hide, and those that it cannot."""
        inside = layout.per_node // layout.tensor  # GPUs of a node with data of their own
        # What leaves a node does so through the adapters of all GPUs of the group in it, and its links pass it on.
        shards_rate = gpu.link if layout.shards <= inside else min(gpu.link, inside * gpu.network)
        together = max(1, inside // layout.shards)  # replicas in a node
        replicas_rate = gpu.link if layout.replicas <= together else min(gpu.link, together * gpu.network)
        over_shards = (self.all_gather + self.reduce_scatter) / shards_rate
        return over_shards + self.all_reduce / replicas_rate, self.tensor / gpu.link


def step_traffic(
    layout: Layout,
    *,
    in_blocks: int,
    outside: int,
    itemsize: int,
    grad_accum: int,
    activations: int = 0,
    momentum: int = 0,
) -> Traffic:
    """Return the traffic of a step, by rings: a GPU sends all shards of a tensor but one.

    Blocks are gathered for the forward and again for the backward pass of each micro-batch, what is `outside` once;
    gradients, in float32, are reduced with the last micro-batch. `activations` are the bytes, over all micro-batches
    of a step, that tensor parallelism sums; `momentum` is what Muon gathers, to orthogonalize whole
    matrices.

    >>> four = Layout("shard", shards=4)
    >>> step_traffic(four, in_blocks=1000, outside=200, itemsize=2, grad_accum=1)
    Traffic(all_gather=3300, reduce_scatter=3600, all_reduce=0, tensor=0)
    """
    shards, replicas, tensor = layout.shards, layout.replicas, layout.tensor
    gathered = grad_accum * itemsize * (2 * in_blocks + outside) // tensor + momentum
    gradients = 4 * (in_blocks + outside) // tensor
    return Traffic(
        all_gather=gathered * (shards - 1) // shards,
        reduce_scatter=gradients * (shards - 1) // shards,
        all_reduce=2 * gradients * (replicas - 1) // (shards * replicas),
        tensor=2 * activations * (tensor - 1) // tensor,
    )
