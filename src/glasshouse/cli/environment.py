"""What `glasshouse doctor` reports: this machine, what will be used on it, and what is missing."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import glasshouse as gh

if TYPE_CHECKING:
    import torch

EXTRAS = {  # of pyproject.toml, those for users: the library, and what it is for
    "cldr": ("Babel", "built-in datasets dates, langid, chat and preferences"),
    "fast": ("gigatoken", "faster encoding of a corpus"),
    "gguf": ("gguf", "models as GGUF files, for llama.cpp"),
    "lm-eval": ("lm-eval", "tasks of lm-eval in `glasshouse eval`"),
    "mlflow": ("mlflow", "metrics in MLflow (train.trackers)"),
    "onnx": ("onnxscript", "models as ONNX files, for ONNX Runtime"),
    "parquet": ("pyarrow", "Parquet and Arrow files as data"),
    "plots": ("matplotlib", "plots of a run's metrics"),
    "structured": ("llguidance", "answers that follow a JSON schema or a grammar"),
    "tensorboard": ("tensorboard", "metrics in TensorBoard"),
    "translation": ("sacrebleu", "BLEU and chrF"),
    "wandb": ("wandb", "metrics in Weights & Biases (train.trackers)"),
    "zstd": ("zstandard", "compressed text files (.zst)"),
}
NVIDIA = Path("/proc/driver/nvidia")


def software() -> dict[str, Any]:
    """Return what is known without torch."""
    return {
        "glasshouse": {"version": gh.__version__, "path": str(Path(gh.__file__).parent)},
        "python": {"version": platform.python_version(), "path": sys.executable},
        "platform": f"{platform.system()} {platform.release()}, {platform.machine()}",
    }


def hardware() -> dict[str, Any]:
    """Return what torch finds; it raises where torch cannot be imported."""
    import torch

    return {
        "torch": {"version": torch.__version__, "build": _build(torch.version)},
        "cpu": {
            "name": gh.device.cpu_name(),
            "cores": gh.device.cpu_cores(),
            "threads": torch.get_num_threads(),
            "native_bfloat16": gh.device.has_native_bfloat16(),
        },
        "memory_bytes": gh.device.memory_bytes(torch.device("cpu")),
        "gpus": list(_gpus()),
    }


def _build(version: Any) -> str:  # noqa: ANN401 - torch.version, a module
    if version.cuda:
        return f"CUDA {version.cuda}"
    return f"ROCm {version.hip}" if version.hip else "MPS" if sys.platform == "darwin" else "CPU"


def _gpus() -> Iterator[dict[str, Any]]:
    """Yield the GPUs that torch can use, and those that only the driver knows."""
    import torch

    known = _nvidia_gpus()
    for number in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        of = torch.cuda.get_device_properties(number)
        yield {
            "device": f"cuda:{number}",
            "name": of.name,
            "memory_bytes": of.total_memory,
            "compute_capability": f"{of.major}.{of.minor}",
            "driver": known[0][1] if known else None,  # one for all GPUs
        }
    if torch.backends.mps.is_available():
        memory = torch.mps.recommended_max_memory()
        yield {"device": "mps", "name": gh.device.cpu_name(), "memory_bytes": memory}
    elif not torch.cuda.is_available():
        for name, driver in known:
            yield {"device": None, "name": name, "driver": driver}


def _nvidia_gpus() -> list[tuple[str, str]]:
    """Return name and driver version of NVIDIA's GPUs as Linux knows them, whether or not torch can use them."""
    files = [*NVIDIA.glob("gpus/*/information"), NVIDIA / "version"]
    try:
        *gpus, version = (file.read_text() for file in files)
    except OSError:
        return []
    driver = re.search(r"\b\d{3}\.[\d.]+", version)
    models = (re.search(r"Model:\s*(.+)", gpu) for gpu in gpus)
    return [(model[1].strip(), driver[0] if driver else "unknown") for model in models if model]


def choices() -> dict[str, Any]:
    """Return the defaults of the package on this machine."""
    device = gh.device.fastest()
    dtype = gh.device.compute_dtype(device)
    return {
        "device": gh.device.describe(device),
        "precision": str(dtype).removeprefix("torch."),
        "attention": _attention(device, dtype),
        "compile": _compile(device),
        "tokenizer": gh.Tokenizer.train(texts=["any"], vocab_size=263).corpus_encoder().backend,
        "hub": _hub(),
    }


def _attention(device: torch.device, dtype: torch.dtype) -> dict[str, str]:
    """Ask for the attention backend of typical calls."""
    import torch

    gh.models  # noqa: B018 - imports the modules of gh.layers
    row = torch.arange(512)[None]
    last, slot = row[:, -1:], torch.zeros(1, 1, dtype=torch.long)
    masks = {
        "training": gh.layers.attend.mask.Mask(causal=True),
        "sliding window or packing": gh.layers.attend.mask.Mask(causal=True, window=64, positions=(row, row)),
        "decoding": gh.layers.attend.mask.Mask(causal=True, positions=(last, row), ordered=True, rows=slot),
    }
    chosen = {}
    for call, mask in masks.items():
        cached = mask.rows is not None
        s = gh.layers.attend.kernel.Situation(
            mask, 1 if cached else 512, 512, device, dtype, d_head=64, cached=cached
        )
        chosen[call] = gh.layers.attend.backends.choose_backend(s).name
    return chosen


def _compile(device: torch.device) -> dict[str, Any]:
    if not gh.device.compiles_by_default(device):
        reason = "it takes a minute, so by default only on CUDA; train.compile=yes turns it on"
        return {"used": False, "reason": reason}
    obstacle = gh.device.compile_obstacle(device)
    return {"used": obstacle is None, "reason": obstacle}


def _hub() -> dict[str, Any]:
    """Return where downloaded models are cached, and how the Hugging Face hub is reached."""
    import huggingface_hub
    from huggingface_hub import constants

    return {
        "cache": str(constants.HF_HUB_CACHE),
        "offline": bool(constants.HF_HUB_OFFLINE),
        "token": huggingface_hub.get_token() is not None,
    }


def optional(found: dict[str, Any]) -> dict[str, dict[str, str | None]]:
    """Return what adds to the package: what for, the version that is there, else how to get it."""
    rows: dict[str, dict[str, str | None]] = {}
    for extra, (library, purpose) in EXTRAS.items():
        try:
            version = f"{library} {importlib.metadata.version(library)}"
        except importlib.metadata.PackageNotFoundError:
            version = None
        rows[extra] = {"for": purpose, "found": version, "get": f"pip install 'glasshouse[{extra}]'"}
    if "torch" not in found:
        return rows
    rows["C++ compiler"] = {
        "for": "torch.compile on the CPU",
        "found": gh.device.find_cpp_compiler(),
        "get": {"darwin": "install Xcode's command line tools", "win32": "install Visual Studio's build tools"}.get(
            sys.platform, "install the system's package g++, such as apt install g++"
        ),
    }
    rows["browser"] = {
        "for": "opening the page",
        "found": gh.device.find_browser(),
        "get": "open the address that glasshouse look prints in a browser elsewhere",
    }
    for gpu in (gpu for gpu in found["gpus"] if gpu["device"] is None):
        get = _ways_to_cuda(found["torch"]["build"], gpu["driver"])
        rows["CUDA"] = {"for": f"training on the {gpu['name']}", "found": None, "get": get}
    return rows


def _ways_to_cuda(build: str, driver: str) -> str:
    """Describe what keeps torch from using a GPU that the driver reports."""
    if not build.startswith("CUDA"):
        return f"this torch is built for {build}; install the build that pytorch.org names for CUDA"
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        return f"CUDA_VISIBLE_DEVICES is {os.environ['CUDA_VISIBLE_DEVICES']!r}; unset it"
    return f"update the driver, {driver}, to one for {build}"


def unmet_requirements() -> Iterator[str]:
    """Yield a sentence for each library that the package needs and that is missing or too old."""
    try:
        required = importlib.metadata.requires("glasshouse") or []
    except importlib.metadata.PackageNotFoundError:  # a folder on PYTHONPATH
        return
    for requirement in (one for one in required if "extra ==" not in one):
        name, oldest = re.fullmatch(r"([\w.-]+)(?:>=([\d.]+))?.*", requirement).groups()  # type: ignore[union-attr]
        install = f"run pip install '{requirement}'."
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            yield f"{name} is not installed; {install}"
            continue
        if _numbers(version) < _numbers(oldest or ""):
            yield f"{name} is {version}, but it must be at least {oldest}; {install}"


def _numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version.partition("+")[0])]


def device_problem(device: torch.device) -> Iterator[str]:
    """Yield a sentence if the device does not compute."""
    import torch

    try:
        ones = torch.ones(4, 4, device=device, dtype=gh.device.compute_dtype(device))
        total = (ones @ ones).sum().item()
    except RuntimeError as error:
        yield f"{device.type} does not compute ({one_line(error)}); check its driver, or use the device cpu."
    else:
        if total != 64:
            yield f"{device.type} computes 4 x 4 x 4 as {total:g}; check its driver, or use the device cpu."


def one_line(error: Exception) -> str:
    """Return the start of an error's text on one line."""
    return " ".join(str(error).split())[:300]
