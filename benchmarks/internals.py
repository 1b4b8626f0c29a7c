"""Decoding with activations recorded, probes scored or vectors added by request, beside plain decoding.

    python benchmarks/internals.py [--model gpt2] [--requests 8] [--prompt 128] [--new 64] [--device auto]

One call of an engine per setting in each round, in turns: whole-call tokens per second as a share of that of a plain
engine in the same round. "beside" is the rate of requests that ask for nothing while one of the batch records a site.
On a GPU: --model llama-1b --requests 64 --new 256.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from typing import Any

import numpy as np
import torch
from figures import add_save, record, save

import glasshouse as gh
from glasshouse import device as machine
from glasshouse.inspection.linear_probe import HeldOut, LinearProbe
from glasshouse.inspection.steering import SteeringVector, model_fingerprint

PROBES = 16
Settings = dict[str, Any]


def make_engine(model: gh.models.Decoder, slots: int, max_len: int, site: str) -> gh.Engine:
    """Return an engine with a steering vector and sixteen probes of one site."""
    mark = model_fingerprint(model)
    vector = SteeringVector(0.1 * torch.randn(model.spec.d_model), site, mark)
    held_out = HeldOut(accuracy=1.0, auc=1.0, positive=1, negative=1)
    probes = {
        f"probe {number}": LinearProbe(torch.randn(model.spec.d_model), 0.0, site, mark, held_out)
        for number in range(PROBES)
    }
    return gh.Engine(model, slots=slots, max_len=max_len, steering={"vector": vector}, probes=probes)


def rate(engine: gh.Engine, prompts: list[list[int]], lengths: list[int], each: list[Settings]) -> float:
    """Return the tokens per second of one call."""
    begin = time.perf_counter()
    requests = [
        engine.submit(prompt, max_new_tokens=new, min_new_tokens=new, **settings)
        for prompt, new, settings in zip(prompts, lengths, itertools.cycle(each), strict=False)
    ]
    engine.run()
    for request in requests:
        _ = request.completions()
    return sum(lengths) / (time.perf_counter() - begin)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="gpt2", help="a preset, with random weights (default gpt2)")
    parser.add_argument("--requests", type=int, default=8, help="of a call (default 8)")
    parser.add_argument("--prompt", type=int, default=128, help="[tokens] (default 128)")
    parser.add_argument("--new", type=int, default=64, help="[tokens] of each request (default 64)")
    parser.add_argument(
        "--turnover", type=int, default=1, help="4: four for each slot, of half to one and a half as many new tokens"
    )
    parser.add_argument("--rounds", type=int, default=3, help="(default 3)")
    parser.add_argument("--device", default="auto")
    add_save(parser)
    args = parser.parse_args()
    device = machine.resolve(args.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = gh.build(gh.preset(args.model), device=device, dtype=dtype).eval()
    site = f"resid_post.{model.spec.n_layers // 2}"
    count, spread = args.requests * args.turnover, args.new // 2 if args.turnover > 1 else 0
    engine = make_engine(model, args.requests, args.prompt + args.new + spread, site)
    draw = np.random.default_rng(0)
    plain: Settings = {}
    settings: dict[str, list[Settings]] = {
        "plain": [plain] * args.requests,
        "one site of new tokens": [{"record": f"{site}[position=new]"}] * args.requests,
        "one site, prompt too": [{"record": site}] * args.requests,
        "16 probes": [{"probes": tuple(engine.probes)}] * args.requests,
        "lens of all layers": [{"lens": 5}] * args.requests,
        "steering": [{"steer": {"vector": 1.0}}] * args.requests,
        "an edit": [{"edits": {f"{site}[position=new]": gh.inspection.scale(0.9)}}] * args.requests,
        "beside": [{"record": f"{site}[position=new]"}, *[plain] * (args.requests - 1)],
    }
    rates: dict[str, list[float]] = {name: [] for name in settings}
    for number in range(-1, args.rounds):  # the first warms up
        for name, each in settings.items():
            ids = draw.integers(5, model.spec.vocab_size, (count, args.prompt)).tolist()  # no shared prefix
            lengths = np.random.default_rng(number + 1).integers(args.new - spread, args.new + spread + 1, count)
            measured = rate(engine, ids, lengths.tolist(), each)
            if number >= 0:
                rates[name].append(measured)
    print(f"{args.model} on {device}, {args.requests} requests of {args.prompt} + {args.new} tokens")
    for name, measured in rates.items():
        shares = [one / whole for one, whole in zip(measured, rates["plain"], strict=True)]
        print(
            f"{name:24} {statistics.median(measured):10,.0f} tokens/s {statistics.median(shares):7.1%} "
            f"[{min(shares):.1%} - {max(shares):.1%}]"
        )
        record(f"internals.{args.model}_{name.replace(' ', '_').replace(',', '')}".replace("-", "_"), shares, 1, "%")
    save(args.save, device)


if __name__ == "__main__":
    main()
