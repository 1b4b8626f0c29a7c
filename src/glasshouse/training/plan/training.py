"""The plan of a training run: memory, parallel layout, communication, time and cost, before it starts."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch

from glasshouse.config import require
from glasshouse.errors import InputError
from glasshouse.layers.linear.frozen_quantized import count_weights
from glasshouse.models import Model
from glasshouse.objectives import Objective
from glasshouse.spec import Seq2SeqSpec
from glasshouse.training.distributed.layout import Layout, choose_layout
from glasshouse.training.plan.hardware import Gpu
from glasshouse.training.plan.memory import MemoryModel, StepMemory
from glasshouse.training.plan.speed import TokenFlops, Traffic, compute_seconds, step_traffic, token_flops
from glasshouse.training.run import Run, Train
from glasshouse.training.setup.model import make_meta_model

USABLE = 0.88  # of a GPU's memory; the CUDA context and the allocator's gaps take the rest


@dataclass(frozen=True)
class MicroBatch:
    """A step of the run in micro-batches of some size."""

    rows: int  # sequences of a micro-batch, per GPU
    grad_accum: int
    memory: int  # bytes at the peak
    tokens_per_second: float  # on all GPUs


@dataclass(frozen=True)
class TrainingPlan:
    """The cost of a run in bytes, seconds and FLOPs, per GPU unless noted otherwise."""

    gpu: Gpu
    layout: Layout
    n_parameters: int
    n_trained: int
    flops_per_token: TokenFlops
    batch_tokens: int  # of a step, on all GPUs
    rows: int  # sequences of a micro-batch
    grad_accum: int
    largest_rows: int  # the most sequences of a micro-batch that fit
    micro_batches: tuple[MicroBatch, ...]  # from one sequence to twice what fits, or the whole batch of a GPU
    memory: StepMemory
    usable_memory: int
    traffic: Traffic
    compute_seconds: float  # of a step
    traffic_seconds: float  # of a step, hidden behind computation as far as it goes
    step_seconds: float
    mfu: float
    steps: int | None  # None: from epochs, which only the data tell
    price: float | None  # per GPU and hour
    kv_bytes: dict[str, int]  # per token, of the KV cache, by kind of attention

    @property
    def fits(self) -> bool:
        """Whether a micro-batch of one sequence fits."""
        return self.largest_rows > 0

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second, on all GPUs."""
        return self.batch_tokens / self.step_seconds

    @property
    def days(self) -> float | None:
        """Days of the whole run."""
        return None if self.steps is None else self.steps * self.step_seconds / 86_400

    @property
    def cost(self) -> float | None:
        """The price of all GPUs for the whole run."""
        if self.days is None or self.price is None:
            return None
        return self.days * 24 * self.layout.gpus * self.price

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as JSON values."""
        derived = {
            "fits": self.fits,
            "tokens_per_second": self.tokens_per_second,
            "days": self.days,
            "cost": self.cost,
        }
        totals = {"memory": {**asdict(self.memory), "peak": self.memory.peak}}
        totals["traffic"] = {**asdict(self.traffic), "total": self.traffic.total}
        return {**asdict(self), **totals, "gpus": self.layout.gpus, **derived}


def plan_training(
    run: Run,
    gpu: Gpu,
    gpus: int = 1,
    *,
    per_node: int = 8,
    mfu: float | None = None,
    price: float | None = None,
) -> TrainingPlan:
    """Plan a run; its MFU is estimated from the speeds of the GPU, or stated.

    >>> from glasshouse.training.plan.hardware import find_gpu
    >>> plan = plan_training(Run.load("stdlib"), find_gpu("h200"))
    >>> plan.layout.kind, plan.rows, plan.grad_accum, plan.fits
    ('replicate', 16, 1, True)
    """
    require(mfu is None or 0 < mfu <= 1, "mfu", mfu, "above 0 and at most 1")
    require(price is None or price >= 0, "price", price, "0 or more")
    model, choice, seq_len = make_meta_model(run), run.train, run.data.seq_len
    total = count_weights(model)
    spread = choice.parallel
    layout = choose_layout(spread.kind, gpus, per_node, spread.tensor, total, gpu.memory)
    all_rows = max(1, choice.batch_tokens // seq_len)
    if all_rows < layout.data_parallel:
        raise InputError(
            f"train.batch_tokens is {choice.batch_tokens}, which is {all_rows} sequences of {seq_len} tokens, but "
            f"{layout.data_parallel} GPUs need one each; use fewer GPUs or larger batches."
        )
    own_rows = -(-all_rows // layout.data_parallel)
    precision = torch.bfloat16 if choice.precision in ("auto", "fp8") else getattr(torch, choice.precision)
    memory = run_memory(model, choice, precision, layout, choice.objective)
    usable = int(USABLE * gpu.memory)
    grad_accum = choice.grad_accum or choose_grad_accum(memory, own_rows, seq_len, usable)
    rows = -(-own_rows // grad_accum)
    flops = token_flops(model, seq_len)
    tokens = all_rows * seq_len
    ideal = tokens * flops.total / (gpus * gpu.flops)

    def step_of(rows: int, grad_accum: int) -> tuple[Traffic, float, float, float]:
        """Return the traffic of a step, the seconds of computing and of traffic, and of both together."""
        traffic = step_traffic(
            layout,
            in_blocks=memory.in_blocks,
            outside=memory.outside,
            itemsize=memory.itemsize,
            grad_accum=grad_accum,
            momentum=memory.momentum_bytes,
            # two sums in the forward and two in the backward pass of a block
            activations=4 * memory.n_blocks * rows * grad_accum * seq_len * model.spec.d_model * memory.itemsize,
        )
        hidden, exposed = traffic.seconds(layout, gpu)
        computing = compute_seconds(memory, gpu, rows=rows, seq_len=seq_len, grad_accum=grad_accum)
        return traffic, computing, hidden + exposed, max(computing, hidden) + exposed

    def micro_batch(rows: int) -> MicroBatch:
        accum = -(-own_rows // rows)
        seconds = step_of(rows, accum)[-1]
        return MicroBatch(rows, accum, memory.at(rows, seq_len, accum).peak, tokens / seconds)

    traffic, computing, communicating, estimated = step_of(rows, grad_accum)
    step = estimated if mfu is None else ideal / mfu
    largest = memory.largest_micro_batch(seq_len, usable, most=2**20, grad_accum=grad_accum)
    sizes = {2**power for power in range(own_rows.bit_length())} | {rows, own_rows}
    sizes = {size for size in sizes if size <= max(rows, 2 * largest)}
    return TrainingPlan(
        gpu=gpu,
        layout=layout,
        n_parameters=total,
        n_trained=memory.n_trained,
        flops_per_token=flops,
        batch_tokens=tokens,
        rows=rows,
        grad_accum=grad_accum,
        largest_rows=largest,
        micro_batches=tuple(map(micro_batch, sorted(sizes))),
        memory=memory.at(rows, seq_len, grad_accum),
        usable_memory=usable,
        traffic=traffic,
        compute_seconds=computing,
        traffic_seconds=communicating,
        step_seconds=step,
        mfu=ideal / step,
        steps=choice.steps,
        price=price,
        kv_bytes=kv_bytes_per_token(model.spec.n_layers, model.spec.n_heads, model.spec.n_kv_heads, model.spec.d_head)
        if not isinstance(model.spec, Seq2SeqSpec)
        else {},
    )


def run_memory(
    model: Model, choice: Train, precision: torch.dtype, layout: Layout, objective: Objective[Any] | None = None
) -> MemoryModel:
    """Return the memory of the steps of a run; `objective` is one that was chosen for it."""
    return MemoryModel(
        model,
        choice.chosen_optimizer(),
        precision=precision,
        checkpointing=choice.activation_checkpointing,
        ema=bool(choice.ema),
        beside=0 if objective is None else objective.extra_parameters(model),
        whole_logits=objective is not None and type(objective).loss is not Objective.loss,
        layout=layout,
    )


def choose_grad_accum(memory: MemoryModel, rows: int, seq_len: int, limit: float) -> int:
    """Return the fewest micro-batches of `rows` sequences that fit into `limit` bytes; of one each, if none do."""
    if memory.at(rows, seq_len).peak <= limit:
        return 1
    return -(-rows // max(1, memory.largest_micro_batch(seq_len, limit, most=rows)))


def kv_bytes_per_token(
    n_layers: int, n_heads: int, n_kv_heads: int, d_head: int, itemsize: int = 2
) -> dict[str, int]:
    """Return the size of the KV cache per token with a key and a value per head, per group of heads, and one for all.

    >>> kv_bytes_per_token(n_layers=16, n_heads=32, n_kv_heads=8, d_head=64)
    {'multi-head': 131072, 'grouped-query (8)': 32768, 'multi-query': 4096}
    """
    each = 2 * n_layers * d_head * itemsize
    sizes = {"multi-head": n_heads * each}
    if 1 < n_kv_heads < n_heads:
        sizes[f"grouped-query ({n_kv_heads})"] = n_kv_heads * each
    return {**sizes, "multi-query": each}
