"""Devices: selection, description, dtypes, memory, peak FLOPS, and support for torch.compile; a browser."""

from __future__ import annotations

import os
import platform
import shutil
import statistics
import sys
import time
import webbrowser
from pathlib import Path

import torch

from glasshouse import hints
from glasshouse.errors import InputError

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "not enough memory", "CUBLAS_STATUS_ALLOC_FAILED")
CPU_INFO = Path("/proc/cpuinfo")  # Linux
NATIVE_BFLOAT16 = {"avx512_bf16", "amx_bf16", "bf16"}  # the flags of x86, and the feature of ARM
MIN_SECONDS = 0.02  # seconds; long enough that launch overhead and clock resolution do not matter
# Of a large 16-bit matmul, by the first compute capability that has it, the newest first; data sheets, not measured.
# 12.0 is Blackwell for consumers, newer than 10.0 and slower: 2.1e14 by the 170 multiprocessors of an RTX 5090.
MULTIPROCESSOR_FLOPS = {
    (12, 0): 1.2e12,
    (10, 0): 10e12,
    (9, 0): 5.3e12,
    (8, 6): 1.2e12,
    (8, 0): 2.3e12,
    (0, 0): 0.8e12,
}


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


def describe(device: torch.device) -> str:
    """Return the device with its cores or its name.

    >>> describe(torch.device("cpu")) in (f"cpu ({cpu_cores()} cores)", "cpu (1 core)")
    True
    """
    if device.type == "cuda":
        return f"{device} ({torch.cuda.get_device_name(device)})"
    cores = cpu_cores()
    return f"cpu ({cores} core{'s' * (cores != 1)})" if device.type == "cpu" else str(device)


def cpu_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu_name() -> str:
    """Return the processor's model, or its architecture where the system does not say."""
    return _cpu_info().get("model name") or platform.processor() or platform.machine()


def has_native_bfloat16() -> bool | None:
    """Return whether the CPU computes in bfloat16; None where the system does not say."""
    info = _cpu_info()
    flags = info.get("flags", info.get("Features"))
    return None if flags is None else not NATIVE_BFLOAT16.isdisjoint(flags.split())


def _cpu_info() -> dict[str, str]:
    """Return the fields of /proc/cpuinfo for the first processor; empty where there is no such file."""
    first = CPU_INFO.read_text().partition("\n\n")[0] if CPU_INFO.is_file() else ""
    fields = (line.partition(":") for line in first.splitlines())
    return {name.strip(): value.strip() for name, _, value in fields}


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


def check_float8(device: torch.device) -> None:
    """Raise if the device has no fp8 matrix units."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 9):
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else device
        raise InputError(f"train.precision is 'fp8', but {name} has no fp8 matrix units; use train.precision=auto.")


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


def compiles_by_default(device: torch.device) -> bool:
    """Return whether steps are compiled by default; on a CPU, compiling takes a minute."""
    return device.type == "cuda"


def nominal_flops(device: torch.device) -> float:
    """Return about the FLOPS of a large 16-bit matmul on a CUDA device, by what it is: the same each time."""
    capability = torch.cuda.get_device_capability(device)
    rate = next(rate for since, rate in MULTIPROCESSOR_FLOPS.items() if capability >= since)
    return rate * torch.cuda.get_device_properties(device).multi_processor_count


def find_cpp_compiler() -> str | None:
    """Return the path of the C++ compiler that torch.compile needs on a CPU, or None if there is none."""
    return next(filter(None, map(shutil.which, ("g++", "clang++", "c++", "cl"))), None)


def find_browser() -> str | None:
    """Return the name of a browser that can open a window here, or None if there is none."""
    graphical = sys.platform in ("darwin", "win32") or any(map(os.environ.get, ("DISPLAY", "WAYLAND_DISPLAY")))
    if not graphical and "BROWSER" not in os.environ:  # webbrowser would start a text browser in the terminal
        return None
    try:
        return getattr(webbrowser.get(), "name", "the system's")
    except webbrowser.Error:
        return None


def compile_obstacle(device: torch.device) -> str | None:
    """Return why torch.compile does not work here, or None if it does."""
    if sys.version_info >= (3, 15):
        return f"torch.compile is not known to support Python {sys.version_info.major}.{sys.version_info.minor}"
    if device.type == "cpu" and find_cpp_compiler() is None:
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
