"""Loading a published model of about 500 MB, beside transformers: seconds and memory, each in a process of its own.

Run by `make bench-load`. Every figure is a median over repeats that alternate between the two, with the spread beside
it. The first answer is timed too: what is mapped into memory is read from the disk only then. Files are in the disk
cache for both, as they are right after a download.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

REPEATS = 7
MODELS = ("gpt2", "llama")
TYPES = ("float32", "bfloat16")


def status_bytes(name: str) -> int:
    """Return one entry of Linux's account of this process: RssAnon, backed by no file, or VmHWM, the most at once."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


class Peak(threading.Thread):
    """Watches how far anonymous memory grows."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.start_bytes = self.highest = status_bytes("RssAnon")
        self.running = True

    def run(self) -> None:
        while self.running:
            self.highest = max(self.highest, status_bytes("RssAnon"))
            time.sleep(0.001)

    def stop(self) -> int:
        self.highest = max(self.highest, status_bytes("RssAnon"))
        self.running = False
        return self.highest - self.start_bytes


def measure(who: str, folder: str, dtype_name: str) -> None:
    """Load one model once, in this process, and print what it took."""
    import torch

    dtype = getattr(torch, dtype_name)
    ids = torch.arange(16)[None]
    if who == "ours":
        import glasshouse as gh
        import glasshouse.hub

        def load() -> torch.nn.Module:
            return gh.load(folder, dtype=dtype)[0]

        load_small = gh.build(gh.preset("tiny-decoder"))  # torch's own first-use costs are neither's
    else:
        import transformers

        transformers.logging.disable_progress_bar()

        def load() -> torch.nn.Module:
            return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()

        small = transformers.GPT2Config(n_layer=1, n_embd=8, n_head=1, vocab_size=9)
        load_small = transformers.GPT2LMHeadModel(small)
    with torch.no_grad():
        load_small(torch.zeros(1, 2, dtype=torch.long))
        peak = Peak()
        peak.start()
        begin = time.perf_counter()
        model = load()
        loaded = time.perf_counter()
        grown = peak.stop()
        resident = status_bytes("VmHWM") / 1e6
        model(ids)
        answered = time.perf_counter()
    size = sum(weight.numel() * weight.element_size() for weight in model.parameters())
    found = {"load": loaded - begin, "answer": answered - begin, "anonymous": grown / size, "resident": resident}
    print(json.dumps(found | {"bytes": size}))


def make(name: str, folder: Path) -> None:
    """Write a random model of transformers' with 124 million parameters, or as many in the shape of Llama."""
    import transformers

    transformers.logging.disable_progress_bar()
    if name == "gpt2":
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config())
    else:
        config = transformers.LlamaConfig(
            vocab_size=32_000,
            hidden_size=768,
            intermediate_size=2560,
            num_hidden_layers=12,
            num_attention_heads=12,
            num_key_value_heads=4,
            tie_word_embeddings=True,
        )
        model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(folder)


def run(who: str, folder: Path, dtype: str) -> dict[str, float]:
    command = [sys.executable, __file__, "--measure", who, str(folder), dtype]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--measure", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--repeats", type=int, default=REPEATS)
    options = parser.parse_args()
    if options.measure:
        measure(*options.measure)
        return
    print(f"{'model':7}{'type':10}{'MB':>6}   {'':24}{'ours':>16}{'transformers':>18}{'ratio':>8}")
    with tempfile.TemporaryDirectory() as place:
        for name in MODELS:
            folder = Path(place) / name
            make(name, folder)
            for dtype in TYPES:
                found: dict[str, list[dict[str, float]]] = {"ours": [], "transformers": []}
                for _ in range(options.repeats):
                    for who, results in found.items():
                        results.append(run(who, folder, dtype))
                size = found["ours"][0]["bytes"] / 1e6
                for key, label in (
                    ("load", "load, s"),
                    ("answer", "load and answer, s"),
                    ("anonymous", "peak anonymous / size"),
                    ("resident", "peak of the process, MB"),
                ):
                    ours, theirs = ([r[key] for r in found[who]] for who in ("ours", "transformers"))
                    ratio = statistics.median(ours) / statistics.median(theirs)
                    print(f"{name:7}{dtype:10}{size:6.0f}   {label:24}{cell(ours):>16}{cell(theirs):>18}{ratio:8.2f}")


def cell(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} ±{(max(values) - min(values)) / 2:.2f}"


if __name__ == "__main__":
    main()
