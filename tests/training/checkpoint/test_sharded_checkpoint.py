"""Checkpoints of several processes: the same at any number of them, whole or not there, and loaded as any other."""

from __future__ import annotations

import errno
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import processes
import pytest
import torch
from torch import Tensor
from torch import distributed as dist

import glasshouse as gh
from glasshouse import hub, store
from glasshouse.errors import StoreError
from glasshouse.hub import model_folder
from glasshouse.hub.tensor_shards import SavedTensors
from glasshouse.training.checkpoint import shards as joint_write
from glasshouse.training.checkpoint import store as checkpoint_folder
from glasshouse.training.checkpoint.state import Checkpointer, TrainerState
from glasshouse.training.checkpoint.store import Checkpoints
from glasshouse.training.distributed.fsdp import copy_whole_, parallelize
from glasshouse.training.distributed.processes import Parallel, Processes, join_processes
from glasshouse.training.step import EMA, TrainStep

pytestmark = pytest.mark.slow

STEP = 7


def make_tokenizer() -> gh.Tokenizer:
    return gh.Tokenizer.train(texts=["to be or not to be"], vocab_size=263)


def make_model(seed: int, device: str = "cpu") -> Any:  # noqa: ANN401
    torch.manual_seed(seed)
    return gh.build(gh.preset("tiny-decoder", n_layers=2, vocab_size=len(make_tokenizer())), device=device)


def make_checkpointer(root: Path, known: Processes, seed: int, kind: str = "shard") -> Checkpointer:
    model = make_model(seed, "meta" if known.is_parallel else "cpu")
    if known.is_parallel:
        choice = Parallel(kind, known.tensor)  # type: ignore[arg-type]
        parallelize(model, choice, known, torch.device("cpu"), torch.float32)
    step = TrainStep(model, torch.optim.AdamW(model.parameters(), lr=0.1 * (seed + 1)))
    state, ema = TrainerState(), EMA(model, 0.9)
    return Checkpointer(model, step, ema, state, make_tokenizer(), Checkpoints(root / "checkpoints", 1, 3, known))


def train(checkpointer: Checkpointer) -> None:
    """Update twice by gradients drawn for the whole tensors; every operation is elementwise."""
    source = torch.Generator().manual_seed(3)
    optimizer = checkpointer.train_step.optimizer
    for _ in range(2):
        for weight in checkpointer.model.parameters():
            weight.grad = torch.zeros_like(weight)
            copy_whole_(weight.grad, torch.randn(weight.shape, generator=source))
        optimizer.step()
        assert checkpointer.ema is not None
        checkpointer.ema.update()
    checkpointer.state.step = STEP


def whole_state(checkpointer: Checkpointer) -> dict[str, Tensor]:
    """Return the whole weights, EMA and optimizer state."""
    assert checkpointer.ema is not None
    found: dict[str, Any] = dict(checkpointer.model.state_dict())
    found |= {f"ema.{name}": weight for name, weight in checkpointer.ema.weights.items()}
    for number, values in checkpointer.train_step.optimizer.state_dict()["state"].items():
        found |= {f"{number}.{name}": value for name, value in values.items()}
    return {
        name: tensor.detach().full_tensor() if hasattr(tensor, "full_tensor") else tensor.detach()
        for name, tensor in found.items()
    }


def assert_equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert tensor.equal(other[name]), name


def reference(root: Path) -> Checkpointer:
    """The same two updates in one process."""
    checkpointer = make_checkpointer(root / "reference", Processes(), 0)
    train(checkpointer)
    return checkpointer


def save_in_ranks(rank: int, root: Path, kind: str, tensor: int) -> None:
    with joined(tensor) as known:
        checkpointer = make_checkpointer(root, known, 0, kind)
        checkpointer.save_initial()
        train(checkpointer)
        checkpointer.save()
        checkpointer.wait()


def load_in_ranks(rank: int, root: Path, kind: str, tensor: int) -> None:
    with joined(tensor) as known:
        check_restored(make_checkpointer(root, known, 1, kind), reference(root))


@contextmanager
def joined(tensor: int = 1) -> Iterator[Processes]:
    with join_processes(Parallel("shard", tensor), torch.device("cpu")) as (known, _):
        yield replace(known, local_world_size=2)  # as on nodes of two


def check_restored(checkpointer: Checkpointer, expected: Checkpointer) -> None:
    """Restore into another model, and compare bit for bit."""
    found = checkpointer.checkpoints.newest()
    assert found is not None
    assert (found[0], found[2]) == (STEP, [])
    checkpointer.restore(found[0], found[1])
    assert_equal(whole_state(checkpointer), whole_state(expected))
    assert checkpointer.train_step.optimizer.param_groups[0]["lr"] == 0.1
    assert checkpointer.state.step == STEP


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder with the checkpoint of four processes, and a snapshot of the initial model."""
    root = tmp_path_factory.mktemp("sharded")
    assert processes.run_ranks(save_in_ranks, 4, root / "rendezvous", root, "shard", 1) == [0] * 4
    return root


def folder_of(root: Path) -> Path:
    return root / "checkpoints" / f"step-{STEP:08d}"


# At any number of processes


@pytest.mark.long
def test_every_process_writes_its_shard(saved: Path) -> None:
    shards = sorted(path.name for path in folder_of(saved).glob("*.shard-*"))
    assert shards == [
        f"{stem}.shard-0000{number}-of-00004.safetensors"
        for stem in ("model", "training_state")
        for number in range(1, 5)
    ]
    sizes = [(folder_of(saved) / name).stat().st_size for name in shards[:4]]
    assert max(sizes) < 1.2 * min(sizes)
    assert not list((saved / "checkpoints").glob(".*"))


@pytest.mark.long
def test_saved_by_four_and_loaded_by_one(saved: Path, tmp_path: Path) -> None:
    shutil.copytree(saved / "checkpoints", tmp_path / "checkpoints")
    check_restored(make_checkpointer(tmp_path, Processes(), 1), reference(tmp_path))


@pytest.mark.long
@pytest.mark.parametrize(
    ("count", "kind", "tensor"),
    [
        (2, "shard", 1),
        (4, "shard", 2),
        pytest.param(2, "replicate", 1, marks=pytest.mark.long),
        pytest.param(4, "hybrid", 1, marks=pytest.mark.long),
        pytest.param(8, "shard", 1, marks=pytest.mark.long),
        pytest.param(8, "hybrid", 2, marks=pytest.mark.long),
    ],
)
def test_saved_by_four_and_loaded_by_others(count: int, kind: str, tensor: int, saved: Path, tmp_path: Path) -> None:
    shutil.copytree(saved / "checkpoints", tmp_path / "checkpoints")
    codes = processes.run_ranks(load_in_ranks, count, tmp_path / "rendezvous", tmp_path, kind, tensor)
    assert codes == [0] * count


@pytest.mark.long
@pytest.mark.parametrize(
    ("count", "kind", "tensor"),
    [
        (2, "replicate", 1),
        (2, "shard", 2),
        pytest.param(4, "hybrid", 1, marks=pytest.mark.long),
        pytest.param(4, "shard", 2, marks=pytest.mark.long),
        pytest.param(8, "hybrid", 2, marks=pytest.mark.long),
    ],
)
def test_every_layout_is_saved_once_and_loaded_by_one(count: int, kind: str, tensor: int, tmp_path: Path) -> None:
    """Replicas without shards are saved as by one process."""
    codes = processes.run_ranks(save_in_ranks, count, tmp_path / "rendezvous", tmp_path, kind, tensor)
    assert codes == [0] * count
    names = {path.name for path in folder_of(tmp_path).iterdir()}
    assert ("model.safetensors" in names) == ("training_state.safetensors" in names) == (kind == "replicate")
    check_restored(make_checkpointer(tmp_path, Processes(), 1), reference(tmp_path))


# As a model


def test_a_sharded_checkpoint_is_loaded_and_exported_as_any_other(saved: Path, tmp_path: Path) -> None:
    expected = reference(tmp_path).model
    model, tok = gh.load(folder_of(saved))
    assert_equal(dict(model.state_dict()), dict(expected.state_dict()))
    assert tok is not None
    assert tok.fingerprint == make_tokenizer().fingerprint
    kind, _ = hub.convert(folder_of(saved), tmp_path / "sharded")
    assert hub.export(expected.eval(), make_tokenizer(), tmp_path / "whole") == kind
    for path in (tmp_path / "whole").iterdir():
        assert (tmp_path / "sharded" / path.name).read_bytes() == path.read_bytes(), path.name


def test_an_export_reads_one_file_of_the_result_at_a_time(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit, unwritten, most = 100_000, [0], []
    real_read, real_write = SavedTensors.read, store.write_tensors

    def read(tensors: SavedTensors, *where: Any) -> Tensor:  # noqa: ANN401
        found = real_read(tensors, *where)
        unwritten.append(found.numel() * found.element_size())
        return found

    def write(*arguments: Any) -> None:  # noqa: ANN401
        real_write(*arguments)
        most.append(sum(unwritten))
        unwritten.clear()

    monkeypatch.setattr(SavedTensors, "read", read)
    monkeypatch.setattr(store, "write_tensors", write)
    monkeypatch.setattr(model_folder, "SHARD_BYTES", limit)
    hub.convert(folder_of(saved), tmp_path / "published")
    monkeypatch.undo()
    assert len(most) > 4
    assert max(most) <= limit
    assert_equal(dict(gh.load(tmp_path / "published")[0].state_dict()), dict(reference(tmp_path).model.state_dict()))


def test_the_initial_model_is_a_snapshot_in_shards(saved: Path) -> None:
    snapshot = saved / "snapshots" / "step-00000000"
    assert_equal(dict(gh.load(snapshot)[0].state_dict()), dict(make_model(0).state_dict()))
    assert not list(snapshot.glob("training_state*"))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torch_reads_the_shards(saved: Path, tmp_path: Path) -> None:
    from torch.distributed import checkpoint as dcp

    expected = reference(tmp_path)
    found = {name: torch.zeros_like(weight) for name, weight in expected.model.state_dict().items()}
    dcp.load(found, storage_reader=dcp.HuggingFaceStorageReader(str(folder_of(saved))), no_dist=True)
    assert_equal(found, dict(expected.model.state_dict()))


# Damage


def delete(path: Path) -> None:
    path.unlink()


def alter(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("stem", ["model", "training_state"])
@pytest.mark.parametrize(
    ("damage", "what"), [(delete, "is missing"), (alter, "does not match its checksum")], ids=["deleted", "altered"]
)
def test_a_damaged_shard_is_refused_by_name(
    damage: Callable[[Path], None], what: str, stem: str, saved: Path, tmp_path: Path
) -> None:
    shutil.copytree(saved / "checkpoints", tmp_path / "checkpoints")
    damage(folder_of(tmp_path) / f"{stem}.shard-00003-of-00004.safetensors")
    with pytest.raises(StoreError, match=rf"{stem}\.shard-00003-of-00004\.safetensors' {what}; use another"):
        Checkpoints(tmp_path / "checkpoints").newest()


def test_a_snapshot_without_a_shard_is_refused(saved: Path, tmp_path: Path) -> None:
    shutil.copytree(saved / "snapshots" / "step-00000000", tmp_path / "snapshot")
    (tmp_path / "snapshot" / "model.shard-00004-of-00004.safetensors").unlink()
    with pytest.raises(StoreError, match=r"model\.shard-00004-of-00004\.safetensors' is missing"):
        gh.load(tmp_path / "snapshot")


# All or nothing


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def save_and_fail(rank: int, root: Path, failing: int, where: str) -> None:
    """Save one checkpoint, then another that one process does not finish."""
    with joined() as known:
        checkpointer = make_checkpointer(root, known, 0)
        train(checkpointer)
        checkpointer.save()
        checkpointer.wait()
        checkpointer.state.step = STEP + 1
        if rank == failing and where == "shard":
            checkpoint_folder.write_shard = lambda *_: die()  # type: ignore[assignment]
        elif rank == failing and where == "commit":
            store.commit_folder = lambda *_: die()  # type: ignore[assignment]
        elif rank == failing:
            checkpoint_folder.write_shard = fail_to_write  # type: ignore[assignment]
        checkpointer.save()
        if where == "disk":
            with pytest.raises(StoreError, match=r"No space left.*last intact checkpoint is step 7") as error:
                checkpointer.wait()
            assert ("rank 1" in str(error.value)) == (rank == 0)
            dist.barrier()
            return
        checkpointer.wait()


def fail_to_write(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.long
@pytest.mark.parametrize(("failing", "where"), [(1, "shard"), (0, "commit")])
def test_a_process_killed_while_saving_leaves_no_folder(failing: int, where: str, tmp_path: Path) -> None:
    codes = processes.run_ranks(save_and_fail, 2, tmp_path / "rendezvous", tmp_path, failing, where)
    assert codes[failing] == -signal.SIGKILL
    assert codes[1 - failing] == 1  # it ends by itself, with an error
    assert Checkpoints(tmp_path / "checkpoints").steps() == [STEP]
    check_restored(make_checkpointer(tmp_path, Processes(), 1), reference(tmp_path))


@pytest.mark.long
def test_an_error_of_one_process_is_raised_in_all(tmp_path: Path) -> None:
    assert processes.run_ranks(save_and_fail, 2, tmp_path / "rendezvous", tmp_path, 1, "disk") == [0, 0]
    assert Checkpoints(tmp_path / "checkpoints").steps() == [STEP]
    assert not list((tmp_path / "checkpoints").glob(".*"))


def test_temporary_files_of_other_processes_are_left_alone(tmp_path: Path) -> None:
    """The safetensors library writes to a temporary file first."""

    def fill(folder: Path) -> None:
        (tmp_path / "new" / ".tmp123").rename(tmp_path / "new" / "model.shard-00002-of-00002.safetensors")
        (folder / "config.json").write_text("{}")

    (tmp_path / "new").mkdir()
    (tmp_path / "new" / ".tmp123").write_text("of rank 1")
    assert joint_write._write_part(tmp_path / "new", fill, rank=0).keys() == {"config.json"}
