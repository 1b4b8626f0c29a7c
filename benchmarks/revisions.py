"""Speed of training, decoding and serving against an earlier revision, in turns.

    python benchmarks/revisions.py REVISION [--rounds 3] [--device cuda]
    python benchmarks/revisions.py path/to/its/src ...

Each round runs both trees once, each in a process of its own, and alternates which comes first. Printed are the rates
of the working tree and their ratio to the revision's: the median over rounds, and the range. Both trees are called by
the public API, without torch.compile, which would take most of the time.
"""

from __future__ import annotations

import argparse
import http.client
import io
import json
import os
import statistics
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PARTS = ("training", "decoding", "serving")
# By device: presets and how long each part runs.
SIZES = {
    "cpu": {"preset": "tiny-decoder", "seq_len": 64, "batch_tokens": 512, "steps": 60, "new": 96, "clients": 4},
    "cuda": {"preset": "gpt2", "seq_len": 1024, "batch_tokens": 32768, "steps": 60, "new": 256, "clients": 16},
}


def measure(device: str) -> dict[str, float]:
    """Return tokens per second of each part, for the tree that PYTHONPATH names."""
    import glasshouse as gh

    size = SIZES[device]
    with tempfile.TemporaryDirectory() as folder:
        return {
            "training": training(gh, size, device, Path(folder)),
            "decoding": decoding(gh, size, device),
            "serving": serving(gh, size, device, Path(folder) / "run" / "model"),
        }


def training(gh: Any, size: Any, device: str, folder: Path) -> float:  # noqa: ANN401 - the package, and a row of SIZES
    """Return the rate of the last two thirds of a run's steps."""
    table = {
        "model": {"preset": size["preset"]},
        "data": {"path": "stdlib", "seq_len": size["seq_len"], "vocab_size": 2048},
        "train": {
            "steps": size["steps"],
            "batch_tokens": size["batch_tokens"],
            "out": str(folder / "run"),
            "device": device,
            "compile": "no",
            "sample_prompts": 0,
            "probes": [],
            "eval_every": size["steps"],
            "save_every": size["steps"],
        },
    }
    ends = []

    class Clock(gh.training.Callback):
        def on_step_end(self, trainer: Any, step: int, metrics: dict[str, Any]) -> None:  # noqa: ANN401
            ends.append(time.perf_counter())

    gh.train(gh.Run.from_dict(table), progress=False, callbacks=[Clock()])
    ends = ends[size["steps"] // 3 :]
    return size["batch_tokens"] * (len(ends) - 1) / (ends[-1] - ends[0])


def decoding(gh: Any, size: Any, device: str) -> float:  # noqa: ANN401
    """Return the rate of eight sequences of an engine."""
    model = gh.build(gh.preset(size["preset"], max_len=512), device=device).eval()
    engine = gh.Engine(model, slots=8, max_len=16 + size["new"])
    for _ in range(2):  # the first time, kernels are chosen and graphs captured
        begin = time.perf_counter()
        requests = [
            engine.submit(list(range(1, 9 + number)), max_new_tokens=size["new"], temperature=0.8, seed=number)
            for number in range(8)
        ]
        engine.run()
        seconds = time.perf_counter() - begin
    return sum(len(request.ids) for request in requests) / seconds


def serving(gh: Any, size: Any, device: str, model: Path) -> float:  # noqa: ANN401
    """Return the rate that clients see who send one completion after the other."""
    loaded, tok = gh.load(str(model), device=device)
    served = gh.serve.ServedModel("tiny", loaded.eval(), tok, slots=size["clients"], max_len=128)
    server = gh.serve.Server([served])
    server.start()
    tokens = []

    def client(number: int) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=300)
        for turn in range(4):
            body = {"model": "tiny", "prompt": f"def f{number}{turn}(", "max_tokens": 64}
            connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
            answer = json.loads(connection.getresponse().read())
            tokens.append(answer["usage"]["completion_tokens"])

    try:
        client(0)
        tokens.clear()
        threads = [threading.Thread(target=client, args=(number,)) for number in range(size["clients"])]
        begin = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return sum(tokens) / (time.perf_counter() - begin)
    finally:
        server.close()


def run(source: Path, device: str) -> dict[str, float]:
    """Measure one tree in a process of its own."""
    own = os.environ.get("PYTHONPATH", "")
    path = os.pathsep.join([str(source), *([own] if own else [])])
    command = [sys.executable, __file__, "--one", device]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(done.stderr[-3000:])
    return json.loads(done.stdout.strip().splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("revision", nargs="?", help="a git revision, or the src folder of another tree")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", choices=SIZES, default="cpu")
    parser.add_argument("--one", choices=SIZES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(args.one)))
        return
    with tempfile.TemporaryDirectory() as folder:
        old = Path(args.revision).resolve()
        if not (old / "glasshouse").is_dir():
            packed = subprocess.run(
                ["git", "archive", args.revision, "src"], cwd=ROOT, check=True, capture_output=True
            )
            with tarfile.open(fileobj=io.BytesIO(packed.stdout)) as archive:
                archive.extractall(folder, filter="data")
            old = Path(folder) / "src"
        rounds = []
        for number in range(args.rounds):
            found = {}
            for name in ("old", "new") if number % 2 else ("new", "old"):
                found[name] = run(old if name == "old" else ROOT / "src", args.device)
            rounds.append(found)
            print(json.dumps(found), file=sys.stderr, flush=True)
    print(f"{'':12}{'tokens/s':>12}{'ratio to ' + str(args.revision)[:12]:>24}   range")
    for part in PARTS:
        ratios = [one["new"][part] / one["old"][part] for one in rounds]
        rate = statistics.median(one["new"][part] for one in rounds)
        print(f"{part:12}{rate:>12,.0f}{statistics.median(ratios):>24.3f}   {min(ratios):.3f} to {max(ratios):.3f}")


if __name__ == "__main__":
    main()
