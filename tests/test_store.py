"""Folders of tensors are written atomically, and every kind of damage raises."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import time
from pathlib import Path

import pytest
import torch

from glasshouse import StoreError, store


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    store.write(tmp_path / "saved", {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(2).bfloat16()}, {"step": 1})
    return tmp_path / "saved"


def test_round_trip_is_bit_exact(tmp_path: Path) -> None:
    tensors = {
        "transposed": torch.randn(3, 4).t(),
        "half": torch.randn(5).half(),
        "ids": torch.arange(3),
        "none": torch.empty(0, 2),
        "nan": torch.tensor([float("nan"), -0.0]),
    }
    store.write(tmp_path / "x", tensors, {"name": "größe", "deep": {"list": [1, None, True]}})
    read, metadata = store.read(tmp_path / "x")
    assert metadata == {"name": "größe", "deep": {"list": [1, None, True]}}
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert read[name].dtype == tensor.dtype
        assert read[name].shape == tensor.shape
        assert read[name].contiguous().view(torch.uint8).tolist() == tensor.contiguous().view(torch.uint8).tolist()


def test_folder_with_other_files_is_left_alone(folder: Path) -> None:
    (folder / "chapter-1.txt").write_text("years of work")
    with pytest.raises(StoreError, match=r"saved' contains 'chapter-1\.txt', which would be lost"):
        store.write(folder, {"c": torch.zeros(1)}, {})
    assert (folder / "chapter-1.txt").read_text() == "years of work"
    assert store.read(folder)[1] == {"step": 1}


def test_writing_again_replaces_the_folder(folder: Path) -> None:
    store.write(folder, {"c": torch.zeros(1)}, {})
    tensors, _ = store.read(folder)
    assert list(tensors) == ["c"]
    assert sorted(path.name for path in folder.parent.iterdir()) == ["saved"]
    assert sorted(path.name for path in folder.iterdir()) == ["manifest.json", "tensors.safetensors"]


def test_failed_write_leaves_the_old_folder(folder: Path) -> None:
    with pytest.raises(TypeError):
        store.write(folder, {"a": torch.zeros(1)}, {"not JSON": object()})
    assert store.read(folder)[1] == {"step": 1}
    assert sorted(path.name for path in folder.parent.iterdir()) == ["saved"]


def test_a_reader_between_the_two_renames_finds_the_old_folder(folder: Path) -> None:
    folder.rename(folder.with_name(".saved.old"))
    assert store.read(folder)[1] == {"step": 1}


def test_a_backup_is_read_only_where_the_folder_is_missing(tmp_path: Path) -> None:
    folder, backup = tmp_path / "saved", tmp_path / ".saved.old"
    assert store.surviving_folder(folder) == folder
    backup.mkdir()
    assert store.surviving_folder(folder) == backup
    folder.mkdir()
    assert store.surviving_folder(folder) == folder


@pytest.mark.skipif(os.name == "nt", reason="Windows cannot flush a folder")
def test_everything_is_on_disk_before_the_folder_gets_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or a power failure leaves a folder with empty files."""
    events, fsync, rename = list[int | str](), os.fsync, Path.rename
    monkeypatch.setattr(os, "fsync", lambda handle: (events.append(os.fstat(handle).st_ino), fsync(handle))[1])
    monkeypatch.setattr(Path, "rename", lambda path, to: (events.append("rename"), rename(path, to))[1])
    store.write(tmp_path / "saved", {"a": torch.ones(2)}, {})
    before = events[: events.index("rename")]
    assert {path.stat().st_ino for path in (tmp_path / "saved", *(tmp_path / "saved").iterdir())} <= {*before}
    assert events[-1] == tmp_path.stat().st_ino  # then the new name


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def test_any_flipped_bit_and_any_truncation_is_detected(folder: Path) -> None:
    path = folder / "tensors.safetensors"
    whole = path.read_bytes()
    for offset in range(len(whole)):
        flip(path, offset)
        with pytest.raises(StoreError, match=r"tensors\.safetensors"):
            store.read(folder)
        path.write_bytes(whole[:offset])
        with pytest.raises(StoreError, match=r"tensors\.safetensors"):
            store.read(folder)
        path.write_bytes(whole)
    store.read(folder)


def test_damaged_header_raises_without_hash_check(folder: Path) -> None:
    flip(folder / "tensors.safetensors", 9)
    with pytest.raises(StoreError, match="not a valid safetensors file"):
        store.read(folder, verify=False)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is damaged"),
        ("[]", "is damaged"),
        ("{}", "is damaged"),
        ('{"format": 2}', "is damaged"),
        ('{"format": 2, "bytes": "a", "sha256": "", "metadata": {}}', "is damaged"),
        ('{"format": 2, "bytes": 1, "sha256": "", "metadata": 5}', "is damaged"),
        ("[" * 200_000, "is damaged"),
        ('{"format": 99}', "is of format 99, but this version reads format 2"),
    ],
)
def test_invalid_manifest_raises(folder: Path, text: str, message: str) -> None:
    (folder / "manifest.json").write_text(text)
    with pytest.raises(StoreError, match=message):
        store.read(folder)


def test_missing_files_are_named(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"there is no .*nowhere.*manifest\.json"):
        store.read(tmp_path / "nowhere")
    (folder / "tensors.safetensors").unlink()
    with pytest.raises(StoreError, match=r"tensors\.safetensors.* is missing"):
        store.read(folder)


def write_forever(folder: Path) -> None:
    for step in range(1_000_000):
        store.write(folder, {"a": torch.full((1000,), float(step))}, {"step": step})


@pytest.mark.slow
def test_writer_killed_at_any_time_leaves_a_complete_folder(tmp_path: Path) -> None:
    """Each time tensors and metadata of the same write are read."""
    folder, rng = tmp_path / "saved", random.Random(0)
    store.write(folder, {"a": torch.zeros(1000)}, {"step": 0})
    spawn = multiprocessing.get_context("fork" if os.name == "posix" else "spawn")
    for _ in range(10):
        writer = spawn.Process(target=write_forever, args=(folder,))
        writer.start()
        time.sleep(0.05 + rng.random() * 0.1)
        writer.kill()
        writer.join()
        tensors, metadata = store.read(folder)
        assert tensors["a"].eq(metadata["step"]).all()


def test_manifest_contents(folder: Path) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["format"] == store.FORMAT_VERSION
    assert manifest["bytes"] == (folder / "tensors.safetensors").stat().st_size
