"""A sharded model on one CUDA device, with NCCL: what one process can show of it."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest
import torch

import glasshouse as gh
from glasshouse.data import Batch
from glasshouse.training.distributed.fsdp import parallelize
from glasshouse.training.distributed.processes import Parallel, Processes, join_processes
from glasshouse.training.optimizer import AdamW, Muon, make_optimizer
from glasshouse.training.step import NonFiniteError, ShardedTrainStep, TrainStep

DEVICE = torch.device("cuda", 0)


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Processes]:
    """A process group of this process alone."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    settings = {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    with join_processes(Parallel(kind="shard"), DEVICE) as (found, device):
        assert device == DEVICE
        yield found


def make(choice: AdamW | Muon, precision: torch.dtype, processes: Processes | None) -> TrainStep:
    torch.manual_seed(0)
    model = gh.build(gh.preset("tiny-decoder", init="normal"), device="meta" if processes else DEVICE)
    if processes is None:
        return TrainStep(model, make_optimizer(model, choice), precision=precision, defer_logits=True)
    parallelize(model, Parallel(kind="shard"), processes, DEVICE, precision)
    optimizer = make_optimizer(model, choice)
    return ShardedTrainStep(model, optimizer, precision=precision, reduce=processes.sum, defer_logits=True)


def batches(count: int) -> list[Batch]:
    source = torch.Generator().manual_seed(0)
    drawn = (torch.randint(256, (8, 33), generator=source) for _ in range(count))
    return [Batch(ids[:, :-1], ids[:, 1:], torch.ones(8, 32, dtype=torch.bool)) for ids in drawn]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("choice", [AdamW(lr=3e-3), Muon()])
@pytest.mark.parametrize(("precision", "tolerance"), [(torch.float32, 1e-3), (torch.bfloat16, 0.03)])
def test_a_sharded_model_trains_as_a_plain_one(
    choice: AdamW | Muon, precision: torch.dtype, tolerance: float, compiled: bool, processes: Processes
) -> None:
    results = []
    for group in (None, processes):
        step = make(choice, precision, group)
        if compiled:
            step.compile()
        results.append([step(batch, 2).loss for batch in batches(4) * 4])
        assert step.compiled == compiled
    assert results[1] == pytest.approx(results[0], rel=tolerance)


@pytest.mark.parametrize("choice", [AdamW(lr=3e-3), Muon()])
def test_no_step_updates_the_weights_after_a_nonfinite_one(choice: AdamW | Muon, processes: Processes) -> None:
    step = make(choice, torch.bfloat16, processes)
    assert step.runs_ahead
    step(batches(1)[0])
    before = {name: weight.detach().clone() for name, weight in step.model.named_parameters()}
    own, step.loss_fn = step.loss_fn, lambda *call: own(*call) * torch.nan
    future = step.launch(batches(1)[0])
    step.loss_fn = own
    step.launch(batches(1)[0])  # before the result of the other is read
    with pytest.raises(NonFiniteError):
        future.result()
    for name, weight in step.model.named_parameters():
        assert torch.equal(weight.to_local(), before[name].to_local()), name  # type: ignore[operator]
