"""Device selection and properties, as far as they can be checked anywhere."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import glasshouse as gh
from glasshouse import device


def test_fastest_device_computes() -> None:
    found = device.fastest()
    x = torch.ones(4, 4, device=found, dtype=device.compute_dtype(found))
    assert (x @ x).sum().item() == 64


def test_memory_is_plausible() -> None:
    assert 2**28 < device.memory_bytes(torch.device("cpu")) < 2**50


@pytest.mark.usefixtures("whole_runs")
def test_peak_flops(monkeypatch: object) -> None:
    """A matmul that takes one second of a fake clock runs at 2 n^3 FLOPS."""
    ticks = iter(range(100))
    monkeypatch.setattr(device.time, "perf_counter", lambda: float(next(ticks)))
    before = torch.get_rng_state()
    assert device.measure_peak_flops(torch.device("cpu"), torch.float32, repeats=1) == 2 * 1024**3
    assert torch.get_rng_state().equal(before)  # measuring must not change training results


@pytest.mark.usefixtures("whole_runs")
def test_fast_machine_uses_a_larger_matmul(monkeypatch: object) -> None:
    """With a fake clock of n^3 / 2^37 seconds: 1,024 is too short, 2,048 is not."""
    now = 0.0

    def product(self: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        nonlocal now
        now += len(self) ** 3 / 2**37
        return self

    monkeypatch.setattr(torch.Tensor, "__matmul__", product)
    monkeypatch.setattr(device.time, "perf_counter", lambda: now)
    assert device.measure_peak_flops(torch.device("cpu"), torch.float32, repeats=3) == 2**38
    assert now == (3 * 2**30 + (3 + 5) * 2**33) / 2**37  # three to find it too short, three to accept the next size


@pytest.mark.parametrize(
    ("line", "native"),
    [
        ("flags : fpu avx512_bf16 amx_bf16", True),
        ("flags : fpu avx512f", False),
        ("Features : fp bf16", True),
        ("Features : fp bf16x", False),
        ("", None),
    ],
)
def test_native_bfloat16(line: str, native: bool | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cpuinfo").write_text(f"model name\t: A: B\n{line}\n\nmodel name : C\nflags : bf16\n")
    monkeypatch.setattr(device, "CPU_INFO", tmp_path / "cpuinfo")
    assert device.has_native_bfloat16() is native
    assert device.cpu_name() == "A: B"
    monkeypatch.setattr(device, "CPU_INFO", tmp_path / "absent")
    assert device.has_native_bfloat16() is None
    assert device.cpu_name()


def test_description_counts_the_cores_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device.os, "sched_getaffinity", lambda process: {3}, raising=False)
    assert device.describe(torch.device("cpu")) == "cpu (1 core)"
    monkeypatch.setattr(device.os, "sched_getaffinity", lambda process: {3, 5, 7}, raising=False)
    assert device.describe(torch.device("cpu")) == "cpu (3 cores)"


def test_compile_obstacle(monkeypatch: object) -> None:
    monkeypatch.setattr(device.shutil, "which", lambda name: None)
    assert device.compile_obstacle(torch.device("cpu")) == "no C++ compiler was found"
    monkeypatch.setattr(device.shutil, "which", lambda name: "/usr/bin/" + name)
    assert device.compile_obstacle(torch.device("cpu")) is None


@pytest.mark.parametrize(
    ("capability", "multiprocessors", "flops"),
    [  # dense bfloat16 with sums in float32, of data sheets
        ((12, 0), 170, 2.1e14),  # RTX 5090
        ((10, 0), 148, 2.25e15),  # B200
        ((9, 0), 132, 9.9e14),  # H200
        ((8, 9), 128, 1.65e14),  # RTX 4090
        ((8, 0), 108, 3.12e14),  # A100
    ],
)
def test_nominal_flops_are_near_the_data_sheet(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], multiprocessors: int, flops: float
) -> None:
    """A matmul reaches 60 to 100% of the data sheet."""
    properties = SimpleNamespace(multi_processor_count=multiprocessors)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    assert 0.6 * flops < device.nominal_flops(torch.device("cuda")) < 1.05 * flops


@pytest.mark.parametrize("name", ["tpu", "cuda:99", "cpu:1", "", 3])
def test_unavailable_device_raises(name: str, tmp_path: Path) -> None:
    gh.save(gh.build(gh.preset("tiny-decoder")), None, tmp_path / "model")
    message = rf"^device is '{name}', but this machine has cpu.*; choose from these, or 'auto'\.$"
    with pytest.raises(gh.InputError, match=message):
        gh.load(tmp_path / "model", device=name)
    with pytest.raises(gh.InputError, match=message):
        gh.build(gh.preset("tiny-decoder"), device=name)


def test_unavailable_cuda_lists_the_devices(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(gh.InputError, match=r"device is 'cuda', but this machine has cpu"):
        gh.load(tmp_path, device="cuda")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert device.resolve("cuda:1") == torch.device("cuda:1")
    with pytest.raises(gh.InputError, match=r"cpu, .*cuda, cuda:0, cuda:1; choose"):
        device.resolve("cuda:2")


def test_dtype_by_name(tmp_path: Path) -> None:
    gh.save(gh.build(gh.preset("tiny-decoder")), None, tmp_path / "model")
    for name in ("bfloat16", "torch.bfloat16", torch.bfloat16):
        model, _ = gh.load(tmp_path / "model", dtype=name)
        assert model.token_embedding.table.weight.dtype is torch.bfloat16
    assert gh.build(gh.preset("tiny-decoder"), dtype="float64").token_embedding.table.weight.dtype is torch.float64
    for name in ("int8", torch.int8, "strange"):
        with pytest.raises(gh.InputError, match=r"^dtype is '\w+', but it must be one of float32, bfloat16,"):
            gh.load(tmp_path / "model", dtype=name)
