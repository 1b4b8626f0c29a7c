"""T6: held-out bits per byte with bytes, a small and a larger byte-pair vocabulary, at equal compute."""

from __future__ import annotations

import math

import torch

import glasshouse as gh
from glasshouse.models.flops import FlopEstimator
from trained_claims.experiment import SMALL, Result, build, evaluate, library, log, make_rng, sequences, train

ROWS, LENGTH = 16, 64


def bits_per_byte(seeds: int = 3, flops: float = 8e11, vocabularies: tuple[int, ...] = (0, 512, 2048)) -> Result:
    """Train on the same number of FLOPs with each vocabulary; 0 stands for bytes."""
    text = bytes(library("train").numpy().tobytes()).decode()
    held_out = bytes(library("validation").numpy().tobytes())[: 64 * 1024].decode(errors="ignore")
    result = Result(along="vocabulary")
    found = []
    for vocabulary in vocabularies:
        tok = gh.Tokenizer.train(texts=[text[: 2**21]], vocab_size=vocabulary) if vocabulary else None
        size = len(tok) if tok else 256
        encode = tok.encode if tok else (lambda one: list(one.encode()))
        ids, held_ids = (torch.tensor(encode(one)) for one in (text, held_out))
        rows = held_ids[: len(held_ids) // (LENGTH + 1) * (LENGTH + 1)].view(-1, LENGTH + 1)
        bytes_per_token = len(held_out.encode()) / len(held_ids)
        each = []
        for seed in range(seeds):
            model = build(seed, kind="decoder", vocab_size=size, position="rotary", **SMALL)
            sample = sequences(ids, ROWS, LENGTH)
            steps = round(flops / FlopEstimator(model)(sample(make_rng(0)).ids))
            train(model, sample, steps, 3e-3, seed=seed)
            batch = gh.data.Batch(rows[:, :-1], rows[:, 1:], torch.ones(len(rows), LENGTH, dtype=torch.bool))
            each.append(evaluate(model, batch.microbatches(8))["loss"] / math.log(2) / bytes_per_token)
            log(f"T6: vocabulary {size}, seed {seed}, {steps} steps: {each[-1]:.3f} bits per byte")
        name = f"bits per byte, {f'{size:,} tokens' if tok else 'bytes'}"
        result.add(name, each)
        found.append(result.figures[name])
        result.curves.setdefault("bits per byte", []).append((float(size), found[-1]))
    result.figures["bits per byte of bytes - of the best vocabulary"] = found[0] - min(found[1:])
    return result
