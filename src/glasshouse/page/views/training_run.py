"""Endpoints for a training run: metrics, checkpoint logs, a comparison of two checkpoints, and its plan."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from glasshouse import config
from glasshouse.config import JsonDict, Settings
from glasshouse.errors import InputError
from glasshouse.escaping import escape_control
from glasshouse.hub.run_checkpoints import RUN
from glasshouse.inspection import compare
from glasshouse.page import serialization
from glasshouse.page.forward_pass import ForwardPass
from glasshouse.page.trace import TraceCache
from glasshouse.page.view import Endpoint, View
from glasshouse.page.views.metric_curves import curves_of
from glasshouse.training.checkpoint.folder import LOCK, PROBES, SAMPLES
from glasshouse.training.checkpoint.store import list_checkpoints
from glasshouse.training.logging.journal import PER_HEAD, PER_LAYER, Journal
from glasshouse.training.plan import GPUS, find_gpu, plan_training
from glasshouse.training.run import Run, Train, default_schedule

try:
    import fcntl
except ImportError:  # Windows, where locks cannot be checked
    fcntl = None  # type: ignore[assignment]

CHECKPOINTS = 120  # maximum checkpoints whose logs are sent


@dataclass(frozen=True)
class Metrics(Settings):
    """Parameters of the metrics: those since a step."""

    since: int = 0
    version: str = ""  # version of the previous response; if outdated, everything is sent again


def metrics(traces: TraceCache, params: Metrics) -> JsonDict:
    """Return the metrics of a run from a step on, and its status."""
    run = _run(traces)
    curves = curves_of(run)
    with curves.lock:
        curves.read_new()
        since = max(0, params.since) if params.version == curves.version else 0
        told = {
            "version": curves.version,
            "since": since // curves.steps_per_point * curves.steps_per_point,
            "steps_per_point": curves.steps_per_point,
            "step": curves.last,
            "curves": curves.since(since),
            "best": curves.lowest("validation_loss"),
        }
    there, choice = list_checkpoints(run), Run.from_dict(config.read(run / RUN)).train
    taken = max([curves.last, *(one.step for one in there)])
    # A resumed run still has its earlier final model; early stopping ends before the planned steps.
    planned = choice.steps or curves.steps_in(choice.epochs)
    ended = taken == 0 or planned is None or taken >= planned or choice.patience > 0
    return {
        **told,
        "status": run_status(run, done=ended and any(one.name == "final" for one in there)),
        "steps": planned,
        "checkpoints": [{"name": one.name, "step": one.step} for one in there],
        "checkpoint_log_version": _checkpoint_log_version(run),
    }


def run_status(run: Path, done: bool) -> Literal["running", "finished", "stopped"]:
    """Return the status of a run: its folder is locked, its final model exists, or neither."""
    if is_locked(run):
        return "running"
    return "finished" if done else "stopped"


def is_locked(run: Path) -> bool:
    """Whether a process is training in a folder."""
    if fcntl is None:
        return False
    try:
        with (run / LOCK).open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # no lock file
        return False
    return False


@dataclass(frozen=True)
class RunSettings(Settings):
    """Parameters of the run settings."""


def _length(choice: Train) -> JsonDict:
    """Return how long a run is to be: its steps, its epochs, or the minutes that are yet to choose the steps."""
    if choice.steps is not None:
        return {"train.steps": f"{choice.steps:,}"}
    if choice.epochs is not None:
        return {"train.epochs": f"{choice.epochs:g}"}
    return {"train.minutes": f"{choice.minutes:g}"}


def run_settings(traces: TraceCache, params: RunSettings) -> JsonDict:
    """Return the main settings of a run by name."""
    run = Run.from_dict(config.read(_run(traces) / RUN))
    data, choice = run.data, run.train
    optimizer = choice.chosen_optimizer()
    model = run.model.to_dict()
    key = next(key for key in ("from", "preset", "kind") if key in model)
    named = {
        f"model.{key}": model[key],
        "data.path": ", ".join(data.path),
        "data.seq_len": f"{data.seq_len:,} tokens per sequence",
        **_length(choice),
        "train.batch_tokens": f"{choice.batch_tokens:,} tokens per step",
        "train.optimizer": optimizer.kind,
        "train.lr": f"{optimizer.lr:g}",
        "train.schedule": (choice.schedule or default_schedule(0)).kind,
        "train.grad_clip": f"{choice.grad_clip:g}" if choice.grad_clip else "none",
        "train.seed": str(choice.seed),
    }
    if choice.lora is not None:
        named["train.lora"] = f"rank {choice.lora.rank}"
    return {
        "settings": [{"name": name, "value": escape_control(str(value))} for name, value in named.items()],
        "batch_tokens": choice.batch_tokens,
    }


@dataclass(frozen=True)
class RunPlan(Settings):
    """Parameters of the plan of a run."""

    gpu: str = "h200"


def plan(traces: TraceCache, params: RunPlan) -> JsonDict:
    """Return what the run takes on one GPU, and the GPUs to choose from."""
    run = Run.from_dict(config.read(_run(traces) / RUN))
    return {"plan": plan_training(run, find_gpu(params.gpu)).to_dict(), "gpus": list(GPUS)}


@dataclass(frozen=True)
class CheckpointLog(Settings):
    """Parameters of the checkpoint logs."""


def probes(traces: TraceCache, params: CheckpointLog) -> JsonDict:
    """Return the probes by checkpoint: per head [checkpoint][layer][head], per layer [checkpoint][layer]."""
    lines, left_out = _spread(list(Journal(_run(traces) / PROBES).lines()))

    def found(names: Sequence[str]) -> JsonDict:
        return {name: [line.get(name) for line in lines] for name in names if any(name in line for line in lines)}

    return {
        "steps": [line["step"] for line in lines],
        "heads": found(PER_HEAD),
        "layers": found(PER_LAYER),
        "left_out": left_out,
    }


def samples(traces: TraceCache, params: CheckpointLog) -> JsonDict:
    """Return the samples at each checkpoint, control characters escaped."""
    lines, left_out = _spread(list(Journal(_run(traces) / SAMPLES).lines()))
    return {
        "steps": [line["step"] for line in lines],
        "samples": [
            [{name: _spelled(text) for name, text in one.items()} for one in line["samples"]] for line in lines
        ],
        "left_out": left_out,
    }


def _spread(lines: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], int]:
    """Return at most CHECKPOINTS lines, evenly spaced, and how many were omitted."""
    if len(lines) <= CHECKPOINTS:
        return lines, 0
    kept = np.linspace(0, len(lines) - 1, CHECKPOINTS).round().astype(int).tolist()
    return [lines[at] for at in kept], len(lines) - CHECKPOINTS


def _spelled(text: str) -> str:
    return "\n".join(escape_control(line.replace("\t", "    ")) for line in text.split("\n"))


@dataclass(frozen=True)
class CompareCheckpoints(Settings):
    """Parameters of a comparison of two checkpoints."""

    forward_pass: ForwardPass = field(default_factory=ForwardPass)
    compare_with: str = ""


def compare_checkpoints(traces: TraceCache, params: CompareCheckpoints) -> JsonDict:
    """Compare two checkpoints on a prompt, both without edits."""
    _run(traces)
    one, other = (
        traces.loader.get(checkpoint) for checkpoint in (params.forward_pass.checkpoint, params.compare_with)
    )
    inputs = one.inputs(params.forward_pass.prompt)
    with traces.lock:
        seen = compare(one.model, other.model, *inputs)
    return {
        "tokens": serialization.describe_tokens(seen.ids[0].tolist(), one.tok),
        "losses": [_mean(seen.loss_a[0].tolist()), _mean(seen.loss_b[0].tolist())],
        "residual_distance": serialization.encode_tensor(seen.residual_distance[:, 0]),
        "kl_divergence": serialization.encode_tensor(seen.kl_divergence[0]),
        **{
            name: serialization.encode_tensor(getattr(seen, name))
            for name in ("pattern_distance", "z_distance", "ffn_out_distance")
        },
    }


def _mean(losses: list[float]) -> float | None:
    """Return the mean of the finite values; None if there are none."""
    real = [one for one in losses if math.isfinite(one)]
    return sum(real) / len(real) if real else None


def _run(traces: TraceCache) -> Path:
    if traces.loader.run is None:
        raise InputError(f"{traces.loader.name!r} is not a run, so it has no metrics; open a run folder.")
    return traces.loader.run


def _checkpoint_log_version(run: Path) -> str:
    """Return a value that changes when the checkpoint logs grow."""
    sizes = [path.stat().st_size if path.is_file() else 0 for path in (run / PROBES, run / SAMPLES)]
    return ".".join(map(str, sizes))


def initial_requests(traces: TraceCache, forward_pass: ForwardPass, state: JsonDict) -> list[tuple[str, JsonDict]]:
    """Return the requests that the view sends when opened."""
    requests: list[tuple[str, JsonDict]] = [(name, {}) for name in ("metrics", "run_settings", "samples", "probes")]
    requests.append(("plan", {"gpu": state.get("run_gpu", RunPlan.gpu)}))
    if state["compare_with"] and state["compare_with"] != forward_pass.checkpoint:
        requests.append(
            (
                "compare_checkpoints",
                {"forward_pass": forward_pass.unedited.to_json(), "compare_with": state["compare_with"]},
            )
        )
    return requests


VIEW = View(
    name="run",
    title="Run",
    endpoints={
        "metrics": Endpoint(Metrics, metrics, needs_model=False),
        "run_settings": Endpoint(RunSettings, run_settings, needs_model=False),
        "plan": Endpoint(RunPlan, plan, needs_model=False),
        "probes": Endpoint(CheckpointLog, probes, needs_model=False),
        "samples": Endpoint(CheckpointLog, samples, needs_model=False),
        "compare_checkpoints": Endpoint(CompareCheckpoints, compare_checkpoints),
    },
    initial_requests=initial_requests,
    state_keys=("gpu", "left", "right", "scale", "score", "smoothing", "step"),
    applies=lambda loader: loader.run is not None,
)
