"""The plan of serving: weights, KV cache, the largest batch, and the speed of prefill and decoding."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch

from glasshouse import hub, spec
from glasshouse.config import require
from glasshouse.errors import InputError
from glasshouse.generation.engine.capacity import cache_bytes
from glasshouse.generation.engine.inference_model import Weights, weight_copy_bytes
from glasshouse.models import Decoder, build
from glasshouse.models.checks import check_length
from glasshouse.training.plan.hardware import Gpu

# Of decode steps of llama-1b on an H200 (docs/lab/generation.md): the bandwidth that reading weights and cache
# reaches, the time of a layer's kernels beyond it, and the share of a large matmul's rate that prefill reaches.
READ_SHARE, LAYER_SECONDS, PREFILL_SHARE = 0.79, 20e-6, 0.63
USABLE = 0.9  # of a GPU's memory


@dataclass(frozen=True)
class WeightsPlan:
    """What one choice of `weights` takes."""

    weights: str
    weight_bytes: int  # in memory, with the model's own
    read_bytes: int  # of weights, in each decode step
    largest_batch: int  # sequences whose cache fits beside them
    batch: int  # sequences that decode at once
    step_seconds: float
    first_token_seconds: float  # of a single request
    last_first_token_seconds: float  # of the last, if all arrive at once

    @property
    def tokens_per_second(self) -> float:
        """Decoded tokens per second, of all sequences."""
        return self.batch / self.step_seconds if self.batch else 0.0


@dataclass(frozen=True)
class ServingPlan:
    """What serving a model on one GPU takes; bytes and seconds."""

    gpu: Gpu
    n_parameters: int
    requests: int
    prompt: int
    new: int
    kv_bytes_per_token: int
    kv_bytes_per_request: int
    choices: tuple[WeightsPlan, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as JSON values."""
        choices = [{**asdict(one), "tokens_per_second": one.tokens_per_second} for one in self.choices]
        return {**asdict(self), "choices": choices}


def load_meta_decoder(source: str) -> Decoder:
    """Return a decoder without data, in bfloat16: of a preset, a folder, a run or a hub id.

    >>> load_meta_decoder("llama-1b").token_embedding.table.weight.device
    device(type='meta')
    """
    model = (
        build(spec.preset(source), device="meta")
        if source in spec.presets()
        else hub.load(source, device="meta", dtype="stored")[0]
    )
    if not isinstance(model, Decoder):
        raise InputError(f"{source!r} is of kind {model.spec.kind}, but serving is planned for decoders; give one.")
    return model.to(torch.bfloat16)


def plan_serving(model: Decoder, gpu: Gpu, *, requests: int, prompt: int, new: int) -> ServingPlan:
    """Plan the decoding of `requests` sequences at once, of `prompt` and `new` tokens, on one GPU.

    >>> from glasshouse.training.plan.hardware import find_gpu
    >>> plan = plan_serving(load_meta_decoder("llama-1b"), find_gpu("h200"), requests=64, prompt=1024, new=256)
    >>> plan.kv_bytes_per_token
    32768
    """
    for name, value in {"requests": requests, "prompt": prompt, "new": new}.items():
        require(value > 0, name, value, "at least 1")
    check_length(model.spec, prompt + new, "prompt + new")
    weights = list(model.parameters())
    total = sum(weight.numel() for weight in weights)
    per_request = cache_bytes(model, 1, prompt + new, 0)
    per_token = per_request // (prompt + new + 1)
    table = model.token_embedding.table.weight
    tied = getattr(model.spec.head, "tied", False)
    read = total - (0 if tied else table.numel())  # of an embedding that is not tied, a row per token is read
    choices = []
    # With more than one sequence, int8 weights are converted in memory at each step, and int4 is for the CPU.
    offered: tuple[Weights, ...] = ("own", "copy", "int8") if requests == 1 else ("own", "copy")
    for choice in offered:
        copied = weight_copy_bytes(model, choice)
        held = 2 * total + copied
        used = 2 * read if choice in ("own", "copy") else copied
        largest = max(0, int(USABLE * gpu.memory - held) // per_request)
        batch = min(requests, largest)
        cached = batch * per_token * (prompt + new // 2)  # on average, half of the new tokens are there
        step = (used + cached) / (READ_SHARE * gpu.bandwidth) + 2 * batch * read / gpu.flops
        step += LAYER_SECONDS * model.spec.n_layers
        # A causal query attends to half of the prompt.
        attention = 4 * model.spec.n_layers * model.spec.n_heads * model.spec.d_head * prompt / 2
        prefill = prompt * (2 * read + attention) / (PREFILL_SHARE * gpu.flops)
        choices.append(WeightsPlan(choice, held, used, largest, batch, step, prefill + step, batch * prefill + step))
    return ServingPlan(gpu, total, requests, prompt, new, per_token, per_request, tuple(choices))
