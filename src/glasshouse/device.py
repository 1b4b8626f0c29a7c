"""Devices: selection, dtypes, memory, peak FLOPS, and support for torch.compile."""

from __future__ import annotations

import os
import shutil
import statistics
import sys
import time
from pathlib import Path

import torch

from glasshouse import hints
from glasshouse.errors import InputError

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "not enough memory", "CUBLAS_STATUS_ALLOC_FAILED")
MIN_SECONDS = 0.02  # seconds; long enough that launch overhead and clock resolution do not matter


def fastest() -> torch.device:
    """Return the fastest available device: an NVIDIA GPU, then Apple's, then the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda")
    if torch.backends.mps.is_available():
        return torch.device("mps")
    return torch.device("cpu")


def resolve(name: torch.device | str, setting: str = "device") -> torch.device:
    """Return the device of this name, if available; "auto" is the fastest one.

    >>> resolve("cpu")
    device(type='cpu')
    """
    counts = {"cpu": 1, "mps": int(torch.backends.mps.is_available()), "cuda": torch.cuda.device_count()}
    try:
        found = fastest() if name == "auto" else torch.device(name)
    except (RuntimeError, TypeError):  # unknown to torch
        found = None
    if found is None or (found.index or 0) >= {**counts, "meta": 1}.get(found.type, 0):
        several = (f"cuda:{number}" for number in range(counts["cuda"]))
        here = [*(kind for kind, count in counts.items() if count), *several]
        raise InputError(
            f"{setting} is {str(name)!r}, but this machine has {', '.join(here)}; choose from these, or 'auto'."
        )
    return found


def parse_dtype(name: torch.dtype | str) -> torch.dtype:
    """Return the floating-point dtype of this name.

    >>> parse_dtype("bfloat16")
    torch.bfloat16
    """
    known = {str(dtype).removeprefix("torch."): dtype for dtype in FLOATS}
    short = str(name).removeprefix("torch.")
    if short in hints.DTYPES:
        raise InputError(f"dtype is {short!r}; {hints.renamed(short, hints.DTYPES[short])}")
    if short not in known:
        raise InputError(f"dtype is {short!r}, but it must be one of {', '.join(known)}.")
    return known[short]


def compute_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype for matmuls in mixed precision.

    The CPU always uses float32: without hardware support bfloat16 is hundreds of times slower, and with it the same
    seed would give different results on different machines.

    >>> compute_dtype(torch.device("cpu"))
    torch.float32
    """
    if device.type != "cuda":
        return torch.float32
    return torch.bfloat16 if torch.cuda.get_device_capability(device) >= (8, 0) else torch.float16


def memory_bytes(device: torch.device) -> int:
    """Return the total memory of the device in bytes; for the CPU, at most a container's limit."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    total = _physical_bytes()
    limit = Path("/sys/fs/cgroup/memory.max")
    if limit.is_file() and (text := limit.read_text().strip()).isdigit():
        total = min(total, int(text))
    return total


def _physical_bytes() -> int:
    if sys.platform != "win32":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    import ctypes

    kilobytes = ctypes.c_ulonglong()
    ctypes.windll.kernel32.GetPhysicallyInstalledSystemMemory(ctypes.byref(kilobytes))
    return kilobytes.value * 1024


def is_out_of_memory(error: Exception) -> bool:
    """Tell whether an error means out of memory.

    >>> is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    True
    >>> is_out_of_memory(RuntimeError("shapes differ"))
    False
    """
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return any(message in str(error) for message in OUT_OF_MEMORY)


def compile_obstacle(device: torch.device) -> str | None:
    """Return why torch.compile does not work here, or None if it does."""
    if sys.version_info >= (3, 15):
        return f"torch.compile is not known to support Python {sys.version_info.major}.{sys.version_info.minor}"
    if device.type == "cpu" and not any(shutil.which(name) for name in ("g++", "clang++", "c++", "cl")):
        return "no C++ compiler was found"
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (7, 0):
        return "the GPU is older than Triton supports"
    return None


def measure_peak_flops(device: torch.device, dtype: torch.dtype, repeats: int = 7) -> float:
    """Measure the peak FLOPS of a large matmul, the reference of the MFU.

    The size grows until a matmul is long enough to time, so that slow machines do not wait for a huge one.
    """
    size, largest = 1024, 8192 if device.type == "cuda" else 4096
    while size < largest and _matmul_seconds(size, device, dtype, 1) < MIN_SECONDS:
        size *= 2
    return 2 * size**3 / _matmul_seconds(size, device, dtype, repeats)


def _matmul_seconds(size: int, device: torch.device, dtype: torch.dtype, repeats: int) -> float:
    """Return the median time of a product of two square matrices."""
    generator = torch.Generator(device).manual_seed(0)  # leaves the global random state alone
    a, b = torch.randn(2, size, size, device=device, generator=generator).to(dtype)
    times = []
    for _ in range(repeats + 2):  # two for warm-up
        start = time.perf_counter()
        c = a @ b
        c[0, 0].item()  # synchronises
        times.append(time.perf_counter() - start)
    return statistics.median(times[2:])
