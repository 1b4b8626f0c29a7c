"""Throughput of `glasshouse serve` over HTTP, beside the bare engine and `transformers serve`, with random weights.

    python benchmarks/serve.py [--device cpu] [--preset llama-small] [--clients 1 8 32] [--rounds 3]
    python benchmarks/serve.py --device cuda        # llama-1b, 64 slots, 256 requests of 128 + 256 tokens
    python benchmarks/serve.py --look               # what keeping answers costs: serve --look beside serve
    python benchmarks/serve.py --record 'resid_post.6[position=new]'  # what returning a site costs

Clients are threads of processes of their own, one for every four cores; each sends its next request when the last is
answered, and nothing is streamed. There is no EOS token, so every system generates the same number of tokens. Systems
take turns within a round, and each round has new prompts. Beside the load, /health is asked every 0.1 s: its 99th
percentile tells how long the event loop is held up. `transformers serve` takes part where its extra is installed
(`pip install 'transformers[serving]'`), with continuous batching where it runs with that (not on every CPU).
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from figures import add_save, record, save

import glasshouse as gh
from glasshouse.serve import Limits, ServedModel, Server

NAME = "model"
OFF = "serve"
CLIENTS = Path(__file__).with_name("serve_clients.py")


# The clients


def load(port: int, clients: int, bodies: list[dict[str, Any]]) -> dict[str, float]:
    """Send all requests from processes with a share of the clients and of the requests each."""
    count = min(clients, max(1, (os.cpu_count() or 1) // 4))
    shares = [len(range(number, clients, count)) for number in range(count)]
    with ThreadPoolExecutor(count) as threads:
        parts = [bodies[number::count] for number in range(count)]
        found = list(threads.map(one_process, [port] * count, shares, parts))
    return {
        "seconds": max(one["seconds"] for one in found),
        "tokens": sum(one["tokens"] for one in found),
        "latency": statistics.median(latency for one in found for latency in one["latencies"]),
        "health_p99": max(one["health_p99"] for one in found),
    }


def one_process(port: int, clients: int, bodies: list[dict[str, Any]]) -> dict[str, Any]:
    command = [sys.executable, str(CLIENTS), str(port), str(clients)]
    done = subprocess.run(command, input=json.dumps(bodies), capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"the clients failed: {done.stderr}")
    return json.loads(done.stdout)


# The systems


class Bare:
    """The engine, without HTTP: as many requests at once as there are clients."""

    def __init__(self, model: Any, tok: gh.Tokenizer | None, slots: int, max_len: int) -> None:  # noqa: ANN401
        self.engine = gh.Engine(model, tok, slots=slots, max_len=max_len)
        self.engine.warm_up()

    def run(self, clients: int, bodies: list[dict[str, Any]]) -> dict[str, float]:
        left = list(reversed(bodies))
        requests: list[Any] = []
        begin = time.perf_counter()
        running: list[Any] = []
        while left or running:
            running = [request for request in running if not request.done]
            while left and len(running) < clients:
                body = left.pop()
                running.append(self.engine.submit(body["prompt"], max_new_tokens=body["max_tokens"]))
                requests.append(running[-1])
            self.engine.step()
        seconds = time.perf_counter() - begin
        return {"seconds": seconds, "tokens": sum(len(request.ids) for request in requests)}


class Ours:
    """`glasshouse serve`, on a port of its own in this process; the clients are in another."""

    def __init__(
        self,
        model: Any,  # noqa: ANN401
        tok: gh.Tokenizer | None,
        slots: int,
        max_len: int,
        *,
        look: bool = False,
        record: str = "",
    ) -> None:
        served = ServedModel(NAME, model, tok, slots=slots, max_len=max_len)
        limits = Limits(max_waiting=4096, max_recorded_by_key=2**40)
        self.server = Server([served], limits=limits, look=look, internals=bool(record))
        self.extra = {"record": [record]} if record else {}
        self.server.start()
        while not self.server.api.runner.ready:
            time.sleep(0.1)

    def run(self, clients: int, bodies: list[dict[str, Any]]) -> dict[str, float]:
        begin = time.process_time()
        result = load(self.server.port, clients, [body | self.extra for body in bodies])
        return result | {"cpu": time.process_time() - begin}


class Theirs:
    """`transformers serve` on the same weights."""

    def __init__(self, folder: Path, device: str, batching: bool) -> None:
        self.port, self.folder = 18_000 + random.randrange(10_000), folder
        command = [sys.executable, "-m", "transformers.cli.transformers", "serve", str(folder)]
        command += ["--port", str(self.port), "--device", device, "--log-level", "error"]
        # A quarter of the memory for its KV cache, which is also our bound; its default takes nearly all of a CPU's.
        command += ["--continuous-batching", "--cb-max-memory-percent", "0.25"] if batching else []
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=os.environ)
        self._wait()

    def _wait(self) -> None:
        while True:
            if self.process.poll() is not None:
                assert self.process.stderr is not None
                raise RuntimeError(self.process.stderr.read().decode().strip().rpartition("\n")[2])
            try:
                connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
                connection.request("GET", "/health")
                if connection.getresponse().status == 200:
                    return
            except OSError:
                time.sleep(0.5)

    def run(self, clients: int, bodies: list[dict[str, Any]]) -> dict[str, float]:
        return load(self.port, clients, [body | {"model": str(self.folder)} for body in bodies])

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(timeout=30)


# Measuring


def bodies_of(count: int, prompts: list[Any], new: int, args: argparse.Namespace) -> list[dict[str, Any]]:
    common = {"model": NAME, "temperature": args.temperature, "seed": 0}
    lengths = [round(new * (1 + args.spread * random.uniform(-1, 1))) for _ in prompts]
    return [
        {**common, "max_tokens": length, "prompt": prompt}
        for length, prompt in zip(lengths[:count], prompts[:count], strict=True)
    ]


def text_prompts(tok: gh.Tokenizer, count: int, length: int) -> list[str]:
    words = [tok.decode([token]) for token in tok.ids if token not in tok.special_ids]
    words = [word for word in words if word.isascii() and word.strip().isalpha()]
    return [" ".join(random.choice(words).strip() for _ in range(length)) for _ in range(count)]


def compare(systems: dict[str, Any], args: argparse.Namespace, draw: Any) -> None:  # noqa: ANN401
    print(f"{'':34}{'tokens/s':>20}{'latency, s':>12}{'/health p99, ms':>17}")
    for clients in args.clients:
        found: dict[str, list[dict[str, float]]] = {name: [] for name in systems}
        for number in range(args.rounds + 1):
            count = args.requests if number else min(args.requests, clients)
            for name, system in systems.items():
                random.seed(number)  # as many tokens for each
                result = system.run(clients, bodies_of(count, draw(count), args.new if number else 8, args))
                print(f"  {clients} clients, round {number}: {name}, {result['seconds']:.1f} s", file=sys.stderr)
                if number:  # the first warms up
                    found[name].append(result)
        for name, results in found.items():
            rates = [one["tokens"] / one["seconds"] for one in results]
            shown = f"{statistics.median(rates):,.0f} ±{(max(rates) - min(rates)) / 2:,.0f}"
            latency = statistics.median(one.get("latency", 0.0) for one in results)
            health = max(one.get("health_p99", 0.0) for one in results) * 1e3
            columns = f"{latency:>12.2f}{health:>17.1f}" if latency else ""
            print(f"{clients:>3} clients, {name:22}{shown:>20}{columns}", flush=True)
        if not beside(args):
            keep(found, clients, args)
        else:
            on_name = beside(args)
            for field, what in (("seconds", "throughput"), ("cpu", "tokens per second of processor time")):
                off, on = ([one["tokens"] / one[field] for one in found[name]] for name in (OFF, on_name))
                shares = [changed / plain for changed, plain in zip(on, off, strict=True)]
                each = ", ".join(f"{share:.3f}" for share in shares)
                print(f"{clients:>3} clients, {on_name} has {statistics.median(shares):.1%} of the {what} ({each})")
                if field == ("cpu" if args.look else "seconds"):
                    record(f"serve.{'look' if args.look else 'record'}_{clients}", shares, 1, "%")


def keep(found: dict[str, list[dict[str, float]]], clients: int, args: argparse.Namespace) -> None:
    """Record the rates of the systems, and ours relative to transformers."""
    where = "gpu" if args.device == "cuda" else f"cpu_{clients}"
    batching = "_batching" if args.batching else ""
    rates = {name: [one["tokens"] / one["seconds"] for one in results] for name, results in found.items()}
    ours, theirs = rates["glasshouse serve"], rates.get("transformers serve")
    record(f"serve.{where}{batching}", ours, 0, "tokens/s")
    record(f"serve.{where}_engine{batching}", rates["engine without HTTP"], 0, "tokens/s")
    health = [one["health_p99"] for one in found["glasshouse serve"]]
    record(f"serve.{where}_health{batching}", [1e3 * one for one in health], 0, "ms")
    if theirs is not None:
        record(f"serve.{where}_hf{batching}", theirs, 0, "tokens/s")
        record(f"serve.{where}_ratio{batching}", [a / b for a, b in zip(ours, theirs, strict=True)], 1)
        health = [one["health_p99"] for one in found["transformers serve"]]
        record(f"serve.{where}_hf_health{batching}", [1e3 * one for one in health], 0, "ms")


def beside(args: argparse.Namespace) -> str:
    """Return the name of the server to compare with a plain one, if that is asked for."""
    return "serve --look" if args.look else f"record {args.record}" if args.record else ""


def two_systems(model: Any, tok: gh.Tokenizer | None, args: argparse.Namespace, size: int) -> dict[str, Any]:  # noqa: ANN401
    """Return a plain server, and the one to compare with it."""
    changed = Ours(model, tok, args.slots, size, look=args.look, record=args.record)
    return {OFF: Ours(model, tok, args.slots, size), beside(args): changed}


def longest(args: argparse.Namespace) -> int:
    """Return the tokens of the longest answer."""
    return round(args.new * (1 + args.spread))


def on_gpu(args: argparse.Namespace) -> None:
    size = args.prompt + longest(args)
    spec = gh.preset(args.preset or "llama-1b", max_len=size, end_ids=())
    model = gh.build(spec, device="cuda", dtype=torch.bfloat16).eval()

    def draw(count: int) -> list[list[int]]:
        return [[random.randrange(spec.vocab_size) for _ in range(args.prompt)] for _ in range(count)]

    systems: dict[str, Any] = two_systems(model, None, args, size) if beside(args) else {}
    if not systems:
        systems = {"engine without HTTP": Bare(model, None, args.slots, size)}
        systems["glasshouse serve"] = Ours(model, None, args.slots, size)
    print(f"{args.preset or 'llama-1b'}, bfloat16, {torch.cuda.get_device_name()}, {args.slots} slots,", end=" ")
    print(f"{args.requests} requests of {args.prompt} + {args.new} tokens, not streamed")
    compare(systems, args, draw)


def on_cpu(args: argparse.Namespace) -> None:
    texts = [path.read_text(encoding="utf-8") for path in sorted(Path(os.__file__).parent.glob("*.py"))[:40]]
    tok = gh.Tokenizer.train(texts=texts, vocab_size=4096)
    length = 2 * args.prompt + longest(args) + 64
    spec = gh.preset(args.preset or "gpt2", vocab_size=len(tok), max_len=max(length, 256), end_ids=())
    model = gh.build(spec).eval()
    with tempfile.TemporaryDirectory() as folder:
        systems: dict[str, Any] = two_systems(model, tok, args, length) if beside(args) else {}
        theirs = None
        if not systems:
            systems = {"engine without HTTP": Bare(model, tok, args.slots, length)}
            systems["glasshouse serve"] = Ours(model, tok, args.slots, length)
        if "transformers" in args.systems and not beside(args):
            gh.hub.export(model, tok, f"{folder}/model")
            try:
                theirs = Theirs(Path(folder, "model"), "cpu", args.batching)
                systems["transformers serve"] = theirs
            except RuntimeError as error:
                print(f"transformers serve does not start here: {error}", file=sys.stderr)
        print(f"{args.preset or 'gpt2'}, float32, {torch.get_num_threads()} threads, {args.slots} slots,", end=" ")
        print(f"{args.requests} requests of about {args.prompt} + {args.new} tokens, not streamed")
        compare(systems, args, lambda count: text_prompts(tok, count, args.prompt))
        if theirs is not None:
            theirs.close()


def main() -> None:
    parser = argparse.ArgumentParser(description="Throughput over HTTP.")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--preset", help="default: gpt2, on cuda llama-1b")
    parser.add_argument("--slots", type=int, help="default: 32, on cuda 64")
    parser.add_argument("--clients", type=int, nargs="+", help="default: 1 8 32, on cuda 256")
    parser.add_argument("--requests", type=int, help="per round; default: 64, on cuda 256")
    parser.add_argument("--prompt", type=int, help="tokens (cuda) or words; default: 16, on cuda 128")
    parser.add_argument("--new", type=int, help="tokens of an answer; default: 64, on cuda 256")
    parser.add_argument("--spread", type=float, default=0.0, help="0.5: answers of half to one and a half as many")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--look", action="store_true", help="compare serve --look with serve instead")
    parser.add_argument("--record", default="", help="compare requests that record this site with plain ones instead")
    parser.add_argument("--systems", nargs="*", default=["transformers"], help="further systems: transformers")
    parser.add_argument("--batching", action="store_true", help="transformers with --continuous-batching")
    add_save(parser)
    args = parser.parse_args()
    on_cuda = args.device == "cuda"
    args.slots = args.slots or (64 if on_cuda else 32)
    args.clients = args.clients or ([256] if on_cuda else [1, 8, 32])
    args.requests = args.requests or (256 if on_cuda else 64)
    args.prompt = args.prompt or (128 if on_cuda else 16)
    args.new = args.new or (256 if on_cuda else 64)
    (on_gpu if on_cuda else on_cpu)(args)
    save(args.save, args.device)


if __name__ == "__main__":
    main()
