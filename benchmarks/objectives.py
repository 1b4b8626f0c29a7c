"""What objectives beside the usual ones add: distillation against the same student alone, and DPO before and after.

    python benchmarks/objectives.py [--parts distillation dpo] [--out runs/objectives] [--seeds 3] [--steps 100]

Needs no download: the teacher is the bundled python-3m, the data are built in. Minutes on two idle cores. A part that
was interrupted resumes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from itertools import islice
from pathlib import Path

import glasshouse as gh
from glasshouse.training import Result, Run

TEACHER = "python-3m"
STUDENT = ("model.d_model=64", "model.n_layers=2", "model.n_heads=2", "model.n_kv_heads=2", "model.d_ff=192")
DISTILLATION = f'train.objective={{ kind = "distillation", teacher = "{TEACHER}" }}'


def train(out: Path, recipe: str, *settings: str) -> tuple[Result, float]:
    """Train, and return the result and the seconds."""
    began = time.perf_counter()
    result = gh.train(Run.load(recipe, *settings, f"train.out={out}"), progress=False)
    return result, time.perf_counter() - began


def write_texts(out: Path) -> tuple[str, str]:
    """Write some files of the standard library, by its splits; return the settings that name them."""
    out.mkdir(parents=True, exist_ok=True)
    for split, count in (("train", 300), ("validation", 8)):
        texts = islice(gh.data.builtin_dataset("stdlib").items(split), count)
        (out / f"{split}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for _, text in texts))
    return f"data.path={out / 'train.jsonl'}", f"data.validation={out / 'validation.jsonl'}"


def distillation(out: Path, seeds: int, steps: int) -> None:
    """Train a small decoder on some of the standard library with and without a teacher, with its tokenizer."""
    _, tok = gh.load(TEACHER)
    assert tok is not None
    tok.save(out / "tokenizer")  # which a distilled student would get without being told
    common = (*STUDENT, *write_texts(out), f"data.tokenizer={out / 'tokenizer'}", "data.seq_len=64")
    common += ("train.batch_tokens=1024", "train.schedule.warmup=10", f"train.steps={steps}")
    common += (f"train.eval_every={steps}", f"train.save_every={steps}", "train.probes=[]", "train.sample_prompts=0")
    found: dict[str, list[float]] = {"alone": [], "distilled": []}
    for seed in range(seeds):
        for name, more in (("alone", ()), ("distilled", (DISTILLATION,))):
            result, seconds = train(out / f"{name}-{seed}", "stdlib", *common, f"train.seed={seed}", *more)
            metrics = result.report.metrics
            found[name].append(metrics["loss"])
            beside = f", the teacher's {metrics['teacher_loss']:.3f}" if more else ""
            print(f"seed {seed}, {name}: validation loss {metrics['loss']:.4f}{beside}, {seconds:.0f} s", flush=True)
    print(f"\n| student, {steps} steps | mean | least | most |\n|---|---|---|---|")
    for name, losses in found.items():
        print(f"| {name} | {statistics.fmean(losses):.3f} | {min(losses):.3f} | {max(losses):.3f} |")


def write_pairs(out: Path) -> None:
    """Write some of the built-in conversations and preferences, by split."""
    out.mkdir(parents=True, exist_ok=True)
    for split, count in (("train", 3000), ("validation", 200)):
        chats = islice(gh.data.builtin_dataset("chat").items(split), count)
        pairs = islice(gh.data.builtin_dataset("preferences").items(split), count)
        columns = ("prompt", "chosen", "rejected")
        records = {
            "chat": [{"messages": messages} for messages in chats],
            "preferences": [dict(zip(columns, pair, strict=True)) for pair in pairs],
        }
        for name, each in records.items():
            (out / f"{name}-{split}.jsonl").write_text("".join(json.dumps(one) + "\n" for one in each))


def dpo(out: Path) -> None:
    """Train a small decoder on conversations (SFT), then by DPO; evaluate both on held-out preferences."""
    write_pairs(out)
    common = ("data.seq_len=96", "train.batch_tokens=2048", "train.probes=[]", "train.sample_prompts=0")
    chats, pairs = (
        (f"data.path={out / name}-train.jsonl", f"data.validation={out / name}-validation.jsonl")
        for name in ("chat", "preferences")
    )
    small = (*STUDENT, "data.vocab_size=1024", "train.steps=250", "train.eval_every=250", "train.save_every=250")
    sft, first = train(out / "sft", "stdlib", *common, *chats, *small)
    steps = ("train.steps=40", "train.schedule.warmup=4", "train.eval_every=10", "train.save_every=40")
    tuned, second = train(out / "dpo", "dpo", *common, *pairs, *steps, f"model.from={out / 'sft' / 'model'}")
    print(f"\n| model | seconds | {' | '.join(METRICS)} |\n|---|---|{'---|' * len(METRICS)}")
    for name, result, seconds in (("after SFT", sft, first), ("after DPO", tuned, second)):
        held_out = out / "preferences-validation.jsonl"
        report = gh.evaluate(result.model, result.datasets.tok, held_out, seq_len=96, generate=0)
        values = " | ".join(f"{report.metrics[metric]:.3f}" for metric in METRICS)
        print(f"| {name} | {seconds:.0f} | {values} |", flush=True)
    print(f"with the reference: {tuned.report.metrics}")


METRICS = ("accuracy", "chosen_loss", "rejected_loss")  # without a reference: by the model's own log-probabilities


def main() -> None:
    """Run the parts that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=("distillation", "dpo"), default=["distillation", "dpo"])
    parser.add_argument("--out", type=Path, default=Path("runs/objectives"))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=100, help="of each student")
    given = parser.parse_args()
    if "distillation" in given.parts:
        distillation(given.out, given.seeds, given.steps)
    if "dpo" in given.parts:
        dpo(given.out)


if __name__ == "__main__":
    main()
