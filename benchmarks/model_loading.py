"""Time and memory to load a model of about 500 MB, compared with transformers, each in its own process.

Run by `make bench-load`. Every number is a median over repeats that alternate between the two, with half the range.
The first forward pass is timed too: memory-mapped weights are read from the disk only then. Files are in the page
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

from figures import add_save, record, save

REPEATS = 7
MODELS = ("gpt2", "llama")
DTYPES = ("float32", "bfloat16")


def status_bytes(name: str) -> int:
    """Return one entry of /proc/self/status: RssAnon, memory without a file behind it, or VmHWM, peak resident."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


class PeakMemory(threading.Thread):
    """Samples anonymous memory and tracks its peak."""

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


def measure(library: str, folder: str, dtype_name: str) -> None:
    """Load one model once, in this process, and print time and memory."""
    import torch

    dtype = getattr(torch, dtype_name)
    ids = torch.arange(16)[None]
    if library == "ours":
        import glasshouse as gh
        import glasshouse.hub

        def load() -> torch.nn.Module:
            return gh.load(folder, dtype=dtype)[0]

        load_small = gh.build(gh.preset("tiny-decoder"))  # exclude torch's own first-use costs
    else:
        import transformers

        transformers.logging.disable_progress_bar()

        def load() -> torch.nn.Module:
            return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()

        small = transformers.GPT2Config(n_layer=1, n_embd=8, n_head=1, vocab_size=9)
        load_small = transformers.GPT2LMHeadModel(small)
    with torch.no_grad():
        load_small(torch.zeros(1, 2, dtype=torch.long))
        peak = PeakMemory()
        peak.start()
        begin = time.perf_counter()
        model = load()
        loaded = time.perf_counter()
        grown = peak.stop()
        resident = status_bytes("VmHWM") / 1e6
        model(ids)
        first_output = time.perf_counter()
    size = sum(weight.numel() * weight.element_size() for weight in model.parameters())
    found = {"load": loaded - begin, "forward": first_output - begin, "anonymous": grown / size, "resident": resident}
    print(json.dumps(found | {"bytes": size}))


def save_random_model(name: str, folder: Path) -> None:
    """Save a randomly initialised transformers model: GPT-2 small, or a Llama of about as many parameters."""
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


def run(library: str, folder: Path, dtype: str) -> dict[str, float]:
    command = [sys.executable, __file__, "--measure", library, str(folder), dtype]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--measure", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument(
        "--repeats", type=int, default=REPEATS, help=f"processes per model and library (default {REPEATS})"
    )
    add_save(parser)
    options = parser.parse_args()
    if options.measure:
        measure(*options.measure)
        return
    print(f"{'model':7}{'dtype':10}{'MB':>6}   {'':26}{'ours':>16}{'transformers':>18}{'ratio':>8}")
    with tempfile.TemporaryDirectory() as temporary:
        for name in MODELS:
            folder = Path(temporary) / name
            save_random_model(name, folder)
            for dtype in DTYPES:
                found: dict[str, list[dict[str, float]]] = {"ours": [], "transformers": []}
                for _ in range(options.repeats):
                    for library, results in found.items():
                        results.append(run(library, folder, dtype))
                size = found["ours"][0]["bytes"] / 1e6
                for key, label in (
                    ("load", "load, s"),
                    ("forward", "load and first forward, s"),
                    ("anonymous", "peak anonymous / size"),
                    ("resident", "peak resident, MB"),
                ):
                    ours, theirs = ([r[key] for r in found[library]] for library in ("ours", "transformers"))
                    ratio = statistics.median(ours) / statistics.median(theirs)
                    print(f"{name:7}{dtype:10}{size:6.0f}   {label:26}{cell(ours):>16}{cell(theirs):>18}{ratio:8.2f}")
                    if key == "load":
                        record(f"model_loading.{name}_{dtype}", ours, 2, "s")
                        record(f"model_loading.{name}_{dtype}_hf", theirs, 2, "s")
                        record(f"model_loading.{name}_{dtype}_ratio", ratio, 2)
    save(options.save)


def cell(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} ±{(max(values) - min(values)) / 2:.2f}"


if __name__ == "__main__":
    main()
