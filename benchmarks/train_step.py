"""Training step throughput compared with peers: forward, backward, AdamW, on the CPU, two sizes, eager and compiled.

    python benchmarks/train_step.py [--rounds 9] [--sizes small large] [--modes eager compiled]

Every model has the same depth, width, heads, context length, optimizer and GELU. Peers differ in which layers have
biases and in how they compute GELU, so each is compared with the glasshouse spec that does the same arithmetic. All
take turns within a round, the matmul peak too, so that a busy machine slows them alike; a ratio is the median over
rounds of the ratio within a round.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from figures import add_save, record, save
from torch import Tensor, nn
from torch.nn import functional as F

import glasshouse as gh
from glasshouse import device as machine

VOCAB_SIZE = 65


MODES = ("eager", "compiled")


@dataclass(frozen=True)
class Size:
    """Sizes of every model and of the training batch."""

    n_layers: int
    d_model: int
    n_heads: int
    context: int
    batch: int
    steps: int  # timed together

    @property
    def tokens(self) -> int:
        return self.context * self.batch

    @property
    def flops(self) -> int:
        """FLOPs of a step: 6 per matrix parameter and token, plus attention's two matmuls, forward and backward."""
        matrices = self.n_layers * 12 * self.d_model**2 + VOCAB_SIZE * self.d_model
        return self.tokens * (6 * matrices + 12 * self.n_layers * self.d_model * self.context)


SIZES = {
    "small": Size(n_layers=4, d_model=128, n_heads=4, context=64, batch=12, steps=10),
    "large": Size(n_layers=6, d_model=384, n_heads=6, context=256, batch=16, steps=1),
}


def glasshouse(size: Size, vocab_size: int = VOCAB_SIZE, **choices: object) -> nn.Module:
    no_dropout = {"dropout": 0.0, "attention_dropout": 0.0, "embed_dropout": 0.0}
    shape = {"n_layers": size.n_layers, "d_model": size.d_model, "n_heads": size.n_heads, "max_len": size.context}
    return gh.build(gh.preset("gpt2", vocab_size=vocab_size, **shape, **no_dropout, **choices))


def all_biases(size: Size) -> nn.Module:
    return glasshouse(size, feedforward="gelu")


def ffn_biases(size: Size) -> nn.Module:
    norm, head = {"kind": "layer", "bias": False}, {"kind": "next_token", "tied": False}
    return glasshouse(size, feedforward="gelu", norm=norm, head=head, qkv_bias=False, out_bias=False)


def no_biases(size: Size) -> nn.Module:
    norm = {"kind": "layer", "bias": False}
    return glasshouse(size, feedforward="gelu", norm=norm, qkv_bias=False, out_bias=False, ffn_bias=False)


def hf_gpt2(size: Size) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCAB_SIZE,
        n_layer=size.n_layers,
        n_embd=size.d_model,
        n_head=size.n_heads,
        n_positions=size.context,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
        activation_function="gelu",
        attn_implementation="sdpa",
    )

    class Logits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = GPT2LMHeadModel(config).train()

        def forward(self, ids: Tensor) -> Tensor:
            return self.model(input_ids=ids).logits

    return Logits()


def x_transformers(size: Size) -> nn.Module:
    from x_transformers import Decoder, TransformerWrapper

    layers = Decoder(
        dim=size.d_model,
        depth=size.n_layers,
        heads=size.n_heads,
        attn_flash=True,
        attn_dim_head=size.d_model // size.n_heads,
    )
    return TransformerWrapper(num_tokens=VOCAB_SIZE, max_seq_len=size.context, attn_layers=layers)


def torch_encoder(size: Size) -> nn.Module:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layer = nn.TransformerEncoderLayer(
                size.d_model, size.n_heads, 4 * size.d_model, 0.0, F.gelu, batch_first=True, norm_first=True
            )
            self.token = nn.Embedding(VOCAB_SIZE, size.d_model)
            self.position = nn.Embedding(size.context, size.d_model)
            self.stack = nn.TransformerEncoder(
                layer, size.n_layers, nn.LayerNorm(size.d_model), enable_nested_tensor=False
            )
            self.head = nn.Linear(size.d_model, VOCAB_SIZE, bias=False)
            self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(size.context))

        def forward(self, ids: Tensor) -> Tensor:
            x = self.token(ids) + self.position.weight
            return self.head(self.stack(x, mask=self.mask, is_causal=True))

    return Model()


MODELS: dict[str, Callable[[Size], nn.Module]] = {
    "ours, all biases": all_biases,
    "ours, ffn biases": ffn_biases,
    "ours, no biases": no_biases,
    "HF GPT2LMHeadModel": hf_gpt2,
    "x-transformers": x_transformers,
    "nn.TransformerEncoder": torch_encoder,
}


EQUIVALENT = {  # the glasshouse spec with the same arithmetic
    "HF GPT2LMHeadModel": "ours, all biases",
    "x-transformers": "ours, ffn biases",
    "nn.TransformerEncoder": "ours, all biases",
}


def make_step(model: nn.Module, size: Size, compiled: bool) -> Callable[[], None]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, VOCAB_SIZE, (size.batch, size.context + 1), generator=generator)
    inputs, targets = ids[:, :-1].contiguous(), ids[:, 1:].flatten()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    run = torch.compile(model) if compiled else model

    def step() -> None:
        loss = F.cross_entropy(run(inputs).flatten(0, 1), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def seconds(work: Callable[[], None], times: int) -> float:
    start = time.perf_counter()
    for _ in range(times):
        work()
    return (time.perf_counter() - start) / times


def measure(size: Size, compiled: bool, rounds: int) -> tuple[dict[str, list[float]], list[float]]:
    """Return each model's seconds per step and the seconds a step would take at the matmul peak, by round."""
    torch.manual_seed(0)
    steps = {name: make_step(build(size), size, compiled) for name, build in MODELS.items()}
    for step in steps.values():
        seconds(step, 3)  # compile, warm up
    results: dict[str, list[float]] = {name: [] for name in steps}
    ideal = []
    for _ in range(rounds):
        for name, step in steps.items():
            results[name].append(seconds(step, size.steps))
        ideal.append(size.flops / machine.measure_peak_flops(torch.device("cpu"), torch.float32))
    return results, ideal


def ratios(slower: list[float], faster: list[float]) -> list[float]:
    return [a / b for a, b in zip(slower, faster, strict=True)]


def ratio(slower: list[float], faster: list[float]) -> str:
    """Format the median and quartiles of the speed-up."""
    low, middle, high = statistics.quantiles(ratios(slower, faster), n=4, method="inclusive")
    return f"{middle:.3f} [{low:.3f} - {high:.3f}]"


def report(label: str, size: Size, mode: str, rounds: int) -> None:
    results, ideal = measure(size, mode == "compiled", rounds)
    print(f"\n{label}, {mode}: {size.n_layers} layers x {size.d_model}, context {size.context}, batch {size.batch}")
    peak = size.flops / statistics.median(ideal)
    print(f"one step is {size.flops / 1e9:.2f} GFLOP; matmul peak {peak / 1e9:.1f} GFLOP/s")
    print(f"{'':24}{'tokens/s':>9}  {'MFU':24}  {'speed-up over the peer'}")
    for name, times in results.items():
        speed = size.tokens / statistics.median(times)
        speedup = "" if name not in EQUIVALENT else f"ours {ratio(times, results[EQUIVALENT[name]])}"
        print(f"{name:24}{speed:9,.0f}  {ratio(ideal, times):24}  {speedup}")
    own = results.keys() - EQUIVALENT.keys()
    ours, best = (min(names, key=lambda n: statistics.median(results[n])) for names in (own, EQUIVALENT))
    print(f"our fastest ({ours}) / best peer ({best}): {ratio(results[best], results[ours])}", flush=True)
    case = f"train_step.{label}_{mode}"
    record(case, [size.tokens / one for one in results[ours]], 0, "tokens/s")
    record(f"{case}_best", ratios(results[best], results[ours]), 2)
    record(f"{case}_hf", ratios(results["HF GPT2LMHeadModel"], results["ours, all biases"]), 2)
    slowest = max(own, key=lambda name: statistics.median(results[name]))
    record(f"{case}_mfu", ratios(ideal, results[slowest]), 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9, help="rounds, one run of each model per round (default 9)")
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES), help="model sizes (default: all)")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES), help="(default: both)")
    add_save(parser)
    args = parser.parse_args()
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads")
    for name in args.sizes:
        for mode in args.modes:
            report(name, SIZES[name], mode, args.rounds)
    save(args.save)


if __name__ == "__main__":
    main()
