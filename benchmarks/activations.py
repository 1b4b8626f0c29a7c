"""The activations of a corpus on disk, beside a plain forward pass over it and the speed of the disk.

    python benchmarks/activations.py [--model python-3m] [--tokens 2000000] [--sites resid_post.2] [--device auto]

The plain pass has the same sequences, batches and dtype and computes logits; `gh.activations` stops at the last site.
The disk's speed is that of writing and flushing as many bytes. Each once per round, in turns; then a call that is
killed halfway and resumed, whose shards are compared with those of an uninterrupted one.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import resource
import shutil
import signal
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from figures import add_save, record, save

import glasshouse as gh

Rows = list[list[int]]


def load(name: str, device: str) -> gh.models.Decoder:
    """Return a bundled model, or one of random weights of a preset."""
    torch.manual_seed(0)  # the call that resumes has the same weights
    if name in gh.presets():
        return gh.build(gh.preset(name), device=device, dtype=torch.bfloat16 if device == "cuda" else None).eval()
    return gh.load(name, device=device)[0].eval()


def draw(model: gh.models.Decoder, tokens: int) -> Rows:
    """Return rows of drawn ids, as long as the model's context."""
    source, length = np.random.default_rng(0), model.spec.max_len
    return source.integers(0, model.spec.vocab_size, (-(-tokens // length), length)).tolist()


def plain_pass(model: gh.models.Decoder, rows: Rows, batch_tokens: int) -> float:
    """Return the seconds of the forward pass alone."""
    device = model.token_embedding.table.weight.device
    ids, size = torch.tensor(rows), max(1, batch_tokens // len(rows[0]))
    begin = time.perf_counter()
    with torch.inference_mode():
        for batch in ids.split(size):
            model(batch.to(device))
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begin


def disk(folder: Path, size: int) -> float:
    """Return the seconds of writing so many bytes."""
    block = os.urandom(2**24)
    begin = time.perf_counter()
    with (folder / "bytes").open("wb") as file:
        for _ in range(-(-size // len(block))):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
    seconds = time.perf_counter() - begin
    (folder / "bytes").unlink()
    return seconds


def write(name: str, device: str, rows: Rows, sites: list[str], out: Path) -> None:
    gh.activations(load(name, device), rows, sites, out)


def killed_and_resumed(args: argparse.Namespace, device: str, rows: Rows, whole: Path, out: Path) -> bool:
    """Kill a call halfway, resume it, and return whether its shards are those of an uninterrupted one."""
    process = multiprocessing.get_context("spawn").Process(
        target=write, args=(args.model, device, rows, args.sites, out)
    )
    process.start()
    n_shards = len(list(whole.glob("*.safetensors")))
    while process.is_alive() and len(list(out.glob("*.safetensors"))) < n_shards // 2:
        time.sleep(0.02)
    os.kill(process.pid or 0, signal.SIGKILL)
    process.join()
    print(f"killed with {len(list(out.glob('*.safetensors')))} of {n_shards} shards")
    write(args.model, device, rows, args.sites, out)
    return all((out / one.name).read_bytes() == one.read_bytes() for one in whole.glob("*.safetensors"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="python-3m", help="a bundled model or a preset (default python-3m)")
    parser.add_argument("--sites", nargs="+", default=["resid_post.2"], help="(default resid_post.2)")
    parser.add_argument("--tokens", type=int, default=2_000_000, help="(default 2,000,000)")
    parser.add_argument("--rounds", type=int, default=3, help="(default 3)")
    parser.add_argument("--device", default="auto", help="(default the fastest)")
    add_save(parser)
    args = parser.parse_args()
    device = (gh.device.fastest() if args.device == "auto" else torch.device(args.device)).type
    model = load(args.model, device)
    rows = draw(model, args.tokens)
    times: dict[str, list[float]] = {"plain": [], "disk": [], "activations": []}
    print(f"torch {torch.__version__}, {device}, {args.model}, {len(rows) * len(rows[0]):,} drawn tokens")
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "out")
        for _ in range(args.rounds):
            times["plain"].append(plain_pass(model, rows, 16_384))
            shutil.rmtree(out, ignore_errors=True)
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            begin = time.perf_counter()
            gh.activations(model, rows, args.sites, out)
            times["activations"].append(time.perf_counter() - begin)
            grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
            size = sum(one.stat().st_size for one in out.glob("*.safetensors"))
            times["disk"].append(disk(Path(folder), size))
            print(
                ", ".join(f"{name} {found[-1]:.1f} s" for name, found in times.items()),
                f"{size / 2**20:,.0f} MiB, {grown / 2**10:,.0f} MiB more memory",
            )
        slower = [max(plain, disk) for plain, disk in zip(times["plain"], times["disk"], strict=True)]
        ratios = [own / limit for own, limit in zip(times["activations"], slower, strict=True)]
        print(f"relative to the slower: {statistics.median(ratios):.2f} [{min(ratios):.2f} - {max(ratios):.2f}]")
        record(f"activations.{args.model.replace('-', '_')}", ratios, 2)
        same = killed_and_resumed(args, device, rows, out, Path(folder, "again"))
        print(f"resumed: {'the same bytes' if same else 'OTHER BYTES'}")
    save(args.save, device)


if __name__ == "__main__":
    main()
