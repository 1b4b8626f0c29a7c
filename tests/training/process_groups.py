"""Training steps of small models in several gloo processes, and in one."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from datetime import timedelta
from pathlib import Path
from typing import Any

import processes as forks
import torch
from torch import Tensor
from torch import distributed as dist

import glasshouse as gh
from glasshouse.data import Batch, Batches
from glasshouse.training import optimizer as optimizers
from glasshouse.training.distributed import fsdp as parallel
from glasshouse.training.distributed.layout import Layout
from glasshouse.training.distributed.processes import Parallel, Processes, join_processes
from glasshouse.training.optimizer import AdamW, Muon, make_optimizer
from glasshouse.training.setup.model import checkpoint_activations
from glasshouse.training.step import ShardedTrainStep, TrainStep

VOCABULARY = 271  # which no number of processes divides
ROWS = 6
SECONDS = 1800  # the matrix of cases takes minutes
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "decoder": ("tiny-decoder", {"init": "normal"}),
    "seq2seq": ("tiny-seq2seq", {"dropout": 0.0, "embed_dropout": 0.0}),
    "encoder": ("tiny-encoder", {"dropout": 0.0, "embed_dropout": 0.0, "attention_dropout": 0.0}),
    "alibi": ("tiny-decoder", {"position": "alibi", "init": "normal", "qkv_bias": True, "ffn_bias": True}),
    "neox": (
        "tiny-decoder",
        {
            "position": {"kind": "rotary", "fraction": 0.5},
            "norm_placement": "parallel",
            "norm": "layer",
            "init": "normal",
            "qkv_bias": True,
            "logit_softcap": 0.1,
        },
    ),
    "value embeddings": ("tiny-decoder", {"value_embeddings": True, "init": "normal"}),
    "output norms": ("tiny-decoder", {"norm_placement": "output", "init": "normal"}),
    "t5": ("tiny-seq2seq", {"position": {"kind": "relative"}, "dropout": 0.0, "embed_dropout": 0.0}),
}


@dataclass(frozen=True)
class Case:
    """A few training steps."""

    model: str = "decoder"
    optimizer: str = "adamw"
    kind: str = "shard"
    tensor: int = 1
    dtype: str = "float32"
    grad_accum: int = 1
    activation_checkpointing: bool = False
    steps: int = 1
    smoothing: float = 0.0
    precision: str = "float32"  # of matrix products

    def __str__(self) -> str:
        values = ((field.name, getattr(self, field.name), field.default) for field in fields(self))
        changed = [f"{name}={value}" for name, value, default in values if value != default]
        return ", ".join(changed) or "defaults"

    @property
    def reference(self) -> Case:
        """The same steps in one process, with one micro-batch."""
        return Case(
            self.model,
            self.optimizer,
            dtype=self.dtype,
            steps=self.steps,
            smoothing=self.smoothing,
            precision=self.precision,
        )


@dataclass(frozen=True)
class Outcome:
    """What the steps computed, whole: the losses, the gradients of the first step, and the weights after the last."""

    losses: list[float]
    norms: list[float]
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]


class Samples:
    """Random ids of every length, as pure functions of the index."""

    def __init__(self, with_source: bool) -> None:
        self.with_source = with_source

    def __len__(self) -> int:
        return 10**6

    def batch(self, indices: Sequence[int]) -> Batch:
        """Return the samples with these indices."""
        rows = [torch.Generator().manual_seed(index) for index in indices]
        ids = torch.stack([torch.randint(0, VOCABULARY, (3, 12), generator=row) for row in rows])
        lengths = torch.stack([torch.randint(3, 13, (2,), generator=row) for row in rows])
        real = torch.arange(12) < lengths[:, :1]
        source = {"source": ids[:, 2], "source_lengths": lengths[:, 1]} if self.with_source else {}
        return Batch(ids[:, 0], ids[:, 1], real & (ids[:, 0] % 3 > 0), lengths=lengths[:, 0], **source)

    def origin(self, index: int) -> str:
        """Describe a sample."""
        return f"sample {index}"


def run(case: Case, processes: Processes) -> Outcome:
    """Run the steps of a case, sharded if there are several processes."""
    optimizers.compute_dtype = lambda device: torch.float32  # of Newton-Schulz, on every machine
    torch.manual_seed(5)
    preset, fields = MODELS[case.model]
    cpu, dtype, precision = torch.device("cpu"), getattr(torch, case.dtype), getattr(torch, case.precision)
    s = gh.preset(preset, vocab_size=VOCABULARY, **fields)
    model = gh.build(s, device="meta" if processes.is_parallel else cpu, dtype=dtype)
    if case.activation_checkpointing:
        for name, module in model.named_modules():
            if name.rpartition(".")[0].endswith("blocks"):
                checkpoint_activations(module)
    if processes.is_parallel:
        choice = Parallel(kind=case.kind, tensor=case.tensor)  # type: ignore[arg-type]
        parallel.parallelize(model, choice, processes, cpu, precision)
    optimizer = make_optimizer(model, {"adamw": AdamW(), "muon": Muon()}[case.optimizer])
    make_step = ShardedTrainStep if processes.is_parallel else TrainStep
    step = make_step(
        model,
        optimizer,
        reduce=processes.sum,
        grad_clip=None if case.steps == 1 else 0.5,
        label_smoothing=case.smoothing,
        precision=precision,
        defer_logits=True,
    )
    share = {"rank": processes.data_rank, "world_size": processes.data_size}
    batches = Batches(Samples(model.spec.kind == "seq2seq"), ROWS, **share)
    losses, norms, gradients = [], [], {}
    for number in range(case.steps):
        metrics = step(batches.at(number), case.grad_accum)
        losses.append(metrics.loss)
        norms.append(metrics.grad_norm)
        if number == 0:
            with_grad = ((name, weight.grad) for name, weight in model.named_parameters())
            gradients = {name: parallel.whole(grad).clone() for name, grad in with_grad if grad is not None}
    weights = {name: parallel.whole(weight.detach()) for name, weight in model.named_parameters()}
    return Outcome(losses, norms, gradients, weights)


def in_processes(
    folder: Path, world_size: int, work: Callable[..., object], *arguments: object, local: int | None = None
) -> list[Any]:
    """Call a function of a module in several processes, and return what each returned; `local` of them per node.

    It is called with the rank, the number of processes and the arguments, and may use `join_processes`.
    """
    started = [
        forks.FORKS.Process(
            target=_process, args=(folder, rank, world_size, local or world_size, work, arguments), daemon=True
        )
        for rank in range(world_size)
    ]
    for one in started:
        one.start()
    for one in started:
        one.join(SECONDS)
        one.kill()
    failed = [rank for rank, one in enumerate(started) if one.exitcode]
    assert not failed, f"processes {failed} failed"
    # Written by the processes above, so a pickle is safe here; the package itself reads none.
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(world_size)]


def _process(
    folder: Path,
    rank: int,
    world_size: int,
    local: int,
    work: Callable[..., object],
    arguments: Any,  # noqa: ANN401
) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(local)}
    forks.set_numerics()
    where, limit = f"file://{folder}/rendezvous", timedelta(minutes=10)
    dist.init_process_group("gloo", where, rank=rank, world_size=world_size, timeout=limit)
    # Of each layout one mesh, for all cases: a process group has threads, and DTensor remembers old ones.
    meshes: dict[object, Any] = {}
    make_mesh, new_group = parallel.make_mesh, functools.cache(dist.new_group)

    def make_mesh_once(layout: Layout, device: torch.device) -> Any:  # noqa: ANN401
        shape = (layout.replicas, layout.shards, layout.tensor)
        if shape not in meshes:
            meshes[shape] = make_mesh(layout, device)
        return meshes[shape]

    parallel.make_mesh, dist.new_group = make_mesh_once, new_group
    torch.save(work(rank, world_size, *arguments), folder / f"{rank}.pt")
    dist.destroy_process_group()


def run_cases(rank: int, world_size: int, cases: Sequence[Case]) -> dict[Case, Outcome] | None:
    """Run cases one after the other; the first process returns what they computed."""
    outcomes = {}
    for case in cases:
        with join_processes(Parallel(kind=case.kind, tensor=case.tensor), torch.device("cpu")) as (group, _):  # type: ignore[arg-type]
            outcomes[case] = run(case, group)
    return outcomes if rank == 0 else None
