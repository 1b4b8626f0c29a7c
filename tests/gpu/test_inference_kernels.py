"""The kernels of decode steps, beside the operations of torch that they replace."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import glasshouse as gh
from glasshouse.generation.engine.inference_model import make_cache, prepare_for_inference, use_kernels
from glasshouse.layers import inference_kernels
from glasshouse.layers.cache import kernels as cache_kernels
from glasshouse.layers.cache.storage import write_kv
from glasshouse.layers.norm import RMSNorm
from glasshouse.layers.position import rotate_halves, rotate_interleaved
from glasshouse.models import Decoder

GPU = torch.device("cuda")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = list(itertools.product((1, 3), (1, 6, 32), (1, 5), (8, 24, 64)))  # batch, heads, length, width


def heads(batch: int, count: int, length: int, width: int, dtype: torch.dtype) -> Tensor:
    """Return [B, H, S, d] as a projection gives it: a part of a wider vector."""
    x = torch.randn(batch, length, count * width + 16, device=GPU, dtype=dtype)
    return x[..., 8 : 8 + count * width].view(batch, length, count, width).transpose(1, 2)


def assert_rounds_once(found: Tensor, exact: Tensor) -> None:
    """Assert that values are exact ones, computed in float32 in some eight operations and rounded to their dtype."""
    unit = torch.finfo(found.dtype).eps / 2
    slack = 16 * torch.finfo(torch.float32).eps * exact.abs().max()
    assert ((found.double() - exact).abs() <= 1.001 * unit * exact.abs() + slack).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_rotation_and_norm(shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    batch, _, length, width = shape
    x = heads(*shape, dtype)
    norm = RMSNorm(width, eps=1e-6, device=GPU, dtype=dtype)
    nn.init.normal_(norm.weight)
    exact = RMSNorm(width, eps=1e-6, device=GPU, dtype=torch.float64)
    exact.weight.data.copy_(norm.weight)
    assert_rounds_once(inference_kernels.KernelRMSNorm(norm)(x), exact(x.double()))
    for rows in {1, batch}:
        cos, sin = torch.randn(2, rows, 1, length, width // 2, device=GPU, dtype=dtype)
        for interleaved, reference in ((False, rotate_halves), (True, rotate_interleaved)):
            found = inference_kernels.rotate(x, cos, sin, interleaved=interleaved)
            assert found.shape == x.shape
            assert_rounds_once(found, reference(x.double(), cos.double(), sin.double()))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_cache_writes(shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    batch, count, length, width = shape
    k, v = heads(*shape, dtype), heads(*shape, dtype)
    offsets = torch.stack([torch.randperm(19, device=GPU)[:length] + 1 for _ in range(batch)])
    of_tokens = torch.randint(0, 5, (1, length), device=GPU)  # as in a mixed batch
    for rows in (torch.randperm(5, device=GPU)[:batch, None], *([of_tokens] if batch == 1 else [])):
        found = torch.randn(2, 5, count, 20, width, device=GPU, dtype=dtype)
        expected = found.clone()
        cache_kernels.write_kv(*found, rows, offsets, k, v)
        write_kv(*expected, rows, offsets, k, v)
        assert found.equal(expected)


@pytest.mark.parametrize(("start", "stop"), [(0, 300), (7, 8), (1, 257)])
def test_copy_of_a_row(start: int, stop: int) -> None:
    pool = torch.randn(2, 3, 4, 2, 300, 24, device=GPU)
    expected = pool.clone()
    expected[:, :, 1, :, start:stop] = expected[:, :, 3, :, start:stop]
    cache_kernels.copy_row(pool, 3, 1, start, stop)
    assert pool.equal(expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", inference_kernels.ACTIVATIONS)
def test_gates(kind: str, dtype: torch.dtype) -> None:
    act = {"swiglu": F.silu, "geglu": F.gelu, "geglu_tanh": lambda x: F.gelu(x, approximate="tanh")}[kind]
    gate, up = (4 * torch.randn(2, 3, 2 * 1500, device=GPU, dtype=dtype)).split(1500, -1)
    assert_rounds_once(inference_kernels.gate(gate, up, kind), act(gate.double()) * up.double())


def made(**settings: object) -> tuple[Decoder, Decoder]:
    """Return a decoder, and its inference copy with kernels."""
    torch.manual_seed(0)
    spec = gh.preset("tiny-decoder", position="rotary", norm="rms", feedforward="swiglu", **settings)
    model = gh.build(spec, device=GPU).eval()
    copy = prepare_for_inference(model, "copy", 2)
    use_kernels(copy, make_cache(copy, 2, 16, 0, 16))
    return model, copy


def test_a_model_gets_every_kernel() -> None:
    model, copy = made(qk_norm=True)
    kinds = {type(module).__name__ for module in copy.modules()}
    assert {"KernelRMSNorm", "KernelRotaryPosition", "KernelGatedFeedForward"} <= kinds
    assert not kinds & {"RMSNorm", "RotaryPosition", "FusedGateUpFeedForward"}
    ids = torch.randint(0, model.spec.vocab_size, (2, 9), device=GPU)
    with torch.inference_mode():
        assert (copy(ids) - model(ids)).norm() <= 1e-5 * model(ids).norm()


def test_hooks_keep_their_modules() -> None:
    seen: list[int] = []
    torch.manual_seed(0)
    spec = gh.preset("tiny-decoder", position="rotary", norm="rms", feedforward="swiglu")
    model = gh.build(spec, device=GPU).eval()
    model.stack.blocks[0].feedforward.layer.activation.register_forward_hook(lambda *_: seen.append(1))
    engine = gh.Engine(model, slots=1, max_len=16)
    kinds = [type(block.feedforward.layer).__name__ for block in engine._runner.model.stack.blocks]
    assert kinds == ["FusedGateUpFeedForward", *["KernelGatedFeedForward"] * (len(kinds) - 1)]
