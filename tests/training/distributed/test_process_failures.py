"""One of several processes is killed or gets a signal: the others leave, and a resumed run equals a whole one."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import threading
import time
from collections.abc import Callable
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import processes
import pytest
import torch
from runs import assert_same, losses, table, write_data
from torch.distributed import HashStore

import glasshouse as gh
from glasshouse import device
from glasshouse.data import Batches
from glasshouse.training import Run, StoppedError, train
from glasshouse.training import trainer as loop
from glasshouse.training.checkpoint.store import Checkpoints
from glasshouse.training.distributed import failures as lost_process
from glasshouse.training.distributed import failures as stragglers
from glasshouse.training.distributed.failures import LostProcessError
from glasshouse.training.distributed.processes import attempt_store
from glasshouse.training.logging import plots

pytestmark = pytest.mark.slow

STEPS = 12


def settings_of(folder: Path, out: str = "run", **choices: Any) -> dict[str, Any]:  # noqa: ANN401
    settings = table(folder, out=out, parallel={"kind": "shard"}, **{"steps": STEPS, **choices})
    settings["train"] |= {"sample_prompts": 0, "grad_accum": 1}
    return settings


def prepare() -> None:
    """Leave out what takes time and is tested elsewhere."""
    device.measure_peak_flops = lambda *_, **__: 1e12
    plots.draw = lambda *_: []
    lost_process.SECONDS = 1.0


def at_step(step: int, act: Callable[[], object]) -> None:
    """Act when this process begins the step after this one."""
    real, begun = loop.set_lr, []

    def set_lr(optimizer: torch.optim.Optimizer, factor: float) -> None:
        begun.append(factor)
        if len(begun) == step + 1:
            act()
        real(optimizer, factor)

    loop.set_lr = set_lr


def run_rank(rank: int, settings: dict[str, Any]) -> None:
    prepare()
    train(Run.from_dict(settings), progress=False)


def run_in(count: int, folder: Path, settings: dict[str, Any], target: Callable[..., object] = run_rank) -> list[int]:
    return processes.run_ranks(target, count, folder / "rendezvous", settings)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted run of two processes."""
    folder = tmp_path_factory.mktemp("two")
    write_data(folder)
    assert run_in(2, folder, settings_of(folder, "whole")) == [0, 0]
    return folder


def put_whole(whole: Path, folder: Path) -> None:
    shutil.copytree(whole / "whole", folder / "whole")


# Signals


def stop_rank(rank: int, settings: dict[str, Any]) -> None:
    """One process gets SIGTERM after step 8; all must save that step or the next, and leave."""
    prepare()
    if rank == 1:
        at_step(8, lambda: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(StoppedError) as stopped:
        train(Run.from_dict(settings), progress=False)
    assert stopped.value.number == signal.SIGTERM
    assert stopped.value.step == 9


@pytest.mark.long
def test_a_signal_to_one_process_saves_in_all(whole: Path, data_folder: Path) -> None:
    settings = settings_of(data_folder)
    assert run_in(2, data_folder, settings, stop_rank) == [0, 0]
    assert Checkpoints(data_folder / "run" / "checkpoints").steps()[0] == 9
    assert run_in(2, data_folder, settings) == [0, 0]
    put_whole(whole, data_folder)
    assert_same(data_folder, "whole", "run")


@pytest.mark.long
@pytest.mark.parametrize("before", [2, 4])
def test_a_run_continues_in_one_process(before: int, data_folder: Path) -> None:
    """Without dropout; float32 rounds sums of other orders by 6e-8, which 12 steps amplify a hundredfold at most."""
    alone = settings_of(data_folder, "alone")
    settings = settings_of(data_folder)
    for one in (alone, settings):
        one["model"]["dropout"] = 0.0
    train(Run.from_dict(alone))
    assert run_in(before, data_folder, settings, stop_rank) == [0] * before
    train(Run.from_dict(settings))
    one, other = losses(data_folder, "alone"), losses(data_folder)
    assert one == pytest.approx(other, rel=1e-5)
    assert gh.load(data_folder / "run" / "model")[0].spec == gh.load(data_folder / "alone" / "model")[0].spec


# Kills


def survive(rank: int, settings: dict[str, Any]) -> None:
    """A process that is not killed says which one was."""
    prepare()
    with pytest.raises(LostProcessError, match=rf"rank {1 - rank} ended without .* so rank {rank} stops, too"):
        train(Run.from_dict(settings), progress=False)


def kill_at_random(source: random.Random, folder: Path) -> Callable[[list[ForkServerProcess]], None]:
    def kill(ranks: list[ForkServerProcess]) -> None:
        metrics = folder / "run" / "metrics.jsonl"
        while not metrics.exists():  # the model is being built
            time.sleep(0.01)
        time.sleep(source.uniform(0, 1.5))
        killed = source.choice(ranks)
        killed.kill()
        killed.join()
        for other in ranks:
            other.terminate()  # as torchrun does

    return kill


def check_kills(folder: Path, kills: int) -> None:
    source = random.Random(0)
    settings = settings_of(folder, steps=2000, save_every=2, eval_every=1000)
    for _ in range(kills):
        run_kill = kill_at_random(source, folder)
        codes = processes.run_ranks(survive, 2, folder / "rendezvous", settings, meanwhile=run_kill)
        # One that was still connecting ends by the signal, the others with an error.
        assert sorted(codes) in ([-signal.SIGKILL, 0], [-signal.SIGTERM, -signal.SIGKILL])
        found = Checkpoints(folder / "run" / "checkpoints").newest()
        assert found is None or found[2] == []  # none is damaged


@pytest.mark.long
def test_killed_at_random_and_resumed(data_folder: Path) -> None:
    check_kills(data_folder, 3)
    check_resumed_losses(data_folder)


@pytest.mark.long
def test_killed_twenty_times_at_random_and_resumed(data_folder: Path) -> None:
    check_kills(data_folder, 20)
    check_resumed_losses(data_folder)


def check_resumed_losses(folder: Path) -> None:
    """Compare the steps so far with those of an uninterrupted run."""
    found = losses(folder)
    settings = settings_of(folder, "again", steps=2000, save_every=1000, eval_every=1000)
    processes.run_ranks(stop_after, 2, folder / "rendezvous", settings, len(found))
    again = losses(folder, "again")
    assert {step: again[step] for step in found} == found


def stop_after(rank: int, settings: dict[str, Any], step: int) -> None:
    prepare()
    at_step(step, lambda: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(StoppedError):
        train(Run.from_dict(settings), progress=False)


# An error in one process


def fail_in_one(rank: int, settings: dict[str, Any]) -> None:
    prepare()
    if rank == 1:
        at_step(8, lambda: 1 / 0)
    error = ZeroDivisionError if rank == 1 else LostProcessError
    with pytest.raises(error, match="division by zero" if rank == 1 else "rank 1 failed, .*: division by zero"):
        train(Run.from_dict(settings), progress=False)


def test_an_error_in_one_process_is_named_by_the_others(data_folder: Path) -> None:
    assert run_in(2, data_folder, settings_of(data_folder), fail_in_one) == [0, 0]


# Restarts by torchrun


def run_by_agent(settings: dict[str, Any]) -> None:
    """Train under torchrun's agent; at the first attempt one process is killed after step 8."""
    prepare()
    processes.set_numerics()
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and os.environ["RANK"] == "1":
        at_step(8, lambda: os.kill(os.getpid(), signal.SIGKILL))
    train(Run.from_dict(settings), progress=False)


@pytest.mark.long
def test_torchrun_restarts_and_resumes(whole: Path, data_folder: Path) -> None:
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    choice = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=2,
        max_restarts=1,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        start_method="forkserver",
        monitor_interval=0.1,
    )
    elastic_launch(choice, run_by_agent)(settings_of(data_folder))
    put_whole(whole, data_folder)
    assert_same(data_folder, "whole", "run")


def test_a_restarted_attempt_does_not_see_the_keys_of_the_one_before() -> None:
    store = HashStore()
    for attempt in range(3):
        stores: dict[int, Any] = {}

        def join(rank: int, stores: dict[int, Any] = stores) -> None:
            stores[rank] = attempt_store(store, rank, 3)

        threads = [threading.Thread(target=join, args=(rank,)) for rank in (2, 1, 0)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not stores[0].check(["address"])
        stores[0].set("address", str(attempt))
        assert stores[2].get("address") == str(attempt).encode()


# A slow process


def run_with_a_slow_one(rank: int, settings: dict[str, Any]) -> None:
    """The second process waits for its data in every step."""
    prepare()
    stragglers.EVERY = 5
    if rank == 1:
        real = Batches.at

        def at(batches: Batches, step: int) -> gh.data.Batch:
            time.sleep(0.3)  # steps take some hundredths of a second
            return real(batches, step)

        Batches.at = at  # type: ignore[method-assign]
    train(Run.from_dict(settings), progress=False)


@pytest.mark.long
def test_a_straggler_is_named_in_the_metrics(data_folder: Path) -> None:
    settings = settings_of(data_folder, steps=10, save_every=100, eval_every=100, workers=0)
    assert run_in(2, data_folder, settings, run_with_a_slow_one) == [0, 0]
    lines = [json.loads(line) for line in (data_folder / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line.get("straggler") for line in lines] == [None] * 4 + [1] * 6
