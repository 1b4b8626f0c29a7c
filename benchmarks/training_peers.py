"""Training steps on one GPU against transformers: a large model, long contexts, masked and encoder-decoder models.

    python benchmarks/training_peers.py [--parts large long masked seq2seq] [--rounds 3] [--eager-only]

Both train the same architecture with the same sizes and dropout on the same preloaded batches: ours by `TrainStep`
with the defaults of gh.train on CUDA, transformers' by autocast to bfloat16, SDPA and fused AdamW, eager (as its
Trainer does by default) and compiled. A step is forward, backward, clipping and update. MFU is relative to 989
TFLOP/s, the dense bfloat16 rate of an H100 or H200 by its data sheet.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from figures import add_save, record, save
from torch import nn

import glasshouse as gh
from glasshouse.data import Batch
from glasshouse.models.flops import FlopEstimator
from glasshouse.training.optimizer import AdamW, make_optimizer
from glasshouse.training.step import TrainStep

PEAK = 989e12
STEPS = 4  # of a round
WARMUP_STEPS = 2
NO_DROPOUT = {"dropout": 0.0, "attention_dropout": 0.0, "embed_dropout": 0.0}
DOCUMENT = 1000  # tokens of a packed document, on average

Step = Callable[[Batch], object]


def our_step(model: nn.Module, *, float8: bool = False) -> Step:
    """Return a step with the defaults of gh.train."""
    made = TrainStep(
        model.train(),
        make_optimizer(model, AdamW(lr=1e-4)),
        precision=torch.bfloat16,
        defer_logits=True,
        float8=float8,
    )
    made.compile()
    return made.launch


def their_step(model: nn.Module, *, compiled: bool) -> Step:
    """Return a step of a transformers model as its Trainer does it."""
    optimizer = torch.optim.AdamW(model.train().parameters(), lr=1e-4, fused=True)
    run = torch.compile(model) if compiled else model

    def step(batch: Batch) -> None:
        labels = batch.targets.masked_fill(~batch.loss_mask, -100)
        with torch.autocast("cuda", torch.bfloat16):
            if batch.source is not None:
                logits = run(input_ids=batch.source, decoder_input_ids=batch.ids).logits
            else:
                logits = run(input_ids=batch.ids).logits
            loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def measure(name: str, step: Step, batches: list[Batch], rounds: int, flops: float = 0.0, *, figure: str) -> float:
    """Print, record and return the median tokens per second; `flops` is of one batch."""
    source = itertools.cycle(batches)
    begin = time.perf_counter()
    for _ in range(WARMUP_STEPS):
        step(next(source))
    torch.cuda.synchronize()
    compiling = time.perf_counter() - begin
    torch.cuda.reset_peak_memory_stats()
    tokens, speeds = batches[0].n_tokens, []
    tokens += 0 if batches[0].source is None else batches[0].source.numel()
    for _ in range(rounds):
        start = time.perf_counter()
        for _ in range(STEPS):
            step(next(source))
        torch.cuda.synchronize()
        speeds.append(STEPS * tokens / (time.perf_counter() - start))
    median = statistics.median(speeds)
    mfu = f", MFU {flops * median / tokens / PEAK:.1%}" if flops else ""
    print(
        f"{name:44} {median:9,.0f} tokens/s [{min(speeds):,.0f} - {max(speeds):,.0f}] "
        f"{torch.cuda.max_memory_allocated() / 2**30:5.1f} GiB, first steps {compiling:.0f} s{mfu}",
        flush=True,
    )
    record(f"training_peers.{figure}", speeds, 0, "tokens/s")
    record(f"training_peers.{figure}_memory", torch.cuda.max_memory_allocated() / 2**30, 1, "GiB")
    if flops:
        record(f"training_peers.{figure}_mfu", [flops * speed / tokens / PEAK for speed in speeds], 1, "%")
    return median


def free() -> None:
    gc.collect()
    torch.cuda.empty_cache()
    torch.compiler.reset()


def text_batches(vocabulary: int, rows: int, length: int, documents: bool = False) -> list[Batch]:
    """Return random batches of next tokens on the GPU, as a packed corpus has them if `documents`."""
    made = []
    for _ in range(4):
        ids = torch.randint(vocabulary, (rows, length + 1), device="cuda")
        mask = torch.ones(rows, length, dtype=torch.bool, device="cuda")
        batch = Batch(ids[:, :-1].contiguous(), ids[:, 1:].contiguous(), mask)
        if documents:
            batch = replace(batch, documents=(torch.rand(rows, length, device="cuda") < 1 / DOCUMENT).cumsum(1))
        made.append(batch)
    return made


def compare(
    name: str, batches: list[Batch], rounds: int, ours: Iterator[tuple[str, Step]], peers: Iterator[tuple[str, Step]]
) -> None:
    """Measure each system; print the ratio of the first of ours to each peer."""
    mine = [measure(f"{name}: glasshouse{kind}", step, batches, rounds, figure=name) for kind, step in ours]
    for kind, step in peers:
        theirs = measure(f"{name}: transformers, {kind}", step, batches, rounds, figure=f"{name}_hf_{kind}")
        record(f"training_peers.{name}_{kind}", mine[0] / theirs, 2)
        print(f"{name}: {mine[0] / theirs:.2f} of transformers, {kind}", flush=True)


def transformers_steps(make: Callable[[], nn.Module], eager_only: bool) -> Iterator[tuple[str, Step]]:
    for compiled in (False,) if eager_only else (False, True):
        yield ("compiled" if compiled else "eager"), their_step(make().cuda(), compiled=compiled)
        free()


def large(args: argparse.Namespace) -> None:
    """llama-1b, 1.24 billion parameters, context 2,048."""
    spec = gh.preset("llama-1b")
    batches = text_batches(spec.vocab_size, args.rows, 2048)
    speeds = []
    for kind, float8 in (("bfloat16", False), ("fp8", True)):
        model = gh.build(spec, device="cuda")
        flops = FlopEstimator(model)(batches[0].ids, None)
        step, figure = our_step(model, float8=float8), f"large_{kind}"
        speeds.append(measure(f"large: glasshouse, {kind}", step, batches, args.rounds, flops, figure=figure))
        del model, step
        free()
    record("training_peers.large_fp8_ratio", speeds[1] / speeds[0], 2)


def long(args: argparse.Namespace) -> None:
    """GPT-2 124M at long contexts: packed documents, which transformers does not mask, and plain rows."""
    import transformers

    for length in (8192, 32_768):
        spec = gh.preset("gpt2", **NO_DROPOUT, max_len=length)
        rows = 65_536 // length

        def ours(spec: Any = spec) -> Iterator[tuple[str, Step]]:  # noqa: ANN401
            yield "", our_step(gh.build(spec, device="cuda"))
            free()

        config = transformers.GPT2Config(n_positions=length, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)
        packed = text_batches(spec.vocab_size, rows, length, documents=True)
        step, figure = next(ours())[1], f"{length}_packed"
        measure(f"{length}: glasshouse, packed documents", step, packed, args.rounds, figure=figure)
        del step
        free()
        compare(
            str(length),
            text_batches(spec.vocab_size, rows, length),
            args.rounds,
            ours(),
            transformers_steps(lambda config=config: transformers.GPT2LMHeadModel(config), args.eager_only),
        )


def masked(args: argparse.Namespace) -> None:
    """BERT-base, context 512, 15% of the tokens predicted."""
    import transformers

    spec, batches = gh.preset("bert-base"), []
    for batch in text_batches(30_000, 64, 512):
        most = int(0.15 * 512) + 1
        positions = torch.rand(64, 512, device="cuda").argsort(1)[:, :most]
        mask = torch.zeros_like(batch.loss_mask).scatter_(1, positions, True)
        batches.append(replace(batch, loss_mask=mask, target_positions=positions))

    def ours() -> Iterator[tuple[str, Step]]:
        yield "", our_step(gh.build(spec, device="cuda"))
        free()

    peers = transformers_steps(lambda: transformers.BertForMaskedLM(transformers.BertConfig()), args.eager_only)
    compare("masked", batches, args.rounds, ours(), peers)


def seq2seq(args: argparse.Namespace) -> None:
    """BART-base: sources of 512 tokens, targets of 128."""
    import tempfile

    import transformers

    config = transformers.BartConfig(
        d_model=768, encoder_layers=6, decoder_layers=6, encoder_ffn_dim=3072, decoder_ffn_dim=3072
    )
    config.encoder_attention_heads = config.decoder_attention_heads = 12

    def make() -> nn.Module:
        return transformers.BartForConditionalGeneration(config)

    with tempfile.TemporaryDirectory() as folder:
        make().save_pretrained(folder)
        spec = gh.load(folder)[0].spec
    batches = [
        replace(batch, source=torch.randint(50_000, (64, 512), device="cuda"))
        for batch in text_batches(50_000, 64, 128)
    ]

    def ours() -> Iterator[tuple[str, Step]]:
        yield "", our_step(gh.build(spec, device="cuda"))
        free()

    compare("seq2seq", batches, args.rounds, ours(), transformers_steps(make, args.eager_only))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", nargs="+", default=["large", "long", "masked", "seq2seq"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rows", type=int, default=16, help="of 2,048 tokens in a micro-batch of the large model")
    parser.add_argument("--eager-only", action="store_true", help="do not compile transformers' models")
    add_save(parser)
    args = parser.parse_args()
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}")
    for part in args.parts:
        {"large": large, "long": long, "masked": masked, "seq2seq": seq2seq}[part](args)
    save(args.save, "cuda")


if __name__ == "__main__":
    main()
