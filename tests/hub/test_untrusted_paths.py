"""Paths and links out of a model folder are refused; the hub's cache may link to its own blobs."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from hub.audit import audited, refuse
from hub.damage import CONFIG, LONG, POOLING, WEIGHTS

import glasshouse as gh


def test_the_target_of_outside_links_is_valid(outside: Path) -> None:
    _, tok = gh.load(outside)
    assert tok is not None


@pytest.fixture
def snapshot(valid_checkpoints: Path, tmp_path: Path) -> Path:
    """Lay out a model as the hub's cache does: symlinks to blobs named by their hash."""
    return cache(valid_checkpoints / "bert-bare", tmp_path / "hub" / "models--someone--model")


def cache(folder: Path, repository: Path) -> Path:
    snapshot = repository / "snapshots" / "0123abcd"
    (repository / "blobs").mkdir(parents=True)
    (snapshot / "1_Pooling").mkdir(parents=True)
    for number, path in enumerate(sorted(folder.iterdir())):
        shutil.copy(path, repository / "blobs" / f"{number:064x}")
        (snapshot / path.name).symlink_to(f"../../blobs/{number:064x}")
    (repository / "blobs" / "pooling").write_text('{"pooling_mode_cls_token": true}')
    (snapshot / POOLING).symlink_to("../../../blobs/pooling")
    return snapshot


def test_links_inside_one_cached_repository_are_followed(snapshot: Path, tmp_path: Path) -> None:
    (tmp_path / "named").symlink_to(snapshot)
    for place in (snapshot, tmp_path / "named"):
        with audited(snapshot.parents[1]) as forbidden:
            model, _ = gh.load(place)
        assert forbidden == []
        assert model.spec.head == gh.spec.Pooled("first")


@pytest.mark.parametrize("name", [CONFIG, WEIGHTS, POOLING])
def test_links_to_another_repository_are_not(valid_checkpoints: Path, snapshot: Path, name: str) -> None:
    other = cache(valid_checkpoints / "bert-bare", snapshot.parents[2] / "models--someone--secret")
    (snapshot / name).unlink()
    (snapshot / name).symlink_to((other / name).resolve())
    refuse(snapshot, name, "outside its folder")


def test_a_cache_whose_blobs_are_links_is_refused(snapshot: Path, outside: Path) -> None:
    blob = (snapshot / WEIGHTS).resolve()
    blob.unlink()
    blob.symlink_to(outside / WEIGHTS)
    refuse(snapshot, WEIGHTS, "outside its folder")
    blobs = blob.parent.rename(outside / "blobs")
    blob.parent.symlink_to(blobs)
    refuse(snapshot, CONFIG, "outside its folder")


@pytest.mark.parametrize(
    ("snapshots", "file"),
    [
        ("models--someone--model/snapshots", WEIGHTS),
        ("models--someone--model/refs", CONFIG),
        ("datasets--someone--model/snapshots", CONFIG),
        ("model/snapshots", CONFIG),
    ],
)
def test_only_a_snapshot_may_link_and_only_to_blobs(
    valid_checkpoints: Path, tmp_path: Path, snapshots: str, file: str
) -> None:
    snapshot = cache(valid_checkpoints / "gpt2", tmp_path / "cache")
    (tmp_path / "cache" / "more").mkdir()
    shutil.copy(valid_checkpoints / "gpt2" / WEIGHTS, tmp_path / "cache" / "more")
    (snapshot / WEIGHTS).unlink()
    (snapshot / WEIGHTS).symlink_to(f"../../more/{WEIGHTS}")
    repository, name = snapshots.split("/")
    snapshot.parent.rename(snapshot.parent.with_name(name))
    (tmp_path / "cache").rename(tmp_path / repository)
    refuse(tmp_path / snapshots / snapshot.name, file, "outside its folder")


@pytest.mark.parametrize(
    "place",
    ["nowhere/at/all", "model/model.safetensors", "~nobody-of-this-name/model", LONG, "a\0b"],
    ids=["nowhere", "a-file", "home-of-nobody", "long", "zero-byte"],
)
def test_a_path_that_is_no_folder_is_refused_in_one_sentence(
    model: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    monkeypatch.chdir(model.parent)
    for given in (place, Path(place)):
        with audited(model) as forbidden, pytest.raises(gh.GlasshouseError, match=r"no.* folder") as caught:
            gh.load(given)
        assert forbidden == []
        assert len(str(caught.value)) < 400
