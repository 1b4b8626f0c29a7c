"""`glasshouse doctor`: it reports what the package would really do here, and what is broken is one sentence each."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
import tomllib
import webbrowser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import glasshouse as gh
from cli.runner import Call
from glasshouse.cli import environment
from glasshouse.layers.attend import backends
from glasshouse.models import stack
from glasshouse.text import corpus_encoder

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"
FOR_DEVELOPERS = {"notebooks", "docs", "bench", "dev", "lens", "published"}


def report(call: Call, code: int = 0) -> Any:  # noqa: ANN401 - JSON
    done = call("doctor", "--json")
    assert (done.code, done.err) == (code, "")
    return json.loads(done.out)


def test_every_extra_for_users_is_listed_with_the_library_that_it_installs() -> None:
    extras = tomllib.loads(PYPROJECT.read_text())["project"]["optional-dependencies"]
    assert set(environment.EXTRAS) == set(extras) - FOR_DEVELOPERS
    for extra, (library, _) in environment.EXTRAS.items():
        assert [one.partition(">=")[0] for one in extras[extra]] == [library]


class Lines(gh.training.SilentReporter):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def log(self, message: str) -> None:
        self.lines.append(message)


@pytest.mark.slow
def test_a_run_uses_what_was_reported(call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    used = report(call)["used"]
    seen = set()

    def choose(*arguments: object) -> type[backends.Backend]:
        seen.add(backends.choose_backend(*arguments).name)
        return backends.choose_backend(*arguments)

    monkeypatch.setattr(stack, "choose_backend", choose)
    (tmp_path / "a.txt").write_text("to be or not to be " * 200)
    data = {"path": str(tmp_path / "a.txt"), "seq_len": 8, "vocab_size": 263}
    train = {"steps": 1, "batch_tokens": 16, "workers": 0, "out": str(tmp_path / "run")}
    lines = Lines()
    gh.train(gh.Run.from_dict({"model": {"preset": "tiny-decoder"}, "data": data, "train": train}), lines)
    (line,) = (line for line in lines.lines if line.startswith("device"))
    assert line.split()[1] == used["device"].split()[0]
    assert used["precision"] in line.split(", ")
    assert used["compile"]["used"] == line.endswith(", compiled")
    assert seen == {used["attention"]["training"]}


def test_the_report_is_readable_and_has_every_section(call: Call) -> None:
    done = call("doctor")
    assert (done.code, done.err) == (0, "")
    lines = done.out.splitlines()
    assert [line for line in lines if line.endswith(":") and not line.startswith(" ")] == [
        "found:",
        "will be used:",
        "optional:",
    ]
    assert f"  glasshouse  {gh.__version__}, {Path(gh.__file__).parent}" in lines
    assert any(line.startswith(f"  torch       {torch.__version__}, built for ") for line in lines)
    for extra, (_, purpose) in environment.EXTRAS.items():
        (line,) = (line for line in lines if line.split()[:1] == [extra])
        assert purpose in line


def test_a_missing_extra_comes_with_the_line_that_installs_it(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    versions = importlib.metadata.version

    def version(name: str) -> str:
        if name in ("gigatoken", "lm-eval", "mlflow", "onnxscript", "wandb"):
            raise importlib.metadata.PackageNotFoundError(name)
        return versions(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setattr(corpus_encoder, "gigatoken", None)
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(webbrowser, "get", lambda: (_ for _ in ()).throw(webbrowser.Error("none")))
    told = report(call)
    missing = {name for name, row in told["optional"].items() if row["found"] is None}
    assert missing == {"fast", "lm-eval", "mlflow", "onnx", "wandb", "C++ compiler", "browser"}
    assert told["optional"]["fast"]["get"] == "pip install 'glasshouse[fast]'"
    assert told["used"]["tokenizer"].startswith("tokenizers, as gigatoken is not installed")
    assert "missing: pip install 'glasshouse[wandb]'\n" in call("doctor").out


@pytest.mark.skipif(sys.platform in ("darwin", "win32"), reason="there is always a screen")
@pytest.mark.parametrize("screen", [None, "DISPLAY", "WAYLAND_DISPLAY", "BROWSER"])
def test_a_browser_counts_where_it_can_open_a_window(
    screen: str | None, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(webbrowser, "get", lambda: webbrowser.GenericBrowser("lynx"))
    if screen:
        monkeypatch.setenv(screen, "x")
    assert report(call)["optional"]["browser"]["found"] == ("lynx" if screen else None)


@pytest.mark.parametrize(
    ("build", "visible", "way_out"),
    [
        (None, None, "this torch is built for CPU"),
        ("12.8", None, "update the driver, 470.1, to one for CUDA 12.8"),
        ("12.8", "", "CUDA_VISIBLE_DEVICES is ''; unset it"),
    ],
)
def test_a_gpu_that_torch_cannot_use_is_reported(
    build: str | None,
    visible: str | None,
    way_out: str,
    call: Call,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "gpus" / "0000:01").mkdir(parents=True)
    (tmp_path / "gpus" / "0000:01" / "information").write_text("Model: \t\t NVIDIA A, B\nIRQ: 1\n")
    (tmp_path / "version").write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  470.1  Mon\nGCC version: 12\n")
    monkeypatch.setattr(environment, "NVIDIA", tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", build)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    told = report(call)
    assert told["found"]["gpus"] == [{"device": None, "name": "NVIDIA A, B", "driver": "470.1"}]
    assert way_out in told["optional"]["CUDA"]["get"]
    assert "  GPU         NVIDIA A, B, not usable by torch, driver 470.1\n" in call("doctor").out


def test_a_gpu_is_reported_with_what_will_be_used_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch with CUDA and Triton would answer."""
    one = SimpleNamespace(name="NVIDIA H", total_memory=80 * 2**30, major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: one)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H")
    monkeypatch.setattr(backends.decode_attention, "available", True)
    gpus = environment.hardware()["gpus"]
    assert [(gpu["device"], gpu["memory_bytes"] >> 30) for gpu in gpus] == [("cuda:0", 80), ("cuda:1", 80)]
    assert gpus[0]["compute_capability"] == "9.0"
    used = environment.choices()
    assert (used["device"], used["precision"]) == ("cuda (NVIDIA H)", "bfloat16")
    assert [*used["attention"].values()] == ["sdpa", "flex", "decode"]
    assert used["compile"] == {"used": True, "reason": None}
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (6, 1))
    used = environment.choices()
    assert used["precision"] == "float16"
    assert used["compile"] == {"used": False, "reason": "the GPU is older than Triton supports"}


def test_what_is_broken_is_a_sentence_and_exit_code_one(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    torch_version = importlib.metadata.version("torch")
    required = ["torch>=999", "no-such-library>=1", "numpy>=2", "Babel>=999; extra == 'cldr'"]
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: required)
    done = call("doctor")
    assert done.code == 1
    assert done.out.splitlines()[-3:] == [
        "problems:",
        f"  torch is {torch_version}, but it must be at least 999; run pip install 'torch>=999'.",
        "  no-such-library is not installed; run pip install 'no-such-library>=1'.",
    ]
    assert len(report(call, code=1)["problems"]) == 2


@pytest.mark.parametrize(
    ("version", "oldest", "enough"),
    [("2.9.1", "2.10", False), ("2.10.0", "2.10", True), ("2.13.0+cpu", "2.10", True), ("2024.5.15", "2024.5", True)],
)
def test_versions_are_compared_by_number(
    version: str, oldest: str, enough: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: [f"thing>={oldest}"])
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    assert bool([*environment.unmet_requirements()]) is not enough


def test_a_device_that_computes_wrongly_or_not_at_all_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    assert not [*environment.device_problem(cpu)]
    monkeypatch.setattr(torch.Tensor, "__matmul__", lambda a, b: a)
    assert [*environment.device_problem(cpu)] == [
        "cpu computes 4 x 4 x 4 as 16; check its driver, or use the device cpu."
    ]

    def fail(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no kernel image\nis available")

    monkeypatch.setattr(torch.Tensor, "__matmul__", fail)
    (problem,) = environment.device_problem(cpu)
    assert problem.startswith("cpu does not compute (no kernel image is available);")


@pytest.mark.long
@pytest.mark.slow
def test_a_torch_that_cannot_be_imported_is_a_problem_and_nothing_is_written(tmp_path: Path) -> None:
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "torch.py").write_text("raise OSError('libcudart.so: cannot open')")
    home = tmp_path / "home"
    home.mkdir()
    path = os.pathsep.join([str(tmp_path / "broken"), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "PYTHONPATH": path, "HOME": str(home), "HF_HOME": str(home / "hf")}

    def ask(*words: str) -> subprocess.CompletedProcess[str]:
        line = [sys.executable, "-B", "-m", "glasshouse", *words]
        return subprocess.run(line, env=env, cwd=home, capture_output=True, text=True, check=False)

    done = ask("doctor", "--json")
    assert (done.returncode, done.stderr) == (1, "")
    (problem,) = json.loads(done.stdout)["problems"]
    assert "(libcudart.so: cannot open)" in problem
    assert ask("--version").stdout == (
        f"glasshouse {gh.__version__}, torch cannot be imported: see glasshouse doctor\n"
    )
    env["PYTHONPATH"] = os.environ.get("PYTHONPATH", "")
    done = ask("doctor")
    assert (done.returncode, done.stderr) == (0, "")
    assert not [*home.rglob("*")]
