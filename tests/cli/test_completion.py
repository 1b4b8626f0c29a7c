"""Shell completion installs, and completes commands and options, without importing torch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.long
@pytest.mark.slow
def test_completion_installs_and_completes(tmp_path: Path) -> None:
    program = Path(sys.executable).with_name("glasshouse")
    env = {**os.environ, "HOME": str(tmp_path), "PATH": f"{program.parent}:{os.environ['PATH']}"}
    install = ["bash", "-c", "glasshouse --install-completion; true"]  # `; true` keeps bash, the shell to detect
    done = subprocess.run(install, env=env, capture_output=True, text=True, check=True)
    script = tmp_path / ".bash_completions" / "glasshouse.sh"
    assert "completion installed" in done.stdout, done.stderr
    assert str(script) in (tmp_path / ".bashrc").read_text()
    (tmp_path / "torch.py").write_text("raise RuntimeError('torch was imported')")
    env["PYTHONPATH"] = os.pathsep.join([str(tmp_path), env.get("PYTHONPATH", "")])
    complete = "COMP_WORDS=($WORDS); COMP_CWORD=$WORD; _glasshouse_completion glasshouse; echo ${COMPREPLY[@]}"
    ask = f"source {script}; {complete}"
    expected = {
        "glasshouse trai": ["train"],
        "glasshouse do": ["doctor"],
        "glasshouse data ": ["join", "list", "prepare", "show", "verify"],
        "glasshouse generate --max-n": ["--max-new-tokens"],
        "glasshouse doctor --j": ["--json"],
    }
    for words, offered in expected.items():
        asked = {**env, "WORDS": words, "WORD": str(words.count(" "))}
        found = subprocess.run(["bash", "-c", ask], env=asked, capture_output=True, text=True, check=True)
        assert sorted(found.stdout.split()) == offered, found.stderr
