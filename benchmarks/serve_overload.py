"""`glasshouse serve` with more clients than slots and queue take: what a full queue leaves of the rate.

    python benchmarks/serve_overload.py [--preset gpt2] [--slots 16] [--seconds 20] [--rounds 3]

The queue takes as many requests as there are slots. At first there are so many clients that slots and queue are full,
then three times as many; those that are answered 429 ask again after Retry-After seconds. Both take turns, with a
quarter of the time before each measurement to fill the queue. Shown are the tokens of the answers, how many requests
were refused, and in what time.
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
import threading
import time
from pathlib import Path
from typing import Any

import torch
from figures import add_save, record, save

import glasshouse as gh
from glasshouse.serve import Limits, ServedModel, Server

NEW = range(24, 41)  # tokens of an answer: if all had the same, they would end together, and a round be a few waves


def clients(port: int, count: int, seconds: float) -> None:
    """Send requests from threads for a time; print the rate and the latencies of refusals as JSON."""
    tokens, refusals = [], []
    begin = time.perf_counter() + seconds / 4
    end = begin + seconds

    def work(number: int) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
        body = {"model": "model", "prompt": f"for item {number} in", "temperature": 0}
        lengths = random.Random(number)
        while time.perf_counter() < end:
            body["max_tokens"] = lengths.choice(NEW)
            asked = time.perf_counter()
            connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
            response = connection.getresponse()
            answer, now = json.loads(response.read()), time.perf_counter()
            if response.status == 429:
                refusals.append(now - asked)
                time.sleep(float(response.headers["Retry-After"]))
            elif response.status != 200:
                raise SystemExit(f"{response.status}: {answer}")
            elif begin < now < end:
                tokens.append(answer["usage"]["completion_tokens"])

    threads = [threading.Thread(target=work, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    refusals.sort()
    middle, last = (refusals[int(share * (len(refusals) - 1))] if refusals else 0.0 for share in (0.5, 0.99))
    print(json.dumps({"rate": sum(tokens) / seconds, "refused": len(refusals), "median": middle, "p99": last}))


def measure(port: int, count: int, seconds: float) -> dict[str, Any]:
    command = [sys.executable, __file__, "--as-clients", str(port), str(count), str(seconds)]
    return json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description="The rate over HTTP while requests are refused.")
    parser.add_argument("--preset", default="gpt2")
    parser.add_argument("--slots", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    add_save(parser)
    args = parser.parse_args()
    tok = gh.Tokenizer.train(texts=[Path(os.__file__).read_text(encoding="utf-8")], vocab_size=1024)
    model = gh.build(gh.preset(args.preset, vocab_size=len(tok), max_len=128, end_ids=())).eval()
    served = ServedModel("model", model, tok, slots=args.slots)
    server = Server([served], limits=Limits(max_waiting=args.slots))
    server.start()
    print(f"{args.preset}, float32, {torch.get_num_threads()} threads, {args.slots} slots, {args.slots} may wait")
    print(f"{'':14}{'tokens/s':>12}{'refused':>10}{'in, ms: median':>18}{'p99':>8}")
    kept = []
    for _ in range(args.rounds):
        rates = []
        for count in (2 * args.slots, 6 * args.slots):
            found = measure(server.port, count, args.seconds)
            rates.append(found["rate"])
            times = f"{found['median'] * 1e3:>18.1f}{found['p99'] * 1e3:>8.1f}" if found["refused"] else ""
            print(f"{count:>6} clients{found['rate']:>12,.0f}{found['refused']:>10,}{times}", flush=True)
        kept.append(rates[1] / rates[0])
    print(f"accepted requests keep {statistics.median(kept):.1%} of the rate of a full queue")
    record("serve_overload.kept", kept, 1, "%")
    save(args.save)
    server.close()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--as-clients"]:
        clients(int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]))
    else:
        main()
