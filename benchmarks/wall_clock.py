"""Wall clock of whole runs, from the command to the saved model: the default beside every other `train.compile`.

    python benchmarks/wall_clock.py --data FOLDER [--runs translation shakespeare gpt2 gpt2-long bert] [--rounds 1]

FOLDER holds shakespeare/input.txt and multi30k/train.{de,en}. Each run is a process of its own, started twice: first
with empty compilation caches, then with those of the first start. `gpt2-long` is 20,000 steps, of which 500 are run:
its time is that of the first step and of 19,999 median ones. "Behind" compares the default with the fastest setting.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w
import torch
from convergence import characters_settings, translation_settings
from figures import add_save, record, save

import glasshouse as gh
from glasshouse.training.checkpoint.folder import METRICS

SETTINGS = ("auto", "no", "yes")  # of train.compile
STARTS = ("first", "second")
LONG, LONG_SAMPLE = 20_000, 500  # steps of gpt2-long, and those that are run
Table = dict[str, Any]


@dataclass
class WallClock:
    """Seconds from the start of a command."""

    first_step: float
    end: float
    step: float  # the median of the second half


def translation(data: Path, work: Path) -> Table:
    """300 steps of an encoder-decoder on 29,000 pairs."""
    settings = translation_settings(data / "multi30k")
    settings["train"]["steps"] = 300
    settings["train"]["schedule"]["warmup"] = 100
    return settings


def shakespeare(data: Path, work: Path) -> Table:
    """1,000 steps of a character model of 10 million parameters."""
    settings = characters_settings(data)
    settings["train"]["steps"] = 1000
    return settings


def gpt2(data: Path, work: Path, steps: int = 200) -> Table:
    """GPT-2 small on Python's standard library, 65,536 tokens a step."""
    tokenizer = work / "tokenizer"
    if not tokenizer.exists():
        texts = (text for _, text in gh.data.builtin_dataset("stdlib").items("train"))
        gh.Tokenizer.train(texts=texts, vocab_size=50_257).save(tokenizer)
    return {
        "model": {"preset": "gpt2"},
        "data": {"path": "stdlib", "seq_len": 1024, "tokenizer": str(tokenizer)},
        "train": {"steps": steps, "batch_tokens": 65_536, "lr": 6e-4},
    }


def gpt2_long(data: Path, work: Path) -> Table:
    return gpt2(data, work, LONG)


def bert(data: Path, work: Path) -> Table:
    """Three epochs of BERT-base on 1,000 labelled sentences: is it German or English?"""
    folder, labelled = work / "bert", work / "labelled.jsonl"
    if not folder.exists():
        lines = {side: (data / "multi30k" / f"train.{side}").read_text().splitlines()[:500] for side in ("de", "en")}
        rows = [json.dumps({"text": text, "label": side}) for side, texts in lines.items() for text in texts]
        labelled.write_text("\n".join(rows))
        tok = gh.Tokenizer.train(texts=[text for texts in lines.values() for text in texts], vocab_size=2000)
        gh.save(gh.build(gh.preset("bert-base", vocab_size=len(tok))), tok, folder)
    return {
        "model": {"from": str(folder)},
        "data": {"path": str(labelled), "kind": "labelled", "seq_len": 128},
        "train": {"epochs": 3, "batch_tokens": 4096, "lr": 5e-5},
    }


RUNS = {"translation": translation, "shakespeare": shakespeare, "gpt2": gpt2, "gpt2-long": gpt2_long, "bert": bert}


def time_command(table: Table, out: Path, caches: Path) -> WallClock:
    """Start `glasshouse train` with a run file, and time it until it ends or has run the steps to sample."""
    file, log = out.with_suffix(".toml"), out.with_suffix(".log")
    file.write_text(tomli_w.dumps({**table, "train": {**table["train"], "out": str(out)}}))
    env = {
        **os.environ,
        "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
        "TRITON_CACHE_DIR": str(caches / "triton"),
    }
    sampled = table["train"].get("steps") == LONG
    command = [sys.executable, "-m", "glasshouse", "train", str(file)]
    start = time.perf_counter()
    with log.open("w") as output, subprocess.Popen(command, stdout=output, stderr=output, env=env) as process:
        ends: list[float] = []
        while process.poll() is None:
            ends += [time.perf_counter() - start] * (count_lines(out / METRICS) - len(ends))
            if sampled and len(ends) >= LONG_SAMPLE:
                process.send_signal(signal.SIGKILL)
            time.sleep(0.01)
        end = time.perf_counter() - start
    if process.returncode and not (sampled and len(ends) >= LONG_SAMPLE):
        raise SystemExit(log.read_text()[-2000:])
    half = ends[len(ends) // 2 :]
    step = (half[-1] - half[0]) / max(1, len(half) - 1)
    return WallClock(ends[0], ends[0] + (LONG - 1) * step if sampled else end, step)


def count_lines(path: Path) -> int:
    """Return how many steps metrics.jsonl has."""
    return sum(b'"loss"' in line for line in path.read_bytes().splitlines()) if path.exists() else 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", nargs="+", choices=RUNS, default=list(RUNS), help="(default: all)")
    parser.add_argument("--compile", nargs="+", choices=SETTINGS, default=list(SETTINGS), help="(default: all)")
    parser.add_argument("--data", type=Path, default=Path("data"), help="folder of shakespeare and multi30k")
    parser.add_argument("--rounds", type=int, default=1, help="of each setting, in turns (default 1)")
    parser.add_argument("--starts", nargs="+", choices=STARTS, default=list(STARTS), help="(default: both)")
    add_save(parser)
    args = parser.parse_args()
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name() if torch.cuda.is_available() else 'cpu'}")
    print(f"{'':31} {'end':>9} {'first step':>12} {'step':>10}")
    for name in args.runs:
        with tempfile.TemporaryDirectory() as folder:
            measure(name, Path(folder), args)
    save(args.save, "cuda" if torch.cuda.is_available() else "cpu")


def measure(name: str, work: Path, args: argparse.Namespace) -> None:
    """Time both starts of a run with each setting."""
    table = RUNS[name](args.data, work)
    times: dict[tuple[str, str], list[float]] = {}
    for round_number, setting in itertools.product(range(args.rounds), args.compile):
        caches = work / f"caches-{setting}"
        shutil.rmtree(caches, ignore_errors=True)
        chosen = {**table, "train": {**table["train"], "compile": setting}}
        for start in args.starts:
            clock = time_command(chosen, work / f"{setting}-{round_number}-{start}", caches)
            times.setdefault((start, setting), []).append(clock.end)
            print(
                f"{name:16} {setting:7} {start:7} {clock.end:7.1f} s {clock.first_step:10.1f} s "
                f"{1000 * clock.step:7.1f} ms",
                flush=True,
            )
    for start in args.starts:
        medians = {setting: statistics.median(times[start, setting]) for setting in args.compile}
        for setting in args.compile:
            record(f"wall_clock.{name}_{setting}_{start}", times[start, setting], 1, "s")
        if "auto" in medians:
            print(f"{name:16} {start} start: default {medians['auto'] / min(medians.values()) - 1:.0%} behind")


if __name__ == "__main__":
    main()
