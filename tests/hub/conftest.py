"""Valid model folders, and what damaged ones must lead to."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from hub.audit import refuse
from hub.damage import Case, RefuseCase
from hub.valid_checkpoints import write_valid_checkpoints


@pytest.fixture(scope="session")
def valid_checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A valid folder of each kind, to be copied and never changed."""
    place = tmp_path_factory.mktemp("valid")
    write_valid_checkpoints(place)
    return place


@pytest.fixture
def outside(valid_checkpoints: Path, tmp_path: Path) -> Path:
    """Make a valid folder next to the malicious one, as the target of links and paths."""
    shutil.copytree(valid_checkpoints / "worded", tmp_path / "outside")
    (tmp_path / "outside" / "words.json").write_text('{"pad_token": "w1"}')
    (tmp_path / "outside" / "pooling.json").write_text('{"pooling_mode_mean_tokens": true}')
    return tmp_path / "outside"


@pytest.fixture
def model(valid_checkpoints: Path, tmp_path: Path) -> Path:
    shutil.copytree(valid_checkpoints / "gpt2", tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def refuse_case(valid_checkpoints: Path, outside: Path, tmp_path: Path) -> RefuseCase:
    """Damage a copy of a folder as a case says, and assert that loading it is refused as the case says."""

    def damage_and_load(case: Case) -> None:
        shutil.copytree(valid_checkpoints / case.base, tmp_path / "model")
        case.damage(tmp_path / "model")
        refuse(tmp_path / "model", case.file, case.reason)

    return damage_and_load
