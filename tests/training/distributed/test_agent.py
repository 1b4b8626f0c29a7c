"""torchrun's agent is killed: its processes stop by themselves, with a checkpoint, and never go on alone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path

import processes
import pytest
from runs import losses

from glasshouse.training.checkpoint.store import Checkpoints
from glasshouse.training.distributed import failures as agent
from glasshouse.training.signals import Signals


def started_by_an_agent(ignores: bool, connection: Connection) -> None:
    """Be an agent that starts a process, which says that it watches, and is gone."""
    readable, writable = os.pipe()
    if os.fork():
        os.read(readable, 1)
        os._exit(0)
    agent.AGENT_POLL_SECONDS, agent.GRACE_SECONDS = 0.01, 0.1 if ignores else processes.SECONDS
    os.environ["TORCHELASTIC_RUN_ID"] = "none"
    with Signals() as signals, agent.watch_agent():
        if ignores:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.write(writable, b"!")
        while signals.received is None:
            time.sleep(0.01)
        connection.send(signals.received)


@pytest.mark.parametrize(("ignores", "sent"), [(False, [signal.SIGTERM]), (True, [])])
def test_a_process_whose_agent_is_gone_stops_or_ends(ignores: bool, sent: list[int]) -> None:
    with processes.started(started_by_an_agent, ignores) as (_, connection):
        assert list(processes.received(connection)) == sent  # until it has ended


def test_without_torchrun_nothing_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    monkeypatch.setattr(os, "getppid", lambda: pytest.fail("it was asked for"))
    with agent.watch_agent():
        pass


def is_alive(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="finds the processes in /proc")
@pytest.mark.parametrize("kind", ["replicate", "shard"])
def test_processes_of_a_killed_torchrun_save_and_end(kind: str, data_folder: Path) -> None:
    settings = {"data.path": data_folder / "a.txt", "data.vocab_size": 270, "data.seq_len": 16}
    settings |= {"model.d_model": 64, "model.n_layers": 1, "model.n_heads": 4, "model.n_kv_heads": 2}
    settings |= {"train.steps": 100_000, "train.batch_tokens": 64, "train.out": data_folder / "run"}
    settings |= {"train.parallel.kind": kind, "train.save_every": 100_000, "train.eval_every": 100_000}
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "-m", "glasshouse", "train"]
    started = subprocess.Popen(
        [*command, *(f"{name}={value}" for name, value in settings.items())],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    end = time.monotonic() + processes.SECONDS
    metrics = data_folder / "run" / "metrics.jsonl"
    while not metrics.exists() or metrics.read_text().count("\n") < 10:
        assert time.monotonic() < end
        assert started.poll() is None
        time.sleep(0.1)
    workers = Path(f"/proc/{started.pid}/task/{started.pid}/children").read_text().split()
    assert len(workers) == 2
    started.kill()
    started.wait()
    while any(map(is_alive, workers)):
        assert time.monotonic() < end
        time.sleep(0.1)
    assert Checkpoints(data_folder / "run" / "checkpoints").steps() == [max(losses(data_folder))]
