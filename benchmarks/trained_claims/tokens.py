"""T6: held-out bits per byte with bytes and two byte-pair vocabularies, at equal compute and at equal text."""

from __future__ import annotations

import math

import torch

import glasshouse as gh
from glasshouse.models import Model
from glasshouse.models.flops import FlopEstimator
from trained_claims.experiment import SMALL, Result, build, evaluate, library, log, make_rng, sequences, train

ROWS, LENGTH = 16, 64


def bits_per_byte(seeds: int = 3, steps: int = 600, vocabularies: tuple[int, ...] = (512, 2048)) -> Result:
    """Train on bytes for so many steps, and with each vocabulary on as many FLOPs, then on as much text."""
    text = bytes(library("train").numpy().tobytes()).decode()
    held_out = bytes(library("validation").numpy().tobytes())[: 64 * 1024].decode(errors="ignore")
    result = Result(along="vocabulary")
    byte_flops = 0.0
    for vocabulary in (0, *vocabularies):  # 0 stands for bytes
        tok = gh.Tokenizer.train(texts=[text[: 2**21]], vocab_size=vocabulary) if vocabulary else None
        size = len(tok) if tok else 256
        encode = tok.encode if tok else (lambda one: list(one.encode()))
        ids, held_ids = (torch.tensor(encode(one)) for one in (text, held_out))
        bytes_per_token, held_bytes_per_token = (
            len(one.encode()) / len(found) for one, found in ((text, ids), (held_out, held_ids))
        )
        rows = held_ids[: len(held_ids) // (LENGTH + 1) * (LENGTH + 1)].view(-1, LENGTH + 1)
        test = gh.data.Batch(rows[:, :-1], rows[:, 1:], torch.ones(len(rows), LENGTH, dtype=torch.bool))
        sample = sequences(ids, ROWS, LENGTH)
        flops = FlopEstimator(make(0, size))(sample(make_rng(0)).ids)
        byte_flops = byte_flops or flops
        found: dict[int, list[float]] = {}
        for name, count in (
            ("equal compute", round(steps * byte_flops / flops)),
            ("equal text", round(steps / bytes_per_token)),
        ):
            if count not in found:  # with bytes both are one
                found[count] = []
                for seed in range(seeds):
                    model = make(seed, size)
                    train(model, sample, count, 3e-3, seed=seed)
                    loss = evaluate(model, test.microbatches(8))["loss"]
                    found[count].append(loss / math.log(2) / held_bytes_per_token)
                    log(
                        f"T6: {size} tokens, {name}, seed {seed}, {count} steps: {found[count][-1]:.3f} bits per byte"
                    )
            result.add(f"{name}: bits per byte, {f'{size:,} tokens' if tok else 'bytes'}", found[count])
            result.figures[f"{name}: steps, {f'{size:,} tokens' if tok else 'bytes'}"] = count
            mean = sum(found[count]) / seeds
            result.curves.setdefault(f"bits per byte, {name}", []).append((float(size), mean))
    for name in ("equal compute", "equal text"):
        each = [mean for _, mean in result.curves[f"bits per byte, {name}"]]
        result.figures[f"{name}: bits per byte of bytes - of the best vocabulary"] = each[0] - min(each[1:])
    return result


def make(seed: int, vocab_size: int) -> Model:
    """Return two layers with a vocabulary."""
    return build(seed, kind="decoder", vocab_size=vocab_size, position="rotary", **SMALL)
