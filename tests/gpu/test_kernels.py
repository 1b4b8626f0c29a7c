"""What only a GPU shows: its kernels, block masks, and cached decode steps as CUDA graphs.

Run by `make gpu` on a machine that has one; `make test` leaves this folder out.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import glasshouse as gh
from glasshouse.layers.attend.backends import Explicit, Sdpa
from glasshouse.layers.attend.kernel import Attend
from glasshouse.layers.attend.mask import Mask
from glasshouse.models import Decoder, Seq2Seq
from glasshouse.models.stack import Stack

GPU = torch.device("cuda")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("length", [1, 5, 64, 200])
def test_sdpa_equals_explicit_on_random_masks(length: int, groups: int, biased: bool, dtype: torch.dtype) -> None:
    """Fully masked queries are among them: 0, and no NaN in the gradients either."""
    torch.manual_seed(0)
    q = torch.randn(2, 4, length, 32, device=GPU)
    k, v = torch.randn(2, 2, 4 // groups, length, 32, device=GPU)
    seen = torch.rand(2, 1, length, length, device=GPU) < 0.3
    seen[0, :, length // 2] = False
    bias = torch.randn(1, 4, length, length, device=GPU)
    exact = run_backend(Explicit, q.double(), k.double(), v.double(), bias.double() if biased else None, seen)
    rounded = [t.to(dtype) for t in (q, k, v)]
    fused = run_backend(Sdpa, *rounded, bias.to(dtype) if biased else None, seen)
    # A few roundings of the inputs, 2**-8 in bfloat16 and 2**-11 in float16; float32 sums some hundred terms.
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}[dtype]
    for ours, reference in zip(fused, exact, strict=True):
        assert ours.isfinite().all()
        assert (ours.double() - reference).norm() <= tolerance * reference.norm() + 1e-12
    assert (fused[0][0, :, length // 2] == 0).all()


def run_backend(
    backend: type[Sdpa | Explicit], q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, seen: Tensor
) -> list[Tensor]:
    inputs = [t.requires_grad_() for t in (q, k, v)]
    bias = q.new_zeros(()) if bias is None else bias
    dense = bias.masked_fill(~seen, -torch.inf)  # the form masks have on a GPU
    out = Attend(0.2, 0.0)(*inputs, backend(Mask(), dense=dense))
    return [out.detach(), *torch.autograd.grad(out.square().sum(), inputs)]


def make(name: str, length: int, **settings: object) -> Decoder | Seq2Seq:
    torch.manual_seed(0)
    off = {"dropout": 0.0, "embed_dropout": 0.0}
    size = {"vocab_size": 100, "d_model": 128, "n_heads": 4, "n_layers": 2, "max_len": length}
    return gh.build(gh.preset(name, **size, **off, init="normal", **settings), device=GPU)


def packed(length: int) -> tuple[Tensor, Tensor, Tensor]:
    """Draw ids, documents of about a hundred tokens, and lengths."""
    torch.manual_seed(1)
    ids = torch.randint(0, 100, (3, length), device=GPU)
    documents = (torch.rand(3, length, device=GPU) < max(0.01, 1 / length)).cumsum(1)
    return ids, documents, torch.tensor([length, length // 2, length - 1], device=GPU)


def results(
    model: torch.nn.Module, run: torch.nn.Module, ids: Tensor, lengths: Tensor, **arguments: Tensor
) -> list[Tensor]:
    """Return the logits of real tokens and the gradient of every parameter."""
    both = isinstance(model, Seq2Seq)
    if both:
        arguments |= {f"target_{name}": value for name, value in arguments.items()} | {"target_lengths": lengths}
    out = run(*([ids, ids] if both else [ids]), lengths=lengths, **arguments)
    out = out[torch.arange(ids.shape[1], device=GPU) < lengths[:, None]]
    return [out.detach(), *torch.autograd.grad(out.square().mean(), list(model.parameters()))]


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize(
    ("name", "windows", "documents"),
    [
        ("llama-small", (0,), True),
        ("llama-small", (64,), False),
        ("llama-small", (50, 0), True),
        ("vaswani-base", (0,), True),
    ],
)
@pytest.mark.parametrize("length", [7, 127, 128, 700])
def test_block_masks_equal_dense_masks(
    name: str, windows: tuple[int, ...], documents: bool, compiled: bool, length: int
) -> None:
    torch.compiler.reset()
    model = make(name, length, windows=windows)
    ids, numbers, lengths = packed(length)
    arguments = {"documents": numbers} if documents else {}
    blocks = results(model, torch.compile(model, fullgraph=True) if compiled else model, ids, lengths, **arguments)
    for stack in model.modules():
        if isinstance(stack, Stack):
            stack.backends = (Sdpa,)
    dense = results(model, model, ids, lengths, **arguments)
    for a, b in zip(blocks, dense, strict=True):
        # float32 throughout, sums in another order over up to 700 keys and 2100 tokens.
        assert (a - b).norm() <= 1e-4 * b.norm()


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_no_quadratic_memory(compiled: bool) -> None:
    """At 32,768 tokens a dense mask takes 1 GiB in its smallest form; the whole pass stays far below."""
    torch.compiler.reset()
    length = 32_768
    model = make("llama-small", length, windows=(256, 0))
    run = torch.compile(model, fullgraph=True) if compiled else model
    ids = torch.randint(0, 100, (1, length), device=GPU)
    documents = (torch.rand(1, length, device=GPU) < 0.001).cumsum(1)
    run(ids, documents=documents)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run(ids, documents=documents).square().mean().backward()
    grown = torch.cuda.max_memory_allocated() - before
    print(f"forward and backward at {length} tokens, {'compiled' if compiled else 'eager'}: {grown / 2**20:.0f} MiB")
    assert grown < length * length


@torch.no_grad()
def test_many_models_share_one_compiled_kernel() -> None:
    """Torch stops recompiling a function after eight times and runs it eagerly: not here, for 12 models."""
    torch.compiler.reset()
    length = 8192
    grown = []
    for n in range(12):
        model = make("llama-small", length, windows=(100 + n, 0), attention_scale=0.1 + n / 100, n_kv_heads=1 + n % 2)
        ids = torch.randint(0, 100, (1 + n % 3, length), device=GPU)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        model(ids, documents=torch.zeros_like(ids))
        grown.append((torch.cuda.max_memory_allocated() - before) / len(ids))
    assert max(grown) < 4 * length * length  # one head's scores


def test_rows_of_padding_only_in_half_precision() -> None:
    model = make("llama-small", 64).bfloat16()
    ids = torch.randint(0, 100, (2, 40), device=GPU)
    mask = torch.ones(2, 40, dtype=torch.bool, device=GPU)
    mask[1] = False
    out = model(ids, mask=mask)
    out[mask].float().square().mean().backward()
    assert out.isfinite().all()
    assert all(weight.grad.isfinite().all() for weight in model.parameters())


@torch.no_grad()
def test_cached_equals_uncached_when_compiled_with_cuda_graphs() -> None:
    """The cache's addresses and shapes never change, so a step can be captured once and replayed."""
    torch.compiler.reset()
    model = make("llama-small", 64, windows=(8, 0)).eval()
    ids = torch.randint(0, 100, (4, 24), device=GPU)
    expected = model(ids)
    cache = model.make_cache(4, 32)
    step = torch.compile(model, mode="reduce-overhead", fullgraph=True)
    outs = [model(ids[:, :8], cache=cache)]
    for t in range(8, 24):
        torch.compiler.cudagraph_mark_step_begin()
        outs.append(step(ids[:, t : t + 1].contiguous(), cache=cache).clone())
    assert torch._dynamo.utils.counters["inductor"]["cudagraph_skips"] == 0
    assert (torch.cat(outs, 1) - expected).abs().max() <= 1e-4 * expected.abs().max()
