"""The example of Lightning in the guide runs: `make lightning` installs it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import glasshouse as gh

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "own-loop.md"


@pytest.mark.long
def test_the_example_of_lightning_trains_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(code, names)
    assert names["trainer"].global_step == 3
    before, _ = gh.load("python-3m")
    batch = names["tok"](["import os"])
    assert not torch.equal(names["model"](**batch), before(**batch))
