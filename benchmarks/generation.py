"""Generation throughput compared with transformers and with the memory-bandwidth bound, with random weights.

    python benchmarks/generation.py [--device cpu] [--rounds 3] [--parts decode beam] [--quantized]

A prompt has 64 tokens and there is no EOS token, so every system generates the same number of tokens. Both libraries
load the same weights from one folder. Times are of a whole call, prefill included. Systems take turns within a round,
and each round has new prompts, as prefix caching would skip the prefill of old ones. Numbers are medians over rounds
with half the range; a ratio is the median over rounds of the ratio within a round, with its range.
"""

from __future__ import annotations

import argparse
import functools
import math
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from figures import add_save, record, save
from torch import Tensor, nn

import glasshouse as gh
from glasshouse import device as machine
from glasshouse.generation.engine.inference_model import prepare_for_inference, weight_copy_bytes
from glasshouse.generation.engine.slots import SequenceState
from glasshouse.generation.sampling.sampler import Sampler
from glasshouse.generation.speculation import Drafts, Speculator
from glasshouse.layers.linear.prepacked import ColumnMajorLinear, PrepackedLinear

PROMPT = 64  # tokens
NEW = 256  # tokens
MEAN_LENGTH = PROMPT + NEW // 2
WARM_UP = 8  # tokens

TokenLists = list[list[int]]
Generator = Callable[[TokenLists, int], TokenLists]  # (prompts, max_new_tokens) -> new tokens


# Measuring


def note(message: str) -> None:
    print(f"  {message}", file=sys.stderr, flush=True)


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    begin = time.perf_counter()
    result = work()
    return time.perf_counter() - begin, result


def cell(values: Sequence[float], digits: int = 1) -> str:
    return f"{statistics.median(values):,.{digits}f} ±{(max(values) - min(values)) / 2:.{digits}f}"


def line(name: object, *cells: str) -> None:
    print(f"{name!s:28}" + "".join(f"{one:>22}" for one in cells))


def ratios(slower: Sequence[float], faster: Sequence[float]) -> list[float]:
    return [a / b for a, b in zip(slower, faster, strict=True)]


def ratio(slower: Sequence[float], faster: Sequence[float]) -> str:
    """Format the median and the range of the speed-up."""
    times = ratios(slower, faster)
    return f"{statistics.median(times):.2f} [{min(times):.2f} - {max(times):.2f}]"


def random_prompts(count: int, vocabulary: int, length: int = PROMPT) -> TokenLists:
    return [[random.randrange(vocabulary) for _ in range(length)] for _ in range(count)]


def common_prefix(a: TokenLists, b: TokenLists) -> int:
    """Return the length of the shortest common prefix of two lists of sequences, compared pairwise."""
    return min(
        next((i for i, (x, y) in enumerate(zip(*rows, strict=True)) if x != y), len(rows[0]))
        for rows in zip(a, b, strict=True)
    )


@dataclass
class Result:
    """Times and generated tokens of one system, by round."""

    seconds: list[float] = field(default_factory=list)
    texts: list[TokenLists] = field(default_factory=list)

    def rates(self) -> list[float]:
        """Return new tokens per second, by round."""
        return [sum(map(len, text)) / one for one, text in zip(self.seconds, self.texts, strict=True)]

    def agreement(self, other: Result) -> str:
        equal = min(common_prefix(a, b) for a, b in zip(self.texts, other.texts, strict=True))
        return f"{equal} of {len(self.texts[0][0])}"


def measure(
    systems: dict[str, Generator], draw: Callable[[], TokenLists], new: int, rounds: int
) -> dict[str, Result]:
    for generate in systems.values():
        generate(draw(), WARM_UP)
    results = {name: Result() for name in systems}
    for number in range(rounds):
        prompts = draw()
        for name, generate in systems.items():
            seconds, texts = timed(lambda: generate(prompts, new))  # noqa: B023 (called at once)
            results[name].seconds.append(seconds)
            results[name].texts.append(texts)
            note(f"round {number + 1} of {rounds}: {name}, {seconds:.1f} s")
    return results


def weight_bytes(model: nn.Module) -> int:
    """Return the bytes of weights that a decode step must read.

    It reads only a few rows of the position embedding; the token embedding is tied to the head and is read whole.
    """
    weights = [one for name, one in model.named_parameters() if not name.startswith("stack.position")]
    return sum(one.numel() * one.element_size() for one in weights)


def cache_bytes(model: nn.Module, batch_size: int, length: int) -> int:
    """Return the bytes of the KV cache that a decode step must read, at this mean sequence length."""
    s = model.spec
    itemsize = model.token_embedding.table.weight.element_size()
    return 2 * s.n_layers * s.n_kv_heads * s.d_head * length * batch_size * itemsize


# The systems


def by_engine(model: nn.Module, slots: int, beams: int = 1, **choices: Any) -> Generator:  # noqa: ANN401 (gh.Engine's)
    engine = gh.Engine(model, slots=slots, max_len=PROMPT + NEW, **choices)

    def generate(prompts: TokenLists, new: int) -> TokenLists:
        requests = [engine.submit(prompt, max_new_tokens=new, beams=beams) for prompt in prompts]
        engine.run()
        return [request.ids for request in requests]

    return generate


def by_matmuls(model: nn.Module, rows: int) -> Generator:
    """Run the engine's matmuls and nothing else: a lower bound on the time of a step."""
    prepared = prepare_for_inference(model, "copy", rows)
    linears = [one for one in prepared.modules() if isinstance(one, ColumnMajorLinear | PrepackedLinear)]
    inputs = {one.in_features: torch.randn(rows, one.in_features) for one in linears}

    @torch.inference_mode()
    def generate(prompts: TokenLists, new: int) -> TokenLists:
        for _ in range(new):
            for one in linears:
                one(inputs[one.in_features])
        return [[0] * new] * rows

    return generate


def by_transformers(model: nn.Module, **choices: object) -> Generator:
    def generate(prompts: TokenLists, new: int) -> TokenLists:
        ids = torch.tensor(prompts)
        mask = torch.ones_like(ids)
        fixed = {"max_new_tokens": new, "do_sample": False, "pad_token_id": 0, "disable_compile": True}
        return model.generate(ids, attention_mask=mask, **fixed, **choices)[:, -new:].tolist()

    return generate


def build_both(config: Any) -> tuple[nn.Module, nn.Module]:  # noqa: ANN401 (a transformers config)
    """Return a transformers model with random weights and ours with the same weights."""
    import transformers

    transformers.logging.disable_progress_bar()
    transformers.logging.set_verbosity_error()
    theirs = getattr(transformers, config.architectures[0])(config).eval()
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        ours, _ = gh.load(folder)
    return theirs, ours


@functools.cache
def gpt2_models() -> tuple[nn.Module, nn.Module]:
    from transformers import GPT2Config

    theirs, ours = build_both(GPT2Config(bos_token_id=None, eos_token_id=None, architectures=["GPT2LMHeadModel"]))
    assert gh.count_parameters(ours.spec) == gh.count_parameters(gh.preset("gpt2"))
    return theirs, ours


# On the CPU


def read_bandwidth(repeats: int = 5) -> float:
    """Return the highest read bandwidth, in bytes per second, of several reductions over 512 MiB."""
    numbers = torch.ones(2**27)
    matrix, vector, rows = numbers.view(2**14, 2**13), torch.ones(2**13), torch.ones(4, 2**13)
    reductions: list[Callable[[], Tensor]] = [
        numbers.sum,
        numbers.max,
        lambda: torch.dot(*numbers.chunk(2)),
        lambda: torch.mv(matrix, vector),
        lambda: nn.functional.linear(rows, matrix),
    ]
    return max(numbers.nbytes / timed(reduce)[0] for _ in range(repeats) for reduce in reductions)


def decode(rounds: int, quantized: bool) -> None:
    """Decode at batch sizes 1 and 8, GPT-2 small."""
    theirs, ours = gpt2_models()
    bandwidth = read_bandwidth()
    found = {}
    for rows in (1, 8):
        note(f"decode, batch {rows}")
        systems = {
            "ours": by_engine(ours, rows),
            "HF, dynamic cache": by_transformers(theirs, use_cache=True),
            "HF, static cache": by_transformers(theirs, use_cache=True, cache_implementation="static"),
            "our matmuls alone": by_matmuls(ours, rows),
        }
        if quantized:
            systems |= {f"ours, {weights}": by_engine(ours, rows, weights=weights) for weights in ("int8", "int4")}
        found[rows] = measure(systems, lambda: random_prompts(rows, ours.spec.vocab_size), NEW, rounds)  # noqa: B023
        bandwidth = max(bandwidth, read_bandwidth())
    print(f"\nGPT-2 small, float32, prompt {PROMPT}, {NEW} new; memory read bandwidth {bandwidth / 1e9:.1f} GB/s")
    line("", "tokens/s", "speed-up over best HF", "bandwidth used (MBU)", "same tokens as HF")
    for rows, results in found.items():
        peers = [name for name in results if name.startswith("HF")]
        best = results[min(peers, key=lambda name: statistics.median(results[name].seconds))]
        for name, result in results.items():
            weights = name.removeprefix("ours, ")
            to_read = weight_copy_bytes(ours, weights) if weights in ("int8", "int4") else weight_bytes(ours)
            bound = (to_read + cache_bytes(ours, rows, MEAN_LENGTH)) / bandwidth
            share = cell([bound * NEW / one for one in result.seconds], 2) if rows == 1 else ""
            speedup = ratio(best.seconds, result.seconds)
            same = "" if name == "our matmuls alone" else result.agreement(best)
            line(f"batch {rows}, {name}", cell(result.rates()), speedup, share, same)
            if suffix := {"ours, int8": "_int8", "ours, int4": "_int4", "our matmuls alone": "_matmuls"}.get(name):
                record(f"generation.cpu_{rows}{suffix}", result.rates(), 0, "tokens/s")
        record(f"generation.cpu_{rows}", results["ours"].rates(), 0, "tokens/s")
        record(f"generation.cpu_{rows}_hf", best.rates(), 0, "tokens/s")
        record(f"generation.cpu_{rows}_ratio", ratios(best.seconds, results["ours"].seconds), 2)


def loss() -> None:
    """Measure the held-out loss of quantized weights, of the bundled model of Python code."""
    model, tok = gh.load("python-3m")
    text = "".join(text for _, text in gh.data.builtin_dataset("stdlib").items("test"))
    length, count = model.spec.max_len + 1, 64
    ids = torch.tensor(tok.encode(text))
    rows = ids[: len(ids) // length * length].view(-1, length)
    rows = rows[torch.randperm(len(rows))[:count]]
    n_bytes = sum(len(tok.decode_bytes(row[1:].tolist())) for row in rows)
    targets = rows[:, 1:].flatten()
    print(f"\npython-3m, {n_bytes:,} held-out bytes in {len(targets):,} tokens")
    line("", "bits per byte", "KL divergence, bits", "same argmax")
    full: Tensor | None = None
    bits_of = {}
    with torch.inference_mode():
        for weights in ("own", "int8", "int4"):
            prepared = prepare_for_inference(model, weights, 8)
            found = torch.cat([prepared(row[None, :-1])[0] for row in rows]).log_softmax(-1)
            full = found if full is None else full
            bits = float(nn.functional.nll_loss(found, targets, reduction="sum")) / math.log(2) / n_bytes
            kl_divergence = float((full.exp() * (full - found)).sum(-1).mean()) / math.log(2)
            same = float((full.argmax(-1) == found.argmax(-1)).float().mean())
            name = "float32" if weights == "own" else weights
            line(name, f"{bits:.5f}", f"{kl_divergence:.1e}", f"{same:.2%}")
            bits_of[name] = bits
            record(f"generation.loss_{name}", bits, 5, "bits per byte")
    record("generation.loss_int4_more", bits_of["int4"] / bits_of["float32"] - 1, 1, "%")


def beam(rounds: int) -> None:
    """Beam search with four beams, T5 small."""
    from transformers import T5Config

    sources, beams, new = 8, 4, 64
    note(f"beam, {sources} sources")
    config = T5Config(eos_token_id=None, decoder_start_token_id=0, architectures=["T5ForConditionalGeneration"])
    theirs, ours = build_both(config)
    assert gh.count_parameters(ours.spec) == gh.count_parameters(gh.preset("t5-small"))

    systems = {
        "ours": by_engine(ours, sources * beams, source_len=PROMPT, beams=beams),
        "HF": by_transformers(theirs, num_beams=beams),
    }
    results = measure(systems, lambda: random_prompts(sources, ours.spec.vocab_size), new, rounds)
    print(f"\nT5 small, float32, {beams} beams, {sources} sources of {PROMPT}, {new} new")
    line("", "tokens/s", "speed-up over HF", "same tokens as HF")
    for name, result in results.items():
        speedup = ratio(results["HF"].seconds, result.seconds)
        line(name, cell(result.rates()), speedup, result.agreement(results["HF"]))
    record("generation.beam_ratio", ratios(results["HF"].seconds, results["ours"].seconds), 2)


class CountingSpeculator:
    """Wraps a speculator and counts draft tokens."""

    def __init__(self, inner: Speculator) -> None:
        self.inner, self.n_draft_tokens = inner, inner.n_draft_tokens
        self.drafted = 0
        self.passes = 0  # forward passes times sequences, with drafts or without

    def setup(self, model: Any, slots: int, max_len: int) -> None:  # noqa: ANN401
        self.inner.setup(model, slots, max_len)

    def propose(self, rows: Sequence[SequenceState], sampler: Sampler) -> Drafts | None:
        drafts = self.inner.propose(rows, sampler)
        self.passes += len(rows)
        self.drafted += 0 if drafts is None else int(drafts.counts.sum())
        return drafts

    def move(self, old: int, new: int) -> None:
        self.inner.move(old, new)


def first_layers(model: nn.Module, count: int) -> nn.Module:
    """Return a model of the first layers alone, with the same embedding, final norm and head."""
    draft = gh.build(gh.preset("gpt2", n_layers=count, end_ids=(), start_id=None)).eval()
    state = model.state_dict()
    draft.load_state_dict({name: state[name] for name in draft.state_dict()})
    return draft


def speculation(rounds: int) -> None:
    """Speculative decoding by prompt lookup and by a draft model of the first layers, on a repetitive prompt."""
    _, ours = gpt2_models()
    note("speculation")
    counted = {
        "prompt lookup, 8 drafts": CountingSpeculator(gh.generation.PromptLookup()),
        "first 2 layers, 4 drafts": CountingSpeculator(gh.generation.DraftModel(first_layers(ours, 2))),
    }
    systems = {"plain": by_engine(ours, 1)}
    systems |= {name: by_engine(ours, 1, speculator=one) for name, one in counted.items()}

    def repetitive() -> TokenLists:
        return [[random.randrange(ours.spec.vocab_size) for _ in range(PROMPT // 4)] * 4]

    results = measure(systems, repetitive, NEW, rounds)
    distinct = statistics.mean(len(set(texts[0])) for texts in results["plain"].texts)
    print(f"\nspeculative decoding, GPT-2 small, batch 1, {NEW} new after a repetitive prompt")
    print(
        f"({distinct:.0f} distinct tokens of {NEW} with random weights: not representative of real acceptance rates)"
    )
    line("", "tokens/s", "speed-up over plain", "drafts accepted", "same tokens as plain")
    for name, result in results.items():
        speedup, accepted = ratio(results["plain"].seconds, result.seconds), ""
        if one := counted.get(name):
            generated = WARM_UP + NEW * rounds  # each pass gives one token plus the accepted drafts
            accepted = f"{generated - one.passes:,} of {one.drafted:,}"
        line(name, cell(result.rates()), speedup, accepted, result.agreement(results["plain"]))
    lookup = results["prompt lookup, 8 drafts"]
    record("generation.lookup_ratio", ratios(results["plain"].seconds, lookup.seconds), 2)


def gqa(rounds: int) -> None:
    """Time decode steps with a long context in the KV cache, by number of key-value heads."""
    rows, context, heads, kinds = 8, 2048, 16, (16, 4, 1)
    shape = {
        "n_layers": 4,
        "d_model": 1024,
        "n_heads": heads,
        "d_ff": 2816,
        "vocab_size": 1024,
        "max_len": context + 1,
    }
    note(f"gqa, {rows} x {context} tokens cached")

    def make_step(kv_heads: int) -> tuple[nn.Module, Callable[[], object]]:
        model = gh.build(gh.preset("llama-small", n_kv_heads=kv_heads, **shape)).eval()
        cache = model.make_cache(rows, context + 1)
        for tensor in (*cache.keys, *cache.values):
            tensor.normal_()  # untouched zeros would all map to one page of memory
        ids = torch.zeros(rows, 1, dtype=torch.long)

        def step() -> None:
            cache.lengths.fill_(context)
            model(ids, cache=cache)

        return model, step

    with torch.inference_mode():
        steps = {kv_heads: make_step(kv_heads) for kv_heads in kinds}
        found: dict[int, list[float]] = {kv_heads: [] for kv_heads in kinds}
        for number in range(rounds + 1):
            for kv_heads, (_, step) in steps.items():
                seconds, _ = timed(lambda: [step() for _ in range(10)])  # noqa: B023 (called at once)
                if number > 0:  # the first is the warm-up
                    found[kv_heads].append(seconds / 10)
    print(
        f"\ndecode step, {heads} heads of 64, 4 layers, float32, batch {rows}, {context:,} tokens cached per sequence"
    )
    line("", "bytes per token", "MB read per step", "ms per step", f"speed-up over {heads}")
    for kv_heads, (model, _) in steps.items():
        token = model.make_cache(1, 2).n_bytes - model.make_cache(1, 1).n_bytes
        read = (weight_bytes(model) + cache_bytes(model, rows, context)) / 1e6
        took = cell([1e3 * one for one in found[kv_heads]])
        line(f"{kv_heads} key-value heads", f"{token:,}", f"{read:.0f}", took, ratio(found[heads], found[kv_heads]))


# On a GPU


def device_seconds(work: Callable[[], object], repeats: int = 20) -> float:
    """Return the median GPU time of work."""
    times = []
    for _ in range(repeats + 3):  # three to warm up
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(times[3:])


def copy_bandwidth() -> float:
    """Return the bandwidth of a copy within GPU memory, in bytes read and written per second."""
    source = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / device_seconds(lambda: target.copy_(source))


@functools.cache
def llama() -> nn.Module:
    spec = gh.preset("llama-1b", max_len=4608, end_ids=())
    return gh.build(spec, device="cuda", dtype=torch.bfloat16).eval()


@functools.cache
def steady_rates(rows: int, rounds: int) -> list[float]:
    """Return decode throughput in tokens/s, from when all requests have their first token to the last, by round.

    On a GPU a step's tokens arrive while the next step runs, so time is measured when tokens arrive.
    """
    engine = gh.Engine(llama(), slots=rows, max_len=PROMPT + NEW, prefill_chunk=2048)
    rates = []
    for number in range(rounds + 1):
        prompts = random_prompts(rows, engine.spec.vocab_size)
        requests = [engine.submit(prompt, max_new_tokens=NEW) for prompt in prompts]
        while not all(request.ids for request in requests):
            engine.step()
        begin, before = time.perf_counter(), sum(len(request.ids) for request in requests)
        engine.run()
        seconds = time.perf_counter() - begin
        rates.append((sum(len(request.ids) for request in requests) - before) / seconds)
        note(f"batch {rows}, round {number} of {rounds}: {rates[-1]:,.0f} tokens/s")
    return rates[1:]  # the first compiles and captures CUDA graphs


def steady(rounds: int) -> None:
    """Decode with all slots busy and requests of one length."""
    bandwidth = copy_bandwidth()
    found = {rows: steady_rates(rows, rounds) for rows in (1, 64, 256)}
    print(f"\nLlama 1B, bfloat16, {PROMPT} + {NEW} tokens; memory copy bandwidth {bandwidth / 1e9:,.0f} GB/s")
    line("", "tokens/s", "ms per step", "bandwidth used (MBU)")
    for rows, rates in found.items():
        bound = (weight_bytes(llama()) + cache_bytes(llama(), rows, MEAN_LENGTH)) / bandwidth
        steps = [rows / rate for rate in rates]
        shares = cell([bound / step for step in steps], 2)
        line(f"batch {rows}", cell(rates, 0), cell([1e3 * step for step in steps], 3), shares)
        record(f"generation.steady_{rows}", rates, 0, "tokens/s")


@dataclass
class Calls:
    """Rates of whole calls in tokens/s, prefill included, and from when all requests have their first token on."""

    whole: list[float] = field(default_factory=list)
    decode: list[float] = field(default_factory=list)

    def add(self, engine: gh.Engine, prompts: TokenLists) -> None:
        begin = time.perf_counter()
        requests = [engine.submit(prompt, max_new_tokens=NEW) for prompt in prompts]
        while not all(request.ids for request in requests):
            engine.step()
        first, before = time.perf_counter(), sum(len(request.ids) for request in requests)
        engine.run()
        end, total = time.perf_counter(), len(requests) * NEW
        self.whole.append(total / (end - begin))
        self.decode.append((total - before) / (end - first))


def theirs_on_gpu() -> nn.Module | None:
    """Return transformers' model of the same size, or None if it is not installed."""
    try:
        import transformers
    except ImportError:
        return None
    s = llama().spec
    config = transformers.LlamaConfig(
        vocab_size=s.vocab_size,
        hidden_size=s.d_model,
        intermediate_size=s.d_ff,
        num_hidden_layers=s.n_layers,
        num_attention_heads=s.n_heads,
        num_key_value_heads=s.n_kv_heads,
        head_dim=s.d_head,
        tie_word_embeddings=True,
        eos_token_id=None,
        bos_token_id=None,
    )
    with torch.device("cuda"):
        model = transformers.LlamaForCausalLM(config).to(torch.bfloat16).eval()
    assert sum(one.numel() for one in model.parameters()) == gh.count_parameters(s)
    return model


def calls(rounds: int) -> None:
    """Whole calls of one request and of 64 at once, prompts of 128: by default, in other modes, and transformers'."""
    length, model, bandwidth = 128, llama(), copy_bandwidth()
    modes: dict[str, dict[str, Any]] = {
        "default": {},
        "compile=True": {"compile": True},
        "batch_invariant": {"batch_invariant": True},
    }
    theirs = theirs_on_gpu()
    print(f"\nLlama 1B, bfloat16, {length} + {NEW} tokens; memory copy bandwidth {bandwidth / 1e9:,.0f} GB/s")
    line("", "whole call, tokens/s", "decode alone", "whole / decode", "decode MBU", "warm-up, s")
    for rows in (1, 64):
        bound = (weight_bytes(model) + cache_bytes(model, rows, length + NEW // 2)) / bandwidth
        for name, choices in modes.items():
            engine = gh.Engine(model, slots=rows, max_len=length + NEW, **choices)
            warm_up, _ = timed(engine.warm_up)
            found = Calls()
            for _ in range(rounds + 1):
                found.add(engine, random_prompts(rows, engine.spec.vocab_size, length))
            found = Calls(found.whole[1:], found.decode[1:])  # the first captures the CUDA graphs of prefill
            shares = [whole / decode for whole, decode in zip(found.whole, found.decode, strict=True)]
            used = [bound * rate / rows for rate in found.decode]
            rates = cell(found.whole, 0), cell(found.decode, 0), cell(shares, 2), cell(used, 2)
            line(f"batch {rows}, {name}", *rates, f"{warm_up:.1f}")
            if name == "default":
                ours = statistics.median(found.whole)
                record(f"generation.gpu_{rows}", found.decode, 0, "tokens/s")
                record(f"generation.gpu_{rows}_call", found.whole, 0, "tokens/s")
                record(f"generation.gpu_{rows}_share", shares, 0, "%")
                record(f"generation.gpu_{rows}_mbu", used, 0, "%")
            if name == "batch_invariant":
                record(f"generation.gpu_{rows}_invariant", found.whole, 0, "tokens/s")
            del engine
        if theirs is not None:
            rates_of_hf = static_cache_rates(theirs, rows, length, rounds)
            line(f"batch {rows}, HF, static cache", cell(rates_of_hf, 0))
            record(f"generation.gpu_{rows}_hf", rates_of_hf, 0, "tokens/s")
            record(f"generation.gpu_{rows}_ratio", ours / statistics.median(rates_of_hf), 2)


def static_cache_rates(model: nn.Module, rows: int, length: int, rounds: int) -> list[float]:
    """Return tokens/s of whole calls of transformers with a static cache, which it compiles on a GPU."""
    rates = []
    for _ in range(rounds + 2):
        ids = torch.tensor(random_prompts(rows, model.config.vocab_size, length), device="cuda")
        choices = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0, "cache_implementation": "static"}
        seconds, _ = timed(
            lambda: model.generate(ids, attention_mask=torch.ones_like(ids), **choices).tolist()  # noqa: B023
        )
        rates.append(rows * NEW / seconds)
    return rates[2:]  # the first two compile and capture


def serve(engine: gh.Engine, count: int, every: int = 32) -> list[tuple[float, int]]:
    """Submit `count` requests of random lengths and return (time, tokens generated) every few steps."""
    vocabulary = engine.spec.vocab_size
    requests = []
    for _ in range(count):
        prompt = [random.randrange(vocabulary) for _ in range(random.randint(32, 512))]
        requests.append(engine.submit(prompt, max_new_tokens=random.randint(32, 512)))
    marks, number = [(time.perf_counter(), 0)], 0
    while engine.step():
        number += 1
        if number % every == 0:  # counting takes a while too
            marks.append((time.perf_counter(), sum(len(request.ids) for request in requests)))
    return [*marks, (time.perf_counter(), sum(len(request.ids) for request in requests))]


def load(rounds: int, requests: int) -> None:
    """Continuous batching: 64 slots, with a queue that is empty only towards the end."""
    slots = 64
    alone = statistics.median(steady_rates(slots, rounds))
    engine = gh.Engine(llama(), slots=slots, max_len=1024, prefill_chunk=2048)
    serve(engine, 256)  # compiles, and captures nearly all CUDA graphs
    note("load: warm")
    marks = serve(engine, requests)
    begin, end = marks[0][0], marks[-1][0]
    inner = [mark for mark in marks if 0.1 <= (mark[0] - begin) / (end - begin) <= 0.9]
    (first, before), (last, after) = inner[0], inner[-1]
    rate = (after - before) / (last - first)
    print(f"\n{requests:,} requests, 32 to 512 prompt tokens and as many new, {slots} slots of 1,024")
    print(
        f"middle 80% of {end - begin:.1f} s: {rate:,.0f} tokens/s, {rate / alone:.2f} of steady state ({alone:,.0f})"
    )
    record("generation.load", rate, 0, "tokens/s")
    record("generation.load_share", rate / alone, 0, "%")


def mixed(rounds: int) -> None:
    """Generate for 256 requests of 100 to 1,024 tokens in and as many out, the workload of nano-vllm's benchmark."""
    count, shortest, longest = 256, 100, 1024
    print(f"\nLlama 1B, bfloat16, {count} requests, {shortest} to {longest} tokens in and as many out")
    line("", "tokens/s", "s", "new tokens")
    for name, choices in {"default": {}, "compile=True": {"compile": True}}.items():
        engine = gh.Engine(llama(), slots=count, max_len=2 * longest, **choices)
        vocabulary, rates, times = engine.spec.vocab_size, [], []
        draw = random.Random(0)
        for _ in range(rounds + 1):
            lengths = [(draw.randint(shortest, longest), draw.randint(shortest, longest)) for _ in range(count)]
            prompts = [[random.randrange(vocabulary) for _ in range(length)] for length, _ in lengths]
            begin = time.perf_counter()
            for prompt, (_, new) in zip(prompts, lengths, strict=True):
                engine.submit(prompt, max_new_tokens=new)
            engine.run()
            times.append(time.perf_counter() - begin)
            rates.append(sum(new for _, new in lengths) / times[-1])
            note(f"mixed, {name}: {rates[-1]:,.0f} tokens/s")
        line(name, cell(rates[1:], 0), cell(times[1:], 2), f"{sum(new for _, new in lengths):,}")
        record(f"generation.mixed{'' if name == 'default' else '_compiled'}", rates[1:], 0, "tokens/s")
        del engine


FIRST = """
import time
begin = time.perf_counter()
import glasshouse as gh, torch
torch.cuda.synchronize()
imported = time.perf_counter()
rows = {rows}
model = gh.build(gh.preset("llama-1b", end_ids=()), device="cuda", dtype=torch.bfloat16).eval()
torch.cuda.synchronize()
built = time.perf_counter()
engine = gh.Engine(model, slots=rows, max_len=512)
requests = [engine.submit([row + i for i in range({prompt})], max_new_tokens={new}) for row in range(rows)]
while not requests[0].ids:
    engine.step()
first = time.perf_counter()
engine.run()
print(imported - begin, built - imported, first - built, time.perf_counter() - built)
"""


def first() -> None:
    """Time the first answer of a process, and `glasshouse serve` until it is ready: without caches and with them."""
    print(f"\nLlama 1B, bfloat16, new processes; {PROMPT} + {NEW} tokens")
    line("", "import, s", "build, s", "first token, s", "first answer, s")
    with tempfile.TemporaryDirectory() as folder:
        caches = {name: str(Path(folder, name)) for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")}
        env = {**os.environ, **caches}
        for rows in (1, 64):
            code = FIRST.format(rows=rows, prompt=PROMPT, new=NEW)
            for start in ("first", "second"):
                done = subprocess.run(
                    [sys.executable, "-c", code], env=env, stdout=subprocess.PIPE, text=True, check=True
                )
                times = [float(one) for one in done.stdout.split()]
                line(f"{rows} requests, {start} start", *(f"{one:.1f}" for one in times))
                record(f"generation.first_answer_{rows}_{start}", times[-1], 1, "s")
            for one in caches.values():
                shutil.rmtree(one, ignore_errors=True)
        gh.save(llama(), None, Path(folder, "model"))
        for start in ("first", "second"):
            seconds = ready_after(Path(folder, "model"), env)
            line(f"serve ready, {start} start", f"{seconds:.1f}")
            record(f"generation.serve_ready_{start}", seconds, 1, "s")


def ready_after(model: Path, env: dict[str, str]) -> float:
    """Return the seconds from the command `glasshouse serve` until it takes requests."""
    port, begin = 18_321, time.perf_counter()
    command = [sys.executable, "-m", "glasshouse", "serve", str(model), "--port", str(port)]
    with subprocess.Popen(command, env=env) as process:
        try:
            while process.poll() is None:
                try:
                    urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=1)
                    return time.perf_counter() - begin
                except (urllib.error.URLError, TimeoutError):
                    time.sleep(0.05)
            raise SystemExit("glasshouse serve did not start.")
        finally:
            process.terminate()


def prefill(rounds: int) -> None:
    """Time to first token of a long prompt."""
    model, length = llama(), 4096
    peak = machine.measure_peak_flops(torch.device("cuda"), torch.bfloat16)
    engine = gh.Engine(model, slots=1, max_len=4608, prefill_chunk=length)
    times = []
    for _ in range(5 * rounds + 2):  # two to capture CUDA graphs and warm up
        prompt = [random.randrange(model.spec.vocab_size) for _ in range(length)]
        begin = time.perf_counter()
        request = engine.submit(prompt, max_new_tokens=1)
        engine.run()
        times.append(time.perf_counter() - begin)
        assert len(request.ids) == 1
    s = model.spec
    matrices = gh.count_parameters(s) - s.vocab_size * s.d_model  # the head runs on one position only
    flops = 2 * matrices * length + 2 * s.n_layers * s.n_heads * s.d_head * length**2  # causal: half of the scores
    shares = [flops / one / peak for one in times[2:]]
    print(f"\ntime to first token (TTFT), prompt of {length:,}, the first decode step included")
    took = cell([1e3 * one for one in times[2:]], 2)
    print(f"{took} ms, MFU {cell(shares, 2)} of the measured matmul peak, {peak / 1e12:,.0f} TFLOP/s")
    record("generation.ttft", [1e3 * one for one in times[2:]], 1, "ms")
    record("generation.ttft_mfu", shares, 0, "%")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=3, help="rounds, one run of each system per round (default 3)")
    parser.add_argument(
        "--parts",
        nargs="+",
        help="cpu: decode, loss, beam, speculation, gqa; cuda: calls, steady, load, prefill, mixed, first",
    )
    parser.add_argument("--quantized", action="store_true", help="also decode with int8 and int4 weights (cpu)")
    parser.add_argument(
        "--requests", type=int, default=2048, help="requests of the load benchmark (cuda, default 2048)"
    )
    add_save(parser)
    args = parser.parse_args()
    parts: dict[str, Callable[[], None]] = {
        "decode": lambda: decode(args.rounds, args.quantized),
        "loss": loss,
        "beam": lambda: beam(args.rounds),
        "speculation": lambda: speculation(args.rounds),
        "gqa": lambda: gqa(args.rounds),
    }
    if args.device == "cuda":
        parts = {
            "calls": lambda: calls(args.rounds),
            "steady": lambda: steady(args.rounds),
            "load": lambda: load(args.rounds, args.requests),
            "prefill": lambda: prefill(args.rounds),
            "mixed": lambda: mixed(args.rounds),
            "first": first,
        }
    if unknown := set(args.parts or ()) - set(parts):
        parser.error(f"--parts on {args.device}: {', '.join(parts)}; not {', '.join(sorted(unknown))}.")
    random.seed(0)
    torch.manual_seed(0)
    on = torch.cuda.get_device_name() if args.device == "cuda" else f"{torch.get_num_threads()} threads"
    print(f"torch {torch.__version__}, {on}")
    for name in args.parts or parts:
        parts[name]()
        sys.stdout.flush()
    save(args.save, args.device)


if __name__ == "__main__":
    main()
