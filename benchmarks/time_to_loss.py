"""Bits per byte of a model of Python code against the seconds of its training steps, for any recipe.

    python benchmarks/time_to_loss.py [--recipes modern-base qwen3 gpt2 my.toml] [--steps 650] [--seeds 1]
    python benchmarks/time_to_loss.py --leave-out all --steps 325    # what each ingredient of `modern-base` is worth

The protocol: all Python files of the standard library and site-packages between 200 and 200,000 bytes, in the order
of their paths, shuffled with seed 0; the first 2% are held out. A byte-level BPE of 32,768 tokens is trained on the
rest, once for all runs (`--tokenizer` takes one that a run before has left in FOLDER). Steps of 131,072 tokens in
sequences of 1,024. Seconds are those of steps alone: the first step and those after a validation, which wait for
compilers and caches, count as the median of the others. Bits per byte are of the whole held-out part. FOLDER gets
curve.json, and curve.svg where matplotlib is installed.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import statistics
import sys
import sysconfig
import time
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from figures import add_save, record, save

import glasshouse as gh
from glasshouse.training import Callback

Settings = dict[str, Any]

SMALLEST, LARGEST = 200, 200_000  # bytes of a file
HELD_OUT = 0.02  # of the files
VOCABULARY, CONTEXT, STEP_TOKENS = 32_768, 1024, 131_072

WINNER = "modern-base"


def recipe(name: str) -> Settings:
    """Return model and training of a recipe of the package, as its file has them."""
    table = tomllib.loads((gh.training.run.RECIPES / f"{name}.toml").read_text(encoding="utf-8"))
    return {"model": {**table["model"], "max_len": CONTEXT}, "train": table["train"]}


RECIPES: dict[str, Settings] = {
    WINNER: recipe(WINNER),
    "qwen3": {  # the same trunk of 85 million parameters
        "model": {
            "preset": "qwen3-small",
            "vocab_size": VOCABULARY,
            "max_len": CONTEXT,
            "d_model": 768,
            "n_layers": 12,
            "n_heads": 12,
            "n_kv_heads": 4,
            "d_ff": 2048,
        },
        "train": {
            "optimizer": {"kind": "muon", "lr": 0.02, "adamw": {"lr": 3e-3, "weight_decay": 0.0}},
            "schedule": {"kind": "wsd", "warmup": 20, "decay_fraction": 0.5, "final_factor": 0.0},
        },
    },
    "gpt2": {
        "model": {"preset": "gpt2", "qkv_bias": False, "out_bias": False, "ffn_bias": False},
        "train": {
            "optimizer": {"kind": "adamw", "lr": 1e-3, "weight_decay": 0.1},
            "schedule": {"kind": "cosine", "warmup": 50, "final_factor": 0.1},
        },
    },
}
# What to set to leave an ingredient of the winner out; None: drop the setting.
INGREDIENTS: dict[str, Settings] = {
    "momentum warm-up": {"train.optimizer.momentum_warmup": None},
    "normalized rows": {"train.optimizer.beta2": None},
    "weight decay": {"train.optimizer.weight_decay": 0.0},
    "a rate for embeddings": {"train.optimizer.embedding": None},
    "a rate for the head": {"train.optimizer.head": None},
    "norm of the embedding": {"model.embed_norm": False},
    "value embeddings": {"model.value_embeddings": False},
    "soft-cap of the logits": {"model.logit_softcap": "none"},
    "small weights at first": {"model.init": "fan_in"},  # residual projections begin at zero in both
    "heads of 128": {"model.n_heads": 12, "model.n_kv_heads": 12},
    "ReLU squared": {"model.feedforward": "swiglu", "model.d_ff": 2048},
    "no gradient clipping": {"train.grad_clip": 1.0},
    "half of the steps decay": {"train.schedule.decay_fraction": 0.2},
}


def python_files() -> list[Path]:
    """Return the Python files of this machine, in the order of the protocol."""
    roots = {Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib")}
    found = {
        path
        for root in roots
        for path in root.rglob("*.py")
        if path.is_file() and SMALLEST <= path.stat().st_size <= LARGEST
    }
    files = sorted(found)
    random.Random(0).shuffle(files)
    return files


def prepare(folder: Path, most: int | None, tokenizer: Path | None, vocabulary: int) -> Settings:
    """Write both parts, their tokenizer and their ids, unless they are there; return the settings of the data."""
    parts = {name: folder / f"{name}.jsonl" for name in ("train", "held_out")}
    if not all(path.exists() for path in parts.values()):
        files = python_files()[:most]
        folder.mkdir(parents=True, exist_ok=True)
        cut = max(1, round(HELD_OUT * len(files)))
        for path, own in zip(parts.values(), (files[cut:], files[:cut]), strict=True):
            texts = (file.read_text(encoding="utf-8", errors="ignore") for file in own)
            path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
        note(f"{len(files):,} files, {sum(path.stat().st_size for path in parts.values()) / 1e6:,.0f} MB")
    made = tokenizer or folder / "tokenizer"
    if not made.exists():
        with parts["train"].open(encoding="utf-8") as lines:
            texts = (json.loads(line)["text"] for line in lines)
            gh.Tokenizer.train(texts=texts, vocab_size=vocabulary).save(made)
        note("trained the tokenizer")
    tok = gh.Tokenizer.load(made)
    corpora = {name: gh.data.prepare(path, tok, folder / name) for name, path in parts.items()}  # once for all runs
    note(f"{corpora['train'].n_tokens:,} tokens to train on")
    return {"path": str(folder / "train"), "validation": str(folder / "held_out"), "seq_len": CONTEXT}


@dataclass
class Curve(Callback):
    """Keeps the seconds of each step, and the bits per byte at each validation."""

    waits: set[int] = field(default_factory=set)  # steps whose time is not only their own
    ends: list[float] = field(default_factory=list)
    points: list[tuple[int, float]] = field(default_factory=list)

    def on_step_end(self, trainer: Any, step: int, metrics: dict[str, Any]) -> None:  # noqa: ANN401
        self.ends.append(time.perf_counter())

    def on_validation_end(self, trainer: Any, step: int, metrics: dict[str, float]) -> None:  # noqa: ANN401
        self.points.append((step, metrics["bits_per_byte"]))
        self.waits.add(step + 1)

    def on_checkpoint(self, trainer: Any, step: int) -> None:  # noqa: ANN401
        self.waits.add(step + 1)

    def seconds(self) -> list[float]:
        """Return the seconds of steps up to the end of each."""
        own = [b - a for a, b in zip(self.ends, self.ends[1:], strict=False)]  # of steps 2, 3, ...
        usual = statistics.median(one for step, one in enumerate(own, 2) if step not in self.waits)
        total, result = usual, [usual]
        for step, one in enumerate(own, 2):
            total += usual if step in self.waits else one
            result.append(total)
        return result


def measure(name: str, settings: Settings, args: argparse.Namespace, data: Settings, seed: int) -> Settings:
    """Train, and return the curve."""
    train = {
        **settings["train"],
        "steps": args.steps,
        "batch_tokens": args.batch_tokens,
        "seed": seed,
        "eval_every": -(-args.steps // args.points),
        "eval_samples": 10**9,
        "save_every": args.steps,
        "sample_prompts": 0,
        "out": str(args.out / f"{name.replace(' ', '-')}-{seed}"),
    }
    shutil.rmtree(train["out"], ignore_errors=True)  # of a run before, which would be resumed
    curve = Curve()
    table = {"model": settings["model"], "data": {**data, "seq_len": args.context}, "train": train}
    result = gh.train(gh.Run.from_dict(table), progress=False, callbacks=[curve])
    seconds, tokens = curve.seconds(), args.batch_tokens * args.steps
    found = {
        "name": name,
        "seed": seed,
        "parameters": gh.count_parameters(result.model.spec),
        "points": [
            {"step": step, "seconds": seconds[step - 1], "bits_per_byte": bits} for step, bits in curve.points
        ],
        "tokens_per_second": tokens / seconds[-1],
    }
    last = found["points"][-1]
    print(
        f"{name:28} seed {seed} {last['bits_per_byte']:8.4f} bits per byte {last['seconds']:8.1f} s "
        f"{found['tokens_per_second']:12,.0f} tokens/s {found['parameters']:14,} parameters",
        flush=True,
    )
    return found


def without(settings: Settings, changes: Settings) -> Settings:
    """Return the settings with changes by path."""
    table: Settings = json.loads(json.dumps(settings))
    for path, value in changes.items():
        *above, last = path.split(".")
        inner = table
        for one in above:
            inner = inner[one]
        if value is None:
            inner.pop(last)
        else:
            inner[last] = value
    return table


def keep(curves: list[Settings], folder: Path) -> None:
    """Write the curves, and draw them."""
    (folder / "curve.json").write_text(json.dumps(curves, indent=1))
    try:
        from matplotlib import pyplot
    except ImportError:
        return
    figure, axes = pyplot.subplots()
    for one in curves:
        points = one["points"]
        axes.plot(
            [point["seconds"] for point in points],
            [point["bits_per_byte"] for point in points],
            marker="o",
            label=f"{one['name']}, seed {one['seed']}",
        )
    axes.set(xlabel="seconds of training steps", ylabel="bits per byte of held-out files")
    axes.legend()
    figure.savefig(folder / "curve.svg")
    pyplot.close(figure)


def note(message: str) -> None:
    print(f"  {message}", file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipes", nargs="+", default=[WINNER], help=f"{', '.join(RECIPES)}, or a TOML file")
    parser.add_argument("--leave-out", nargs="+", default=[], help=f'ingredients of `{WINNER}`, or "all"')
    parser.add_argument("--steps", type=int, default=650, help="(default 650)")
    parser.add_argument("--seeds", type=int, default=1, help="runs of each, with seeds from 0 (default 1)")
    parser.add_argument("--points", type=int, default=5, help="validations in a run (default 5)")
    parser.add_argument("--batch-tokens", type=int, default=STEP_TOKENS, help=f"(default {STEP_TOKENS:,})")
    parser.add_argument("--context", type=int, default=CONTEXT, help=f"(default {CONTEXT:,})")
    parser.add_argument("--vocab-size", type=int, default=VOCABULARY, help=f"(default {VOCABULARY:,})")
    parser.add_argument("--files", type=int, help="take only so many files: for trying it out")
    parser.add_argument("--tokenizer", type=Path, help="a folder that a run before has left")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="further settings of all recipes")
    parser.add_argument("--out", type=Path, default=Path("runs/time-to-loss"), help="(default runs/time-to-loss)")
    add_save(parser)
    args = parser.parse_args()
    left_out = list(INGREDIENTS) if args.leave_out == ["all"] else args.leave_out
    if unknown := set(left_out) - set(INGREDIENTS):
        parser.error(f"--leave-out: {', '.join(INGREDIENTS)}; not {', '.join(sorted(unknown))}.")
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name() if torch.cuda.is_available() else 'cpu'}")
    data = prepare(args.out, args.files, args.tokenizer, args.vocab_size)
    recipes = {
        name: RECIPES[name] if name in RECIPES else tomllib.loads(Path(name).read_text()) for name in args.recipes
    }
    recipes |= {f"without {name}": without(RECIPES[WINNER], INGREDIENTS[name]) for name in left_out}
    curves = []
    for name, settings in recipes.items():
        for seed in range(args.seeds):
            curves.append(measure(name, gh.config.override(settings, args.set), args, data, seed))
            keep(curves, args.out)
        ends = [one["points"][-1] for one in curves if one["name"] == name]
        figure = f"time_to_loss.{name.replace(' ', '_').replace('-', '_')}"
        record(f"{figure}_bits", [one["bits_per_byte"] for one in ends], 4, "bits per byte")
        record(f"{figure}_seconds", [one["seconds"] for one in ends], 0, "s")
    save(args.save, "cuda" if torch.cuda.is_available() else "cpu")


if __name__ == "__main__":
    main()
