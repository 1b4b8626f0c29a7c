"""The process group of a run: rendezvous, ranks and collectives; a single process needs none."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor
from torch import distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from glasshouse.config import Settings, require
from glasshouse.errors import ConfigError

T = TypeVar("T")
CONNECT = timedelta(seconds=60)  # for all processes to connect
PATIENCE = timedelta(days=7)  # timeout while rank 0 prepares data or evaluates
LIMIT = timedelta(minutes=30)  # for all processes to start
POLL_SECONDS = 0.02  # while they do


@dataclass(frozen=True)
class Parallel(Settings):
    """How a model is spread over the processes of torchrun; none of it changes what is computed.

    >>> Parallel(tensor=0)
    Traceback (most recent call last):
    ...
    glasshouse.errors.ConfigError: parallel.tensor is 0, but it must be at least 1.
    """

    # data parallelism: a replica in every process, shards over all of them (FSDP), or shards inside a node and
    # replicas across nodes; auto: the fewest shards with which weights, gradients and optimizer state fit in memory
    kind: Literal["auto", "replicate", "shard", "hybrid"] = "auto"  # type: ignore[misc]
    tensor: int = 1  # [processes] that share the matrices of every layer (tensor parallelism); divides their number

    def check(self) -> None:
        require(self.tensor >= 1, "parallel.tensor", self.tensor, "at least 1")


@dataclass(frozen=True)
class Processes:
    """The processes of a run, seen from this one.

    >>> one = Processes()
    >>> one.is_main, one.is_parallel, one.sum(torch.tensor(3))
    (True, False, tensor(3))
    """

    rank: int = 0
    world_size: int = 1
    local_world_size: int = 1  # processes on this node
    tensor: int = 1  # size of a tensor-parallel group: neighbouring ranks that share every batch
    is_parallel: bool = False  # whether there is a process group: a model is then sharded, even over one process
    _patient: dist.ProcessGroup | None = field(default=None, repr=False)  # over the CPU, for waits without a limit

    @property
    def is_main(self) -> bool:
        """Whether this process writes the run folder and shows progress."""
        return self.rank == 0

    @property
    def data_rank(self) -> int:
        """Which share of every batch this process takes."""
        return self.rank // self.tensor

    @property
    def data_size(self) -> int:
        """Into how many shares every batch is split."""
        return self.world_size // self.tensor

    def sum(self, values: Tensor) -> Tensor:
        """Return the sum over the shares of a batch; the same bits in every process."""
        if not self.is_parallel:
            return values
        total = values.clone()
        dist.all_reduce(total)
        if self.tensor == 1:
            return total
        return total / self.tensor if total.is_floating_point() else total // self.tensor

    def max(self, value: int) -> int:
        """Return the largest of the processes' values."""
        if not self.is_parallel:
            return value
        largest = torch.tensor(value)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        return int(largest)

    def agree(self, n_targets: int, signal: int) -> tuple[int, int]:
        """Return the targets of a step over all shares of its batch, and the largest signal: one collective for both.

        >>> Processes().agree(5, 0)
        (5, 0)
        """
        if not self.is_parallel:
            return n_targets, signal
        found = torch.empty(self.world_size, 2, dtype=torch.long)
        dist.all_gather_into_tensor(found, torch.tensor([[n_targets, signal]]))
        return int(found[:, 0].sum()) // self.tensor, int(found[:, 1].max())

    def gather(self, value: T) -> list[T]:
        """Return the values of all processes, by rank."""
        if not self.is_parallel:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self._patient)
        return values

    def with_own_group(self) -> Processes:
        """Return the same processes with a group of their own, for a thread; all processes must call this."""
        return replace(self, _patient=_patient_group()) if self.is_parallel else self

    def wait(self) -> None:
        """Wait until every process is here, however long it takes."""
        if self.is_parallel:
            dist.barrier(group=self._patient)

    @contextmanager
    def main_first(self) -> Iterator[None]:
        """Let the main process run the block before the others do, which find what it left on disk."""
        if not self.is_main:
            self.wait()
        yield
        if self.is_main:
            self.wait()

    def seed_step(self, seed: int, step: int) -> None:
        """Seed the dropout of a step, by its number and the share of the batch; a single process is not reseeded.

        A resumed run so draws what an uninterrupted one does, as long as the number of processes is the same.
        """
        if self.is_parallel:
            torch.manual_seed(((seed * 2**24 + step) * 2**16 + self.data_rank) % 2**63)


def is_main_process() -> bool:
    """Whether this is rank 0, or a process that was started without torchrun.

    >>> is_main_process()
    True
    """
    return os.environ.get("RANK", "0") == "0"


@contextmanager
def join_processes(choice: Parallel, device: torch.device) -> Iterator[tuple[Processes, torch.device]]:
    """Join the processes that torchrun started; yield them and the device of this one.

    A process started without torchrun, or as its only one and with nothing to shard, needs no group.
    """
    world_size = int(os.environ["WORLD_SIZE"]) if "RANK" in os.environ and "WORLD_SIZE" in os.environ else 0
    if world_size == 0 or (world_size == 1 and choice.kind == "auto"):
        _check_tensor(choice, 1)
        yield Processes(), device
        return
    _check_tensor(choice, world_size)
    local = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    elif device.type != "cpu":
        raise ConfigError(f"train.device is {device.type}, but several processes train on cuda or cpu; choose one.")
    is_ours = not dist.is_initialized()
    if is_ours:
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, **init_arguments())
    try:
        yield Processes(dist.get_rank(), world_size, local, choice.tensor, True, _patient_group()), device
    finally:
        if is_ours:
            dist.destroy_process_group()


def _patient_group() -> dist.ProcessGroup:
    """Return a gloo group that must connect within `CONNECT`, and whose collectives may wait for days."""
    group = dist.new_group(backend="gloo", timeout=CONNECT)
    dist.distributed_c10d._set_pg_timeout(PATIENCE, group)
    return group


def _check_tensor(choice: Parallel, world_size: int) -> None:
    if world_size % choice.tensor:
        raise ConfigError(
            f"train.parallel.tensor is {choice.tensor}, but it must divide the number of processes, {world_size}; "
            "start a multiple of it with torchrun."
        )


def init_arguments() -> dict[str, Any]:
    """Return the arguments of `dist.init_process_group` for a rendezvous with the same restart attempt only."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return {}
    store, rank, world_size = next(rendezvous("env://", timeout=LIMIT))
    return {"store": attempt_store(store, rank, world_size), "rank": rank, "world_size": world_size}


def attempt_store(store: Store, rank: int, world_size: int) -> Store:
    """Return a view of a store that is empty at first, and the same for all processes that call this now.

    Every rank publishes a new token; rank 0 answers each with its own, until all have seen it. Tokens of earlier
    attempts are answered, too, but these answers are never read.

    >>> from torch.distributed import HashStore
    >>> store = HashStore()
    >>> store.set("joining/0", "of a process that was killed")
    >>> attempt_store(store, rank=0, world_size=1).set("a", "1")
    """
    token = uuid.uuid4().hex
    store.set(f"joining/{rank}", token)
    if rank:
        store.wait([f"answer/{token}"], LIMIT)
        answer = store.get(f"answer/{token}").decode()
        store.set(f"joined/{answer}/{rank}", "")
        return PrefixStore(f"attempt-{answer}", store)
    end, missing = time.monotonic() + LIMIT.total_seconds(), set(range(1, world_size))
    while missing:
        for other in sorted(missing):
            if store.check([f"joining/{other}"]):
                store.set(f"answer/{store.get(f'joining/{other}').decode()}", token)
        missing = {other for other in missing if not store.check([f"joined/{token}/{other}"])}
        if time.monotonic() > end:
            raise TimeoutError(f"ranks {sorted(missing)} have not started within {LIMIT}.")
        time.sleep(POLL_SECONDS)
    return PrefixStore(f"attempt-{token}", store)
