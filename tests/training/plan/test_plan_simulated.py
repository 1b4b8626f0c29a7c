"""Plans of more GPUs than there are, beside what FSDP does: simulated by torch's fake process group and fake tensors.

One process is rank 0 of many. Every tensor has a shape and no data, every collective is called and sends nothing, so
that shards and traffic are those of a real run. `make simulate` takes the specs of 7 and 70 billion parameters.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

import glasshouse as gh
from glasshouse.models import Decoder
from glasshouse.models.builder import instantiate
from glasshouse.training.optimizer import AdamW
from glasshouse.training.plan import Layout, MemoryModel, step_traffic

SIZES = {
    "small": {"d_model": 96, "n_layers": 3, "n_heads": 4, "n_kv_heads": 2, "d_ff": 160, "vocab_size": 500},
    "7B": {"d_model": 4096, "n_layers": 32, "n_heads": 32, "n_kv_heads": 32, "d_ff": 11_008, "vocab_size": 32_000},
    "70B": {"d_model": 8192, "n_layers": 80, "n_heads": 64, "n_kv_heads": 8, "d_ff": 28_672, "vocab_size": 128_256},
}
COLLECTIVES = {"_allgather_base_": 1, "_reduce_scatter_base_": 0, "allreduce_": 0}  # and the argument that is a shard


class Collectives(TorchDispatchMode):
    """Counts the collectives and the bytes of this rank's shards in them."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.shard_bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401
        name = func.__name__.partition(".")[0]
        if name in COLLECTIVES and func.namespace == "c10d":
            shard = args[COLLECTIVES[name]]
            shards = shard if isinstance(shard, list) else [shard]
            self.calls[name] += 1
            self.shard_bytes[name] += sum(one.numel() * one.element_size() for one in shards)
        return func(*args, **(kwargs or {}))


@contextmanager
def ranks(count: int) -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=count)
    try:
        yield
    finally:
        dist.destroy_process_group()


def make_mesh(replicas: int, shards: int) -> DeviceMesh:
    names = ("replicate", "shard") if replicas > 1 else ("shard",)
    sizes = (replicas, shards) if replicas > 1 else (shards,)
    return init_device_mesh("cpu", sizes, mesh_dim_names=names)


def shard(model: Decoder, mesh: DeviceMesh) -> None:
    """Shard as `train` does: every block, then what is outside of them, which is not gathered a second time."""
    settings: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    }
    for block in model.stack.blocks:
        fully_shard(block, reshard_after_forward=True, **settings)
    fully_shard(model, reshard_after_forward=False, **settings)


def compare(size: str, replicas: int, shards: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("glasshouse.layers.embedding.check_ids", lambda *_: None)  # fake ids have no values to check
    s = gh.preset("llama-1b", **SIZES[size], max_len=16)
    layout = Layout("hybrid", replicas, shards)
    planned = MemoryModel(gh.build(s, device="meta"), AdamW(), precision=torch.bfloat16, layout=layout)
    with ranks(replicas * shards):
        mesh = make_mesh(replicas, shards)
        with FakeTensorMode(allow_non_fake_inputs=True):
            model = instantiate(s)
            assert isinstance(model, Decoder)
            shard(model, mesh)
            own = sum(weight.to_local().numel() for weight in model.parameters())  # type: ignore[attr-defined]
            with Collectives() as seen:
                model(torch.zeros(1, 16, dtype=torch.long)).float().sum().backward()
    assert own == planned.own
    assert seen.calls["_allgather_base_"] == 2 * s.n_layers + 1
    assert seen.calls["_reduce_scatter_base_"] == s.n_layers + 1
    traffic = step_traffic(layout, in_blocks=planned.in_blocks, outside=planned.outside, itemsize=2, grad_accum=1)
    # In a ring, a rank sends all shards but one; in an all-reduce, twice all parts but one.
    found = seen.shard_bytes
    assert traffic.all_gather == pytest.approx(found["_allgather_base_"] * (shards - 1), rel=0.01)
    assert traffic.reduce_scatter == pytest.approx(found["_reduce_scatter_base_"] * (shards - 1), rel=0.01)
    assert traffic.all_reduce == pytest.approx(2 * found["allreduce_"] * (replicas - 1) / replicas, rel=0.01)


@pytest.mark.long
@pytest.mark.parametrize(("replicas", "shards"), [(1, 8), (4, 2)])
def test_shards_and_traffic_of_a_small_model(replicas: int, shards: int, monkeypatch: pytest.MonkeyPatch) -> None:
    compare("small", replicas, shards, monkeypatch)


@pytest.mark.long
@pytest.mark.parametrize("size", ["7B", "70B"])
@pytest.mark.parametrize(
    ("replicas", "shards"),
    [(1, 8), (1, 64), (8, 8), (1, 512), (64, 8), (1, 4096), (512, 8)],
    ids=lambda one: str(one),
)
def test_shards_and_traffic_at_scale(size: str, replicas: int, shards: int, monkeypatch: pytest.MonkeyPatch) -> None:
    compare(size, replicas, shards, monkeypatch)


def compare_peak(size: str, shards: int, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare with the peak that torch's tracker finds in a forward and backward pass without a loss.

    Norms and activations of GPT-2, as these store the same eager on a CPU as compiled on a GPU.
    """
    monkeypatch.setattr("glasshouse.layers.embedding.check_ids", lambda *_: None)
    fields = {**SIZES[size], "head": "none", "position": "none", "dropout": 0.0, "attention_dropout": 0.0}
    s = gh.preset("gpt2", **fields, embed_dropout=0.0, max_len=512)
    layout = Layout("shard", shards=shards)
    planned = MemoryModel(gh.build(s, device="meta"), AdamW(), precision=torch.bfloat16, layout=layout)
    with ranks(shards):
        mesh = make_mesh(1, shards)
        with FakeTensorMode(allow_non_fake_inputs=True):
            model = instantiate(s)
            assert isinstance(model, Decoder)
            shard(model, mesh)
            optimizer = torch.optim.AdamW(model.parameters())
            ids = torch.zeros(rows, 512, dtype=torch.long)
            model(ids).sum().backward()
            optimizer.step()  # makes the state, with temporaries that a fused one has not
            optimizer.zero_grad()
            tracker = FSDPMemTracker(model, optimizer)
            tracker.track_inputs((ids,))
            with tracker:
                model(ids).sum().backward()
            (found,) = tracker.get_tracker_snapshot("peak").values()
    peak = next(value for key, value in found.items() if key == "Total")
    assert planned.at(rows, 512).peak == pytest.approx(peak, rel=0.15)


@pytest.mark.long
@pytest.mark.parametrize("rows", [1, 16])
def test_peak_of_a_small_model(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    compare_peak("small", 8, rows, monkeypatch)


@pytest.mark.long
@pytest.mark.parametrize("size", ["7B", "70B"])
@pytest.mark.parametrize("shards", [8, 64, 512, 4096])
def test_peak_at_scale(size: str, shards: int, monkeypatch: pytest.MonkeyPatch) -> None:
    compare_peak(size, shards, 4, monkeypatch)
