"""Generation beside transformers and beside the machine's own limits, with random weights, in one run.

    python benchmarks/generation.py [--device cpu] [--rounds 3] [--parts decode beam] [--int8]

A prompt has 64 tokens and nothing ends a text, so that every contender writes as many tokens. Both read the same
weights, from one folder. A time is that of a whole call, the reading of the prompts included. Contenders take turns
within a round, and each round has new prompts: an engine does not read again what it still holds. Figures are medians
over rounds with half the range; a ratio is the median over rounds of the ratio within a round, with its range.
"""

from __future__ import annotations

import argparse
import functools
import math
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import glasshouse as gh
from glasshouse import device as machine
from glasshouse.generation.inference_model import prepare_for_inference
from glasshouse.generation.sampling import Sampler
from glasshouse.generation.slots import SequenceState
from glasshouse.generation.speculation import Drafts, Speculator
from glasshouse.layers.prepacked import ColumnMajorLinear, PrepackedLinear

PROMPT = 64
NEW = 256
MEAN_LENGTH = PROMPT + NEW // 2
WARM_UP = 8  # tokens

Texts = list[list[int]]
Contender = Callable[[Texts, int], Texts]  # prompts and how many new tokens each, to the new tokens


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


def ratio(slower: Sequence[float], faster: Sequence[float]) -> str:
    """Show the median and the range of how many times faster."""
    times = [a / b for a, b in zip(slower, faster, strict=True)]
    return f"{statistics.median(times):.2f} [{min(times):.2f} - {max(times):.2f}]"


def random_prompts(count: int, vocabulary: int) -> Texts:
    return [[random.randrange(vocabulary) for _ in range(PROMPT)] for _ in range(count)]


def leading(a: Texts, b: Texts) -> int:
    """Return how many tokens two answers begin with alike, in the row where it is fewest."""
    return min(
        next((i for i, (x, y) in enumerate(zip(*rows, strict=True)) if x != y), len(rows[0]))
        for rows in zip(a, b, strict=True)
    )


@dataclass
class Result:
    """What the rounds brought of one contender."""

    seconds: list[float] = field(default_factory=list)
    texts: list[Texts] = field(default_factory=list)

    def rates(self) -> list[float]:
        """Return new tokens per second, by round."""
        return [sum(map(len, text)) / one for one, text in zip(self.seconds, self.texts, strict=True)]

    def agrees(self, other: Result) -> str:
        equal = min(leading(a, b) for a, b in zip(self.texts, other.texts, strict=True))
        return f"{equal} of {len(self.texts[0][0])}"


def race(contenders: dict[str, Contender], draw: Callable[[], Texts], new: int, rounds: int) -> dict[str, Result]:
    for contender in contenders.values():
        contender(draw(), WARM_UP)
    results = {name: Result() for name in contenders}
    for number in range(rounds):
        prompts = draw()
        for name, contender in contenders.items():
            seconds, texts = timed(lambda: contender(prompts, new))  # noqa: B023 (called at once)
            results[name].seconds.append(seconds)
            results[name].texts.append(texts)
            note(f"round {number + 1} of {rounds}: {name}, {seconds:.1f} s")
    return results


def weight_bytes(model: nn.Module) -> int:
    """Return what a step must read of the weights.

    Of the table of positions it reads a few rows; the table of tokens is the head's matrix too, and read whole.
    """
    weights = [one for name, one in model.named_parameters() if not name.startswith("stack.position")]
    return sum(one.numel() * one.element_size() for one in weights)


def held_bytes(model: nn.Module, rows: int, length: int) -> int:
    """Return what a step must read of the cache, where rows hold so many tokens on average."""
    s = model.spec
    return 2 * s.n_layers * s.n_kv_heads * s.d_head * length * rows * model.token_embedding.table.weight.element_size()


# The contenders


def by_engine(model: nn.Module, slots: int, beams: int = 1, **choices: Any) -> Contender:  # noqa: ANN401 (gh.Engine's)
    made = gh.Engine(model, slots=slots, max_len=PROMPT + NEW, **choices)

    def write(prompts: Texts, new: int) -> Texts:
        requests = [made.submit(prompt, max_new_tokens=new, beams=beams) for prompt in prompts]
        made.run()
        return [request.ids for request in requests]

    return write


def by_products(model: nn.Module, rows: int) -> Contender:
    """Multiply by every matrix, as the engine does, and do nothing else: no step of it can be faster."""
    tree = prepare_for_inference(model, "copy", rows)
    maps = [one for one in tree.modules() if isinstance(one, ColumnMajorLinear | PrepackedLinear)]
    inputs = {one.in_features: torch.randn(rows, one.in_features) for one in maps}

    @torch.inference_mode()
    def write(prompts: Texts, new: int) -> Texts:
        for _ in range(new):
            for one in maps:
                one(inputs[one.in_features])
        return [[0] * new] * rows

    return write


def by_transformers(model: nn.Module, **choices: object) -> Contender:
    def write(prompts: Texts, new: int) -> Texts:
        ids = torch.tensor(prompts)
        mask = torch.ones_like(ids)
        fixed = {"max_new_tokens": new, "do_sample": False, "pad_token_id": 0, "disable_compile": True}
        return model.generate(ids, attention_mask=mask, **fixed, **choices)[:, -new:].tolist()

    return write


def pair(config: Any) -> tuple[nn.Module, nn.Module]:  # noqa: ANN401 (a config of transformers)
    """Return a model of transformers' with random weights and ours with the same."""
    import transformers

    transformers.logging.disable_progress_bar()
    transformers.logging.set_verbosity_error()
    theirs = getattr(transformers, config.architectures[0])(config).eval()
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        ours, _ = gh.load(folder)
    return theirs, ours


@functools.cache
def gpt2_pair() -> tuple[nn.Module, nn.Module]:
    from transformers import GPT2Config

    theirs, ours = pair(GPT2Config(bos_token_id=None, eos_token_id=None, architectures=["GPT2LMHeadModel"]))
    assert gh.count_parameters(ours.spec) == gh.count_parameters(gh.preset("gpt2"))
    return theirs, ours


# On the CPU


def read_bandwidth(repeats: int = 5) -> float:
    """Return the most bytes per second at which any of several sums over 512 MiB reads them."""
    numbers = torch.ones(2**27)
    matrix, vector, rows = numbers.view(2**14, 2**13), torch.ones(2**13), torch.ones(4, 2**13)
    ways: list[Callable[[], Tensor]] = [
        numbers.sum,
        numbers.max,
        lambda: torch.dot(*numbers.chunk(2)),
        lambda: torch.mv(matrix, vector),
        lambda: nn.functional.linear(rows, matrix),
    ]
    return max(numbers.nbytes / timed(way)[0] for _ in range(repeats) for way in ways)


def decode(rounds: int, int8: bool) -> None:
    """Write one sequence and eight, in the shape of the small GPT-2."""
    theirs, ours = gpt2_pair()
    ceiling = read_bandwidth()
    found = {}
    for rows in (1, 8):
        note(f"decode, batch {rows}")
        contenders = {
            "ours": by_engine(ours, rows),
            "HF, dynamic cache": by_transformers(theirs, use_cache=True),
            "HF, static cache": by_transformers(theirs, use_cache=True, cache_implementation="static"),
            "our products alone": by_products(ours, rows),
        }
        if int8:
            contenders["ours, int8"] = by_engine(ours, rows, weights="int8")
        found[rows] = race(contenders, lambda: random_prompts(rows, ours.spec.vocab_size), NEW, rounds)  # noqa: B023
        ceiling = max(ceiling, read_bandwidth())
    print(f"\nGPT-2 small, float32, prompt {PROMPT}, {NEW} new; memory is read at {ceiling / 1e9:.1f} GB/s at best")
    line("", "tokens/s", "as fast as HF's best", "share of the bound", "same tokens as HF")
    for rows, results in found.items():
        peers = [name for name in results if name.startswith("HF")]
        best = results[min(peers, key=lambda name: statistics.median(results[name].seconds))]
        for name, result in results.items():
            weights = weight_bytes(ours) / (4 if "int8" in name else 1)  # as if nothing stayed in float32
            bound = (weights + held_bytes(ours, rows, MEAN_LENGTH)) / ceiling
            share = cell([bound * NEW / one for one in result.seconds], 2) if rows == 1 else ""
            against = ratio(best.seconds, result.seconds)
            same = "" if name == "our products alone" else result.agrees(best)
            line(f"batch {rows}, {name}", cell(result.rates()), against, share, same)


def loss() -> None:
    """Train a small model on bytes of Python, and see what int8 weights cost it on files it has not seen."""
    context, batch, steps = 256, 16, 200
    note(f"loss, {steps} steps of training")
    seen, other = (
        torch.tensor(list("".join(text for _, text in gh.data.builtin_dataset("stdlib").items(split)).encode()))
        for split in ("train", "test")
    )
    validation = other[torch.randint(len(other) - context, (64, 1)) + torch.arange(context + 1)]
    shape = {"d_model": 256, "n_layers": 4, "n_heads": 4, "d_ff": 768, "vocab_size": 256, "max_len": context}
    model = gh.build(gh.preset("llama-small", n_kv_heads=4, end_ids=(), start_id=None, **shape))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for step in range(steps):
        starts = torch.randint(len(seen) - context, (batch, 1))
        rows = seen[starts + torch.arange(context + 1)]
        optimizer.param_groups[0]["lr"] = 2e-3 * min(1, (step + 1) / 20, (steps - step) / (steps / 2))
        nn.functional.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    with torch.inference_mode():
        own, small = (
            prepare_for_inference(model, weights, 8)(validation[:, :-1]).log_softmax(-1).flatten(0, 1)
            for weights in ("own", "int8")
        )
        targets = validation[:, 1:].flatten()
        bits = [float(nn.functional.nll_loss(one, targets)) / math.log(2) for one in (own, small)]
        apart = float((own.exp() * (own - small)).sum(-1).mean()) / math.log(2)
        same = float((own.argmax(-1) == small.argmax(-1)).float().mean())
    print(f"\nint8 weights, {gh.count_parameters(model.spec):,} parameters, bytes of Python that were held out")
    print(f"float32 {bits[0]:.5f} bits a byte, int8 {bits[1]:.5f}, the divergence of their predictions {apart:.1e};")
    print(f"the likeliest byte is the same at {same:.2%} of {len(own):,} places")


def beam(rounds: int) -> None:
    """Search with four beams, in the shape of the small T5."""
    from transformers import T5Config

    sources, beams, new = 8, 4, 64
    note(f"beam, {sources} sources")
    config = T5Config(eos_token_id=None, decoder_start_token_id=0, architectures=["T5ForConditionalGeneration"])
    theirs, ours = pair(config)
    assert gh.count_parameters(ours.spec) == gh.count_parameters(gh.preset("t5-small"))

    contenders = {
        "ours": by_engine(ours, sources * beams, source_len=PROMPT, beams=beams),
        "HF": by_transformers(theirs, num_beams=beams),
    }
    results = race(contenders, lambda: random_prompts(sources, ours.spec.vocab_size), new, rounds)
    print(f"\nT5 small, float32, {beams} beams, {sources} sources of {PROMPT}, {new} new")
    line("", "tokens/s", "as fast as HF", "same tokens as HF")
    for name, result in results.items():
        against = ratio(results["HF"].seconds, result.seconds)
        line(name, cell(result.rates()), against, result.agrees(results["HF"]))


class Counted:
    """A speculator whose drafts are counted."""

    def __init__(self, inner: Speculator) -> None:
        self.inner, self.count = inner, inner.count
        self.tried = 0
        self.passes = 0  # in which a row got a token, with drafts or without

    def open(self, model: Any, slots: int, max_len: int) -> None:  # noqa: ANN401
        self.inner.setup(model, slots, max_len)

    def propose(self, rows: Sequence[SequenceState], sampler: Sampler) -> Drafts | None:
        drafts = self.inner.propose(rows, sampler)
        self.passes += len(rows)
        self.tried += 0 if drafts is None else int(drafts.counts.sum())
        return drafts

    def move(self, old: int, new: int) -> None:
        self.inner.move(old, new)


def first_layers(model: nn.Module, count: int) -> nn.Module:
    """Return a model of the first layers alone, with the same table, norm and head."""
    draft = gh.build(gh.preset("gpt2", n_layers=count, end_ids=(), start_id=None)).eval()
    state = model.state_dict()
    draft.load_state_dict({name: state[name] for name in draft.state_dict()})
    return draft


def speculation(rounds: int) -> None:
    """Let n-grams and the model's own first layers draft one sequence, whose prompt repeats itself."""
    _, ours = gpt2_pair()
    note("speculation")
    counted = {
        "n-grams, 8 ahead": Counted(gh.generation.PromptLookup()),
        "first 2 layers, 4 ahead": Counted(gh.generation.DraftModel(first_layers(ours, 2))),
    }
    contenders = {"plain": by_engine(ours, 1)}
    contenders |= {name: by_engine(ours, 1, speculator=one) for name, one in counted.items()}

    def repetitive() -> Texts:
        return [[random.randrange(ours.spec.vocab_size) for _ in range(PROMPT // 4)] * 4]

    results = race(contenders, repetitive, NEW, rounds)
    distinct = statistics.mean(len(set(texts[0])) for texts in results["plain"].texts)
    print(f"\nspeculation, GPT-2 small, batch 1, {NEW} new after a prompt that repeats itself")
    print(
        f"(random weights write {distinct:.0f} different tokens of {NEW}: no measure of how often real drafts hold)"
    )
    line("", "tokens/s", "as fast as plain", "drafts accepted", "same tokens as plain")
    for name, result in results.items():
        against, accepted = ratio(results["plain"].seconds, result.seconds), ""
        if one := counted.get(name):
            written = WARM_UP + NEW * rounds  # each pass brought one, and the drafts that held
            accepted = f"{written - one.passes:,} of {one.tried:,}"
        line(name, cell(result.rates()), against, accepted, result.agrees(results["plain"]))


def groups(rounds: int) -> None:
    """Take decoding steps with a long context held, by how many heads have keys and values of their own."""
    rows, context, heads, kinds = 8, 2048, 16, (16, 4, 1)
    shape = {
        "n_layers": 4,
        "d_model": 1024,
        "n_heads": heads,
        "d_ff": 2816,
        "vocab_size": 1024,
        "max_len": context + 1,
    }
    note(f"groups, {rows} x {context} held")

    def make_step(kv_heads: int) -> tuple[nn.Module, Callable[[], object]]:
        model = gh.build(gh.preset("llama-small", n_kv_heads=kv_heads, **shape)).eval()
        cache = model.make_cache(rows, context + 1)
        for tensor in (*cache.keys, *cache.values):
            tensor.normal_()  # untouched zeros are one page of memory, read again and again
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
                if number > 0:  # the first warms up
                    found[kv_heads].append(seconds / 10)
    print(f"\na decoding step, {heads} heads of 64, 4 layers, float32, batch {rows}, {context:,} tokens held by each")
    line("", "bytes a token", "MB read a step", "ms a step", f"as fast as {heads}")
    for kv_heads, (model, _) in steps.items():
        token = model.make_cache(1, 2).n_bytes - model.make_cache(1, 1).n_bytes
        read = (weight_bytes(model) + held_bytes(model, rows, context)) / 1e6
        took = cell([1e3 * one for one in found[kv_heads]])
        line(f"{kv_heads} key-value heads", f"{token:,}", f"{read:.0f}", took, ratio(found[heads], found[kv_heads]))


# On a GPU


def device_seconds(work: Callable[[], object], repeats: int = 20) -> float:
    """Return the median of what work takes on the GPU."""
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
    """Return the bytes per second of a copy within the GPU's memory, those read and those written."""
    source = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / device_seconds(lambda: target.copy_(source))


@functools.cache
def llama() -> nn.Module:
    spec = gh.preset("llama-1b", max_len=4608, end_ids=())
    return gh.build(spec, device="cuda", dtype=torch.bfloat16).eval()


@functools.cache
def steady_rates(rows: int, rounds: int) -> list[float]:
    """Return tokens per second from when every request has its first token until all have their last, by round.

    On a GPU a step's tokens come when the next step is under way, so the clock is read where tokens come.
    """
    made = gh.Engine(llama(), slots=rows, max_len=PROMPT + NEW, prefill_chunk=2048, compile=True)
    rates = []
    for number in range(rounds + 1):
        prompts = random_prompts(rows, made.spec.vocab_size)
        requests = [made.submit(prompt, max_new_tokens=NEW) for prompt in prompts]
        while not all(request.ids for request in requests):
            made.step()
        begin, before = time.perf_counter(), sum(len(request.ids) for request in requests)
        made.run()
        seconds = time.perf_counter() - begin
        rates.append((sum(len(request.ids) for request in requests) - before) / seconds)
        note(f"batch {rows}, round {number} of {rounds}: {rates[-1]:,.0f} tokens/s")
    return rates[1:]  # the first compiles, and captures each size as a graph


def steady(rounds: int) -> None:
    """Keep every slot busy with requests of one length."""
    bandwidth = copy_bandwidth()
    found = {rows: steady_rates(rows, rounds) for rows in (1, 64, 256)}
    print(f"\nLlama 1B, bfloat16, {PROMPT} + {NEW} tokens, compiled; memory is copied at {bandwidth / 1e9:,.0f} GB/s")
    line("", "tokens/s", "ms a step", "share of the bound")
    for rows, rates in found.items():
        bound = (weight_bytes(llama()) + held_bytes(llama(), rows, MEAN_LENGTH)) / bandwidth
        steps = [rows / rate for rate in rates]
        shares = cell([bound / step for step in steps], 2)
        line(f"batch {rows}", cell(rates, 0), cell([1e3 * step for step in steps], 3), shares)


def serve(made: gh.Engine, count: int, every: int = 32) -> list[tuple[float, int]]:
    """Put so many requests of random lengths in the queue and return (time, tokens delivered) every few steps."""
    vocabulary = made.spec.vocab_size
    requests = []
    for _ in range(count):
        prompt = [random.randrange(vocabulary) for _ in range(random.randint(32, 512))]
        requests.append(made.submit(prompt, max_new_tokens=random.randint(32, 512)))
    marks, number = [(time.perf_counter(), 0)], 0
    while made.step():
        number += 1
        if number % every == 0:  # counting takes a while too
            marks.append((time.perf_counter(), sum(len(request.ids) for request in requests)))
    return [*marks, (time.perf_counter(), sum(len(request.ids) for request in requests))]


def load(rounds: int, requests: int) -> None:
    """Let requests come and go in 64 slots, with a queue that is empty only towards the end."""
    slots = 64
    alone = statistics.median(steady_rates(slots, rounds))
    made = gh.Engine(llama(), slots=slots, max_len=1024, prefill_chunk=2048, compile=True)
    serve(made, 256)  # compiles, and captures nearly every size as a graph
    note("load: warm")
    marks = serve(made, requests)
    begin, end = marks[0][0], marks[-1][0]
    inner = [mark for mark in marks if 0.1 <= (mark[0] - begin) / (end - begin) <= 0.9]
    (first, before), (last, after) = inner[0], inner[-1]
    rate = (after - before) / (last - first)
    print(f"\n{requests:,} requests, prompts of 32 to 512, as many new, {slots} slots of 1,024")
    print(
        f"the middle 80% of {end - begin:.1f} s: {rate:,.0f} tokens/s, {rate / alone:.2f} of {alone:,.0f} when steady"
    )


def prefill(rounds: int) -> None:
    """Read a long prompt, up to its first token."""
    model, length = llama(), 4096
    peak = machine.measure_peak_flops(torch.device("cuda"), torch.bfloat16)
    made = gh.Engine(model, slots=1, max_len=4608, prefill_chunk=length)
    times = []
    for _ in range(5 * rounds + 2):  # two to capture and to warm up
        prompt = [random.randrange(model.spec.vocab_size) for _ in range(length)]
        begin = time.perf_counter()
        request = made.submit(prompt, max_new_tokens=1)
        made.run()
        times.append(time.perf_counter() - begin)
        assert len(request.ids) == 1
    s = model.spec
    matrices = gh.count_parameters(s) - s.vocab_size * s.d_model  # the head is asked for one token alone
    flops = 2 * matrices * length + 2 * s.n_layers * s.n_heads * s.d_head * length**2  # of a causal half
    shares = [flops / one / peak for one in times[2:]]
    print(f"\na prompt of {length:,}, from its submission to the first token, that token's own step included")
    took = cell([1e3 * one for one in times[2:]], 2)
    print(f"{took} ms, {cell(shares, 2)} of the matmul peak, which is {peak / 1e12:,.0f} TFLOP/s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=3, help="rounds, each contender once a round (default 3)")
    parser.add_argument(
        "--parts", nargs="+", help="cpu: decode, loss, beam, speculation, groups; cuda: steady, load, prefill"
    )
    parser.add_argument("--int8", action="store_true", help="decode with int8 weights too (cpu)")
    parser.add_argument(
        "--requests", type=int, default=2048, help="under load; with few, the slow end counts (cuda, default 2048)"
    )
    args = parser.parse_args()
    parts: dict[str, Callable[[], None]] = {
        "decode": lambda: decode(args.rounds, args.int8),
        "loss": loss,
        "beam": lambda: beam(args.rounds),
        "speculation": lambda: speculation(args.rounds),
        "groups": lambda: groups(args.rounds),
    }
    if args.device == "cuda":
        parts = {
            "steady": lambda: steady(args.rounds),
            "load": lambda: load(args.rounds, args.requests),
            "prefill": lambda: prefill(args.rounds),
        }
    if unknown := set(args.parts or ()) - set(parts):
        parser.error(f"on {args.device} the parts are {', '.join(parts)}, not {', '.join(sorted(unknown))}.")
    random.seed(0)
    torch.manual_seed(0)
    on = torch.cuda.get_device_name() if args.device == "cuda" else f"{torch.get_num_threads()} threads"
    print(f"torch {torch.__version__}, {on}")
    for name in args.parts or parts:
        parts[name]()
        sys.stdout.flush()


if __name__ == "__main__":
    main()
