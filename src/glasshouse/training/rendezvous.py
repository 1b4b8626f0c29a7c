"""How processes find each other after torchrun restarted them.

torchrun keeps one store over all restarts, with the addresses of processes that are gone; new ones that read these
wait for them (https://github.com/pytorch/pytorch/issues/135712). So the processes of an attempt first agree on a
prefix of their own.
"""

from __future__ import annotations

import os
import time
import uuid
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

POLL_SECONDS = 0.02
LIMIT = timedelta(minutes=30)  # for all processes to start


def init_arguments() -> dict[str, Any]:
    """Return what `dist.init_process_group` needs to meet the processes of the same attempt."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return {}
    store, rank, world_size = next(rendezvous("env://", timeout=LIMIT))
    return {"store": attempt_store(store, rank, world_size), "rank": rank, "world_size": world_size}


def attempt_store(store: Store, rank: int, world_size: int) -> Store:
    """Return a view of a store that is empty at first, and the same for all processes that call this now.

    Every process shows a new token; the first answers each with its own, until all have seen it. Tokens of earlier
    attempts are answered, too, and nobody reads that.

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
