"""Run folders: a checkpoint of another format is refused in one sentence."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import glasshouse as gh
from glasshouse.errors import StoreError
from glasshouse.hub import run_checkpoints

OLD = (
    r"^'.*step-00000100' has the old checkpoint format 1, but this version reads format 2; use .*, or train again\.$"
)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Make the folder of an unfinished run with one checkpoint, which has no manifest yet."""
    checkpoint = tmp_path / run_checkpoints.CHECKPOINTS / run_checkpoints.step_folder_name(100)
    checkpoint.parent.mkdir()
    gh.save(gh.build(gh.preset("tiny-decoder")), None, checkpoint)
    (tmp_path / run_checkpoints.RUN).write_text("")
    return tmp_path


def checkpoint_of(run: Path) -> Path:
    return run / run_checkpoints.CHECKPOINTS / run_checkpoints.step_folder_name(100)


def test_a_checkpoint_of_format_1_is_refused_in_one_sentence(run: Path) -> None:
    (checkpoint_of(run) / "training.json").write_text(json.dumps({"format": 1, "files": {}, "about": {}}))
    with pytest.raises(StoreError, match=OLD):
        run_checkpoints.check_manifest(checkpoint_of(run))
    with pytest.raises(StoreError, match=r"has no intact checkpoint: .* has the old checkpoint format 1, but this"):
        gh.load(run)


def test_an_incomplete_checkpoint_is_not_taken_for_an_old_one(run: Path) -> None:
    with pytest.raises(StoreError, match=r"training_state\.json' is missing, so the checkpoint is incomplete\.$"):
        run_checkpoints.check_manifest(checkpoint_of(run))


def test_a_checkpoint_of_format_2_is_loaded(run: Path) -> None:
    manifest = run_checkpoints.with_checksum({"format": 2, "files": {}, "metadata": {}})
    (checkpoint_of(run) / run_checkpoints.STATE).write_text(json.dumps(manifest))
    (checkpoint_of(run) / "training.json").write_text("{}")  # a stray file next to a manifest is ignored
    with pytest.warns(UserWarning, match="has not finished, so its latest checkpoint is loaded, that of step 100"):
        model, _ = gh.load(run)
    assert model.spec == gh.preset("tiny-decoder")
