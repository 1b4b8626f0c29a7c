"""When a process of a run is gone: the others notice that its connections are closed, find out which, and leave."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from torch import distributed as dist

from glasshouse.errors import GlasshouseError
from glasshouse.training.processes import Processes
from glasshouse.training.signals import StoppedError

SECONDS = 5.0  # for the others to say that they are there
POLL_SECONDS = 0.05


class LostProcessError(GlasshouseError):
    """Another process of the run ended before this one."""


@contextmanager
def watched(processes: Processes) -> Iterator[None]:
    """Turn the error of a closed connection into one that names the process that was first, and its reason."""
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
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # of torchrun, before this process has said why it leaves
        raise _explain(processes) from error


def _is_of_connection(error: Exception) -> bool:
    return isinstance(error, RuntimeError) and (isinstance(error, dist.DistError) or "gloo" in str(error))


def _leave_word(processes: Processes, reason: str) -> None:
    """Tell the others why this process leaves, in the store that torchrun or the first process holds."""
    if processes.is_parallel:
        try:
            dist.distributed_c10d._get_default_store().set(f"leaving/{processes.rank}", reason)
        except RuntimeError:  # the store is gone
            return


def _explain(processes: Processes) -> Exception:
    """Wait for what the others say; one that says nothing was killed."""
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
        reasons = {rank: "" for rank in others if rank != 0}  # the first process holds the store
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
