"""A weights file that changed since it was saved is refused."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

import glasshouse as gh
from glasshouse.evaluation.verify import verify
from glasshouse.hub import model_files as checksums


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A saved model."""
    gh.save(gh.build(gh.preset("tiny-decoder", n_layers=1)), None, tmp_path / "model")
    return tmp_path / "model"


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1 << 3
    path.write_bytes(data)


@pytest.mark.parametrize("at", [-1, -4001, -100_003])
def test_one_flipped_bit_is_found(folder: Path, at: int) -> None:
    gh.load(folder)
    flip(folder / "model.safetensors", at)
    with pytest.raises(gh.StoreError, match=r"model\.safetensors' is not what was saved: .* delete checksums\.json"):
        gh.load(folder)
    with pytest.raises(gh.StoreError, match="is not what was saved"):
        verify(folder)
    gh.load(folder, check=False)
    (folder / "checksums.json").unlink()  # the way out that the sentence names
    gh.load(folder)


def test_hand_edited_json_stays_loadable(folder: Path) -> None:
    table = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(table, indent=4) + "\n\n")
    gh.load(folder)


def test_every_file_of_several_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("glasshouse.hub.model_folder.SHARD_BYTES", 100_000)
    gh.save(gh.build(gh.preset("tiny-decoder")), None, tmp_path / "model")
    files = sorted((tmp_path / "model").glob("*.safetensors"))
    assert len(files) > 2
    for path in files:
        flip(path, -1)
        with pytest.raises(gh.StoreError, match=f"{path.name}' is not what was saved"):
            gh.load(tmp_path / "model")
        flip(path, -1)
    gh.load(tmp_path / "model")


def test_chunks_by_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checksums, "CHUNK_BYTES", 4)
    (tmp_path / "a").write_bytes(b"abcdefghij")
    parts = [hashlib.sha256(part).digest() for part in (b"abcd", b"efgh", b"ij")]
    assert checksums.chunked_sha256(tmp_path / "a") == hashlib.sha256(b"".join(parts)).hexdigest()


def test_the_hashes_name_weights_files_of_the_folder_alone(folder: Path) -> None:
    (folder.parent / "other.safetensors").write_bytes(b"")
    (folder / "checksums.json").write_text(json.dumps({"../other.safetensors": "0"}))
    with pytest.raises(gh.StoreError, match="outside"):
        gh.load(folder)
    (folder / "checksums.json").write_text(json.dumps({"config.json": "0", "gone.safetensors": "0"}))
    gh.load(folder)
