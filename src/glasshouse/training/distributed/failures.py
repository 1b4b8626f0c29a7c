"""Failed and slow ranks: which rank failed first and why, a killed torchrun agent, stragglers."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from torch import distributed as dist

from glasshouse.errors import GlasshouseError
from glasshouse.training.distributed.processes import Processes
from glasshouse.training.signals import StoppedError

SECONDS = 5.0  # to wait for the other ranks to publish their reasons
POLL_SECONDS = 0.05
AGENT_POLL_SECONDS = 1.0
GRACE_SECONDS = 600.0  # after the death of torchrun's agent, for the current step and its checkpoint
EVERY = 100  # steps between two comparisons of how long ranks waited
SHARE = 0.1  # of the time that the others wait for a rank before it is reported as a straggler


class LostProcessError(GlasshouseError):
    """Another rank of the run failed or was killed."""


@contextmanager
def watched(processes: Processes) -> Iterator[None]:
    """Replace the error of a closed connection by one that names the rank that failed first, and its reason."""
    try:
        yield
    except StoppedError as stopped:
        _leave_word(processes, f"{int(stopped.number)}")
        raise
    except Exception as error:
        if not processes.is_parallel or not _is_of_connection(error):
            _leave_word(processes, str(error).partition("\n")[0][:500] or type(error).__name__)
            raise
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # from torchrun: it would kill this rank before it reports
        raise _explain(processes) from error


def _is_of_connection(error: Exception) -> bool:
    return isinstance(error, RuntimeError) and (isinstance(error, dist.DistError) or "gloo" in str(error))


def _leave_word(processes: Processes, reason: str) -> None:
    """Publish why this rank exits in the rendezvous store, which torchrun or rank 0 hosts."""
    if processes.is_parallel:
        try:
            dist.distributed_c10d._get_default_store().set(f"leaving/{processes.rank}", reason)
        except RuntimeError:  # the store is gone
            return


def _explain(processes: Processes) -> Exception:
    """Wait for the reasons of the other ranks, and return the error to raise; a rank without a reason was killed."""
    _leave_word(processes, "")
    others = [rank for rank in range(processes.world_size) if rank != processes.rank]
    end, reasons = time.monotonic() + SECONDS, dict[int, str]()
    try:
        store = dist.distributed_c10d._get_default_store()
        while len(reasons) < len(others) and time.monotonic() < end:
            for rank in others:
                if rank not in reasons and store.check([f"leaving/{rank}"]):
                    reasons[rank] = store.get(f"leaving/{rank}").decode()
            time.sleep(POLL_SECONDS)
    except RuntimeError:
        reasons = {rank: "" for rank in others if rank != 0}  # rank 0 hosts the store
    for rank, reason in reasons.items():
        if reason.isdecimal():
            return StoppedError(int(reason))
        if reason:
            return LostProcessError(f"rank {rank} failed, so rank {processes.rank} stops, too: {reason}")
    gone = [str(rank) for rank in others if rank not in reasons]
    named = f"rank{'s' * (len(gone) > 1)} {', '.join(gone)}" if gone else "the connection to another rank"
    return LostProcessError(
        f"{named} ended without a message (killed, or out of memory), so rank {processes.rank} stops, too; the same "
        "command resumes from the last checkpoint."
    )


@contextmanager
def watch_agent() -> Iterator[None]:
    """Send this process SIGTERM when its torchrun agent is killed; exit if that has no effect in `GRACE_SECONDS`.

    All ranks stop at the same step on a signal, and torchrun itself sends SIGTERM when it is stopped. A killed agent
    is detected by the change of the parent process id.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        yield
        return
    agent, ended = os.getppid(), threading.Event()

    def watch() -> None:
        while os.getppid() == agent:
            if ended.wait(AGENT_POLL_SECONDS):
                return
        os.kill(os.getpid(), signal.SIGTERM)
        if not ended.wait(GRACE_SECONDS):
            os._exit(128 + signal.SIGTERM)

    thread = threading.Thread(target=watch, name="agent", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


class Stragglers:
    """Compares every `EVERY` steps how long each rank waited for the others; a straggler waits least."""

    def __init__(self, processes: Processes, log: Callable[[str], None]) -> None:
        self.processes, self.log = processes, log
        self.rank: int | None = None  # of the straggler that was found last, if there is one
        self._waited, self._steps, self._since, self._excluded = 0.0, 0, time.monotonic(), False

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Measure how long this process waits for the others, once per step."""
        start = time.monotonic()
        yield
        self._waited += 0.0 if self._excluded else time.monotonic() - start
        self._steps, self._excluded = self._steps + 1, False
        if self._steps == EVERY:
            self._compare()

    def exclude_next(self) -> None:
        """Exclude the next wait, which is for work of the main process alone."""
        self._excluded = True

    def _compare(self) -> None:
        shares = self.processes.gather(self._waited / max(time.monotonic() - self._since, 1e-9))
        self.rank, share = find_straggler(shares)
        if self.rank is not None:
            self.log(f"straggler: rank {self.rank}; the others waited for it {share:.0%} of the last {EVERY} steps")
        self._waited, self._steps, self._since = 0.0, 0, time.monotonic()


def find_straggler(waited: Sequence[float]) -> tuple[int | None, float]:
    """Return the rank that the others wait for, if there is one, and for which share of the time.

    `waited` is the share of the time that each rank waited.

    >>> find_straggler([0.5, 0.375, 0.125, 0.5]), find_straggler([0.05, 0.08, 0.02, 0.06])[0]
    ((2, 0.25), None)
    """
    least = min(range(len(waited)), key=waited.__getitem__)
    share = min((share for rank, share in enumerate(waited) if rank != least), default=0.0) - waited[least]
    return (least if share > SHARE else None), share
