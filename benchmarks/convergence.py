"""Convergence of training runs on public datasets and on the built-in ones, with `gh.train`.

    python benchmarks/convergence.py --parts shakespeare --data FOLDER [--out runs/learning] [--seeds 1]

FOLDER holds shakespeare/input.txt and multi30k/{train,val,test_2016_flickr}.{de,en}; dates and langid need
none. Each part prints its metrics and training time. An interrupted run resumes.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from figures import add_save, record, save

import glasshouse as gh
from glasshouse.training import Result
from glasshouse.training.logging.progress import SilentReporter
from glasshouse.training.step import StepMetrics

Settings = dict[str, Any]


class Timer(SilentReporter):
    """Times a run, and logs its progress now and then."""

    def __init__(self, name: str) -> None:
        self.name, self.began, self.first = name, time.perf_counter(), 0.0

    def log(self, text: str) -> None:
        print(f"  {self.name}: {text}", file=sys.stderr, flush=True)

    def on_step_end(self, step: int, steps: int, outcome: StepMetrics, speed: Any) -> None:  # noqa: ANN401
        self.first = self.first or time.perf_counter()
        if step % max(1, steps // 5) == 0:
            self.log(
                f"step {step}, loss {outcome.loss:.4f}, {speed.tokens_per_second:,.0f} tokens/s, {self.seconds:.0f} s"
            )

    def on_validation_end(self, step: int, metrics: dict[str, float]) -> None:
        self.log(f"step {step}, validation {', '.join(f'{name} {value:.4f}' for name, value in metrics.items())}")

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.began


def run(name: str, settings: Settings, out: Path) -> tuple[Result, float]:
    """Train, and return the result and the seconds, data preparation and evaluation included."""
    settings["train"]["out"] = str(out / name)
    timer = Timer(name)
    result = gh.train(gh.Run.from_dict(settings), timer)
    return result, timer.seconds


def show(name: str, **metrics: object) -> None:
    print(f"{name}: {', '.join(f'{key} {value}' for key, value in metrics.items())}", flush=True)


MEASURED: dict[str, list[float]] = {}  # what each seed gave, by the name of the figure


def keep(figure: str, value: float, digits: int, unit: str = "") -> None:
    """Record a figure over the seeds so far."""
    MEASURED.setdefault(figure, []).append(value)
    record(f"convergence.{figure}", MEASURED[figure], digits, unit)


def parameters(model: torch.nn.Module) -> int:
    return sum(weight.numel() for weight in model.parameters())


# Shakespeare, character level


NO_BIAS: Settings = {"qkv_bias": False, "out_bias": False, "ffn_bias": False}
CHARACTERS: Settings = {
    "vocab_size": 263,
    "seq_len": 256,
    "val_fraction": 0.1,
}  # ASCII bytes and special tokens


def train_shakespeare(data: Path, out: Path, seed: int, precision: str = "auto") -> tuple[float, float]:
    """Train as nanoGPT's train_shakespeare_char does: the same model, batch size, dropout, learning rate, steps.

    Return the validation loss of the best checkpoint, and the seconds.
    """
    drop = {"dropout": 0.2, "attention_dropout": 0.2, "embed_dropout": 0.2}
    shape = {"n_layers": 6, "d_model": 384, "n_heads": 6, "norm": {"kind": "layer", "bias": False}}
    settings = {
        "model": {"preset": "gpt2", **shape, **drop, **NO_BIAS},
        "data": {"path": str(data / "shakespeare" / "input.txt"), **CHARACTERS},
        "train": {
            "steps": 5000,
            "batch_tokens": 64 * 256,
            "optimizer": {"kind": "adamw", "lr": 1e-3, "beta2": 0.99, "weight_decay": 0.1},
            "schedule": {"kind": "cosine", "warmup": 100, "final_factor": 0.1},
            "eval_every": 250,
            "eval_samples": 10**6,
            "patience": 1000,  # keeps the best checkpoint
            "precision": precision,
            "seed": seed,
        },
    }
    suffix = "" if precision == "auto" else f"-{precision}"
    result, seconds = run(f"shakespeare-{seed}{suffix}", settings, out)
    return result.report.metrics["loss"], seconds


def shakespeare(data: Path, out: Path, seed: int) -> None:
    """Train in the precision that the device trains in by default."""
    loss, seconds = train_shakespeare(data, out, seed)
    show("shakespeare", loss=f"{loss:.4f}", steps=5000, seconds=f"{seconds:.0f}")
    keep("shakespeare", loss, 4, "nats")
    keep("shakespeare_seconds", seconds, 0, "s")


def shakespeare_precision(data: Path, out: Path, seed: int) -> None:
    """Train in float32, bfloat16 and fp8, which needs a GPU that has it."""
    exact, _ = train_shakespeare(data, out, seed, "float32")
    keep("shakespeare_float32", exact, 4, "nats")
    for precision in ("bfloat16", "fp8"):
        loss, _ = train_shakespeare(data, out, seed, precision)
        keep(f"shakespeare_{precision}", loss, 4, "nats")
        show(
            f"shakespeare in {precision}", loss=f"{loss:.4f}", float32=f"{exact:.4f}", more=f"{loss / exact - 1:+.2%}"
        )


def characters_settings(data: Path) -> Settings:
    """Return the settings of a modern architecture of nanoGPT's width and depth (rotary, SwiGLU, Muon, EMA)."""
    drop = {"dropout": 0.2, "attention_dropout": 0.2, "embed_dropout": 0.2}
    return {
        "model": {"preset": "qwen3-small", "n_kv_heads": 6, **drop},
        "data": {"path": str(data / "shakespeare" / "input.txt"), **CHARACTERS},
        "train": {
            "steps": 2500,
            "batch_tokens": 64 * 256,
            "optimizer": {
                "kind": "muon",
                "lr": 0.02,
                "weight_decay": 0.1,
                "adamw": {"lr": 2e-3, "weight_decay": 0.1},
            },
            "schedule": {"kind": "linear", "warmup": 50, "final_factor": 0.0},
            "ema": 0.99,
            "eval_every": 250,
            "eval_samples": 10**6,
            "patience": 1000,
        },
    }


def shakespeare_best(data: Path, out: Path, seed: int) -> None:
    """Train a modern architecture in half of nanoGPT's steps."""
    settings = characters_settings(data)
    settings["train"]["seed"] = seed
    result, seconds = run(f"shakespeare-best-{seed}", settings, out)
    show("shakespeare-best", loss=f"{result.report.metrics['loss']:.4f}", steps=2500, seconds=f"{seconds:.0f}")
    keep("shakespeare-best", result.report.metrics["loss"], 4, "nats")
    keep("shakespeare-best_seconds", seconds, 0, "s")


# German to English


def translation_settings(folder: Path) -> Settings:
    """Return the settings of an encoder-decoder on 29,000 captions."""
    return {
        "model": {
            "preset": "vaswani-base",
            "d_model": 256,
            "n_layers": 4,
            "n_heads": 4,
            "d_ff": 1024,
            "norm_placement": "pre",
            "final_norm": True,
            "dropout": 0.3,
            "embed_dropout": 0.1,
            "attention_dropout": 0.1,
        },
        "data": {
            "path": [str(folder / "train.de"), str(folder / "train.en")],
            "validation": [str(folder / "val.de"), str(folder / "val.en")],
            "kind": "pairs",
            "vocab_size": 8000,
            "seq_len": 128,
        },
        "train": {
            "steps": 2200,
            "batch_tokens": 12_000,
            "label_smoothing": 0.1,
            "optimizer": {"kind": "adamw", "lr": 2e-3, "beta2": 0.98, "weight_decay": 0.01},
            "schedule": {"kind": "linear", "warmup": 400, "final_factor": 0.0},
            "ema": 0.998,
            "eval_every": 500,
        },
    }


def multi30k(data: Path, out: Path, seed: int) -> None:
    """Train an encoder-decoder on 29,000 captions, and translate the test set with beam search."""
    folder = data / "multi30k"
    settings = translation_settings(folder)
    settings["train"]["seed"] = seed
    result, seconds = run(f"multi30k-{seed}", settings, out)
    sources, references = ((folder / f"test_2016_flickr.{side}").read_text().splitlines() for side in ("de", "en"))
    tok = result.datasets.tok
    start = time.perf_counter()
    predictions = [
        completion.text for completion in gh.generate(result.model, tok, sources, max_new_tokens=80, beams=5)
    ]
    generation = time.perf_counter() - start
    bleu, chrf = (score(predictions, references).value for score in (gh.evaluation.bleu, gh.evaluation.chrf))
    show(
        "multi30k",
        bleu=f"{bleu:.2f}",
        chrf=f"{chrf:.2f}",
        parameters=f"{parameters(result.model):,}",
        training=f"{seconds:.0f} s",
        generation=f"{generation:.0f} s",
        steps=2200,
    )
    keep("multi30k_bleu", bleu, 1, "BLEU")
    keep("multi30k_chrf", chrf, 1, "chrF")
    keep("multi30k_seconds", seconds, 0, "s")
    keep("multi30k_generation", generation, 0, "s")


def translate(data: Path, out: Path, seed: int) -> None:
    """Train the recipe on lower-cased, tokenized English and German, and score it as published results are."""
    import sacrebleu

    folder = tokenized(data / "multi30k", out / "multi30k-tokenized")
    given = {
        "data.path": [str(folder / "train.en"), str(folder / "train.de")],
        "data.validation": [str(folder / "val.en"), str(folder / "val.de")],
        "train.seed": seed,
    }
    settings = gh.Run.load("translate", *(f"{key}={json.dumps(value)}" for key, value in given.items())).to_dict()
    result, seconds = run(f"translate-{seed}", settings, out)
    sources, references = ((folder / f"test_2016_flickr.{side}").read_text().splitlines() for side in ("en", "de"))
    found = gh.generate(result.model, result.datasets.tok, sources, max_new_tokens=80, beams=5)
    metric = sacrebleu.metrics.BLEU(tokenize="none", force=True)
    bleu = metric.corpus_score([one.text for one in found], [references])
    show(
        "translate",
        bleu=f"{bleu.score:.2f}",
        signature=metric.get_signature(),
        parameters=f"{parameters(result.model):,}",
        step=f"{result.saved_step:,} of {result.steps:,}",
        training=f"{seconds:.0f} s",
    )
    keep("translate_bleu", bleu.score, 1, "BLEU")
    keep("translate_seconds", seconds, 0, "s")


def tokenized(folder: Path, out: Path) -> Path:
    """Write the captions lower-cased and tokenized as Moses does, unless they are there."""
    if out.exists():
        return out
    from sacremoses import MosesPunctNormalizer, MosesTokenizer

    out.mkdir(parents=True)
    for side in ("en", "de"):
        normalizer, tokenizer = MosesPunctNormalizer(lang=side), MosesTokenizer(lang=side)
        for split in ("train", "val", "test_2016_flickr"):
            lines = (folder / f"{split}.{side}").read_text(encoding="utf-8").splitlines()
            words = [tokenizer.tokenize(normalizer.normalize(line).lower(), escape=False) for line in lines]
            (out / f"{split}.{side}").write_text("".join(f"{' '.join(one)}\n" for one in words), encoding="utf-8")
    return out


# Built-in datasets


def dates(data: Path, out: Path, seed: int) -> None:
    """Train the recipe, and measure exact match on the test set."""
    result, seconds = run(f"dates-{seed}", gh.Run.load("dates", f"train.seed={seed}").to_dict(), out)
    found = gh.evaluate(result.model, result.datasets.tok, "dates", split="test", generate=2000)
    show("dates", exact_match=f"{found.metrics['exact_match']:.4f}", seconds=f"{seconds:.0f}")
    keep("dates", found.metrics["exact_match"], 2, "%")
    keep("dates_seconds", seconds, 0, "s")


def langid(data: Path, out: Path, seed: int) -> None:
    """Train the recipe, and measure accuracy on the test set."""
    from glasshouse.data.builtin.langid import LANGUAGES, bayes_accuracy

    result, seconds = run(f"langid-{seed}", gh.Run.load("langid", f"train.seed={seed}").to_dict(), out)
    found = gh.evaluate(result.model, result.datasets.tok, "langid", split="test")
    one_name = bayes_accuracy("test")
    show(
        "langid",
        accuracy=f"{found.metrics['accuracy']:.4f}",
        f1=f"{found.metrics['f1']:.4f}",
        languages=len(LANGUAGES),
        bayes_accuracy_of_one_name=f"{one_name:.4f}",
        seconds=f"{seconds:.0f}",
    )
    keep("langid", found.metrics["accuracy"], 2, "%")
    keep("langid_f1", found.metrics["f1"], 3)
    keep("langid_seconds", seconds, 0, "s")
    keep("langid_one_name", one_name, 1, "%")


PARTS: dict[str, Callable[[Path, Path, int], None]] = {
    "shakespeare": shakespeare,
    "shakespeare-precision": shakespeare_precision,
    "shakespeare-best": shakespeare_best,
    "multi30k": multi30k,
    "translate": translate,
    "dates": dates,
    "langid": langid,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--parts", nargs="+", choices=PARTS, default=["dates", "langid"], help="(default: dates langid)"
    )
    parser.add_argument(
        "--data", type=Path, default=Path("data"), help="folder of shakespeare and multi30k (default data)"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("runs/learning"), help="folder of the runs (default runs/learning)"
    )
    parser.add_argument("--seeds", type=int, default=1, help="runs per part, with seeds from 0 (default 1)")
    add_save(parser)
    args = parser.parse_args()
    device = gh.device.fastest()
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name() if device.type == 'cuda' else device}")
    for part in args.parts:
        for seed in range(args.seeds):
            PARTS[part](args.data, args.out, seed)
    save(args.save, device)


if __name__ == "__main__":
    main()
