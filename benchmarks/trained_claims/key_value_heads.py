"""A13 and A16: multi-query, grouped-query and multi-head attention after the same training."""

from __future__ import annotations

import statistics

import torch

import glasshouse as gh
from glasshouse.models import Model
from trained_claims.experiment import SMALL, Result, build, evaluate, library, log, sequences, train, validation

HEADS = 8


def compare_heads(seeds: int = 3, steps: int = 300, kv_heads: tuple[int, ...] = (1, 2, HEADS)) -> Result:
    """Return the loss, and how unlike the patterns of the heads of a layer are, by number of key-value heads."""
    result = Result(along="key-value heads")
    for count in kv_heads:
        losses, distances = [], []
        for seed in range(seeds):
            shape = SMALL | {"n_heads": HEADS, "n_kv_heads": count}
            model = build(seed, kind="decoder", vocab_size=256, position="rotary", **shape)
            train(model, sequences(library("train"), 16, 64), steps, 3e-3, seed=seed)
            losses.append(evaluate(model, validation(64))["loss"])
            distances.append(pattern_distance(model))
            log(f"A13: {count} of {HEADS}, seed {seed}, loss {losses[-1]:.4f}, distance {distances[-1]:.4f}")
        result.add(f"loss with {count} of {HEADS}", losses)
        result.add(f"distance of patterns with {count} of {HEADS}", distances)
    most, least = max(kv_heads), min(kv_heads)
    loss, distance = (
        [result.figures[f"{what} with {count} of {HEADS}"] for count in kv_heads]
        for what in ("loss", "distance of patterns")
    )
    result.figures["largest difference in loss, relative to the smallest"] = (max(loss) - min(loss)) / min(loss)
    result.figures[f"distance with {most} - with {least}"] = distance[-1] - distance[0]
    result.curves = {
        "loss, nats per byte": list(zip(map(float, kv_heads), loss, strict=True)),
        "distance of patterns": list(zip(map(float, kv_heads), distance, strict=True)),
    }
    return result


@torch.no_grad()
def pattern_distance(model: Model) -> float:
    """Return the mean total variation between the patterns of two heads, over heads, queries and layers."""
    (batch,) = validation(64, 1)
    with gh.record(model, "pattern.*") as recording:
        model(batch.ids)
    found = []
    for layer in range(model.spec.n_layers):
        patterns = recording[f"pattern.{layer}"]  # [B, H, S, S]
        differences = (patterns[:, :, None] - patterns[:, None]).abs().sum(-1) / 2
        heads = patterns.shape[1]
        found.append(float(differences.sum() / (differences.numel() * (heads - 1) / heads)))
    return statistics.mean(found)
