"""What is said about this machine, as far as it can be checked anywhere."""

from __future__ import annotations

import torch

from glasshouse import device


def test_the_best_device_computes() -> None:
    there = device.best()
    x = torch.ones(4, 4, device=there, dtype=device.compute_type(there))
    assert (x @ x).sum().item() == 64


def test_memory_holds_this_process_and_is_no_fantasy() -> None:
    assert 2**28 < device.memory_bytes(torch.device("cpu")) < 2**50


def test_the_peak_is_measured_in_operations_a_second(monkeypatch: object) -> None:
    """A product that takes one second of a made-up clock runs at 2 n^3 operations a second."""
    ticks = iter(range(100))
    monkeypatch.setattr(device.time, "perf_counter", lambda: float(next(ticks)))
    assert device.matmul_peak(torch.device("cpu"), torch.float32, repeats=1) == 2 * 2048**3


def test_an_obstacle_to_compiling_is_named(monkeypatch: object) -> None:
    monkeypatch.setattr(device.shutil, "which", lambda name: None)
    assert device.compile_obstacle(torch.device("cpu")) == "no C++ compiler was found"
    monkeypatch.setattr(device.shutil, "which", lambda name: "/usr/bin/" + name)
    assert device.compile_obstacle(torch.device("cpu")) is None
