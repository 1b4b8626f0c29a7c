"""`make claims` fails where a statement is broken on purpose, and names it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# What is broken: the file, the line as it is, and as it must not be.
FAULTS = {
    "A3": ("attention.py", "return s.d_head**-0.5 if s.attention_scale is None else s.attention_scale", "return 1.0"),
    "A9": (
        "attend/mask.py",
        "causal_ok = k_position[b, k] <= q_position[b, q]",
        "causal_ok = k_position[b, k] <= q_position[b, q] + 1",
    ),
    "P1": ("position.py", "return x + self.encodings(positions).to(x.dtype)", "return x"),
    "B1": (
        "residual.py",
        "return self.norm(x + self.drop(self.layer(x, ctx)))",
        "return x + self.drop(self.norm(self.layer(x, ctx)))",
    ),
    "A1": (
        "attention.py",
        "return self.out(merge_heads(self.attend_heads(q, k, v, ctx)))",
        "return self.out(merge_heads(self.attend_heads(q[:, :1].expand_as(q), k, v, ctx)))",
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("number", FAULTS)
def test_a_broken_statement_is_named(number: str, tmp_path: Path) -> None:
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__"))
    name, line, fault = FAULTS[number]
    path = tmp_path / "src" / "glasshouse" / "layers" / name
    source = path.read_text(encoding="utf-8")
    assert source.count(line) >= 1
    path.write_text(source.replace(line, fault), encoding="utf-8")
    command = [sys.executable, ROOT / "benchmarks" / "claims.py", "--no-save", "--quick", "--parts"]
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "src")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stdout
    named = done.stderr.splitlines()[-1].removeprefix("not as stated: ").split(", ")
    assert number in named, done.stderr
