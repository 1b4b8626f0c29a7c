"""A13 and A16: multi-query, grouped-query and multi-head attention after the same training, and as they decode."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

import glasshouse as gh
from glasshouse.models import Model
from trained_claims.experiment import (
    SMALL,
    Result,
    build,
    evaluate,
    in_standard_errors,
    library,
    log,
    sequences,
    train,
    validation,
)

HEADS, GROUPS = 8, (1, 2, 8)  # heads of queries, and those of keys and values: multi-query, grouped-query, multi-head
WIDTHS = (32, 128)


def compare_heads(seeds: int = 3, steps: int = 300, cached: int = 2048) -> Result:
    """Return loss, unlikeness of heads and decode speed by key-value heads, for two sizes of model."""
    result = Result(along="key-value heads")
    costs, all_losses = {}, []
    for width in WIDTHS:
        losses: dict[int, list[float]] = {count: [] for count in GROUPS}
        distances: dict[int, list[float]] = {count: [] for count in GROUPS}
        for count in GROUPS:
            for seed in range(seeds):
                model = decoder(seed, width, count)
                train(model, sequences(library("train"), 16, 64), steps, 3e-3, seed=seed)
                losses[count].append(evaluate(model, validation(64))["loss"])
                distances[count].append(pattern_distance(model))
                log(f"A13: width {width}, {count} of {HEADS}, seed {seed}, loss {losses[count][-1]:.4f}")
            result.add(f"width {width}: loss with {count} of {HEADS}", losses[count])
            result.add(f"width {width}: distance of patterns with {count} of {HEADS}", distances[count])
            all_losses += losses[count]
        for name, found in (("loss, nats per byte", losses), ("distance of patterns", distances)):
            result.curves[f"width {width}: {name}"] = [
                (float(count), statistics.mean(each)) for count, each in found.items()
            ]
        # Models of one seed saw the same batches, so their differences vary less than they do.
        gain, diversity = (
            [a - b for a, b in zip(found[one], found[other], strict=True)]
            for found, one, other in ((losses, 1, 2), (distances, HEADS, 1))
        )
        costs[width] = [a - b for a, b in zip(losses[1], losses[HEADS], strict=True)]
        result.add(f"width {width}: loss of multi-query - of multi-head", costs[width])
        result.figures[f"width {width}: loss of multi-query - of grouped-query, in standard errors"] = (
            in_standard_errors(gain)
        )
        result.figures[f"width {width}: distance with {HEADS} - with 1, in standard errors"] = in_standard_errors(
            diversity
        )
        result.figures[f"width {width}: decode step of multi-head / of multi-query"] = decode_ratio(width, cached)
    small, large = (costs[width] for width in WIDTHS)
    more = [a - b for a, b in zip(small, large, strict=True)]
    result.figures["cost of multi-query in the smaller model - in the larger, in standard errors"] = (
        in_standard_errors(more)
    )
    result.figures["largest loss, nats per byte"] = max(all_losses)
    return result


def decoder(seed: int, width: int, kv_heads: int, max_len: int = 64) -> Model:
    """Return two layers with so many key-value heads."""
    sizes = {"d_model": width, "d_ff": 4 * width, "n_heads": HEADS, "n_kv_heads": kv_heads, "max_len": max_len}
    return build(seed, kind="decoder", vocab_size=256, position="rotary", **(SMALL | sizes))


def decode_ratio(width: int, cached: int, rows: int = 4, rounds: int = 15) -> float:
    """Return how much longer a decode step takes with multi-head than with multi-query attention, the median."""

    def make_step(kv_heads: int) -> Callable[[], object]:
        model = decoder(0, width, kv_heads, cached + 1).eval()
        cache = model.make_cache(rows, cached + 1)
        for tensor in (*cache.keys, *cache.values):
            tensor.normal_()  # untouched zeros would all map to one page of memory
        ids = torch.zeros(rows, 1, dtype=torch.long)

        def step() -> None:
            cache.lengths.fill_(cached)
            model(ids, cache=cache)

        return step

    def seconds(step: Callable[[], object]) -> float:
        start = time.perf_counter()
        for _ in range(10):
            step()
        return time.perf_counter() - start

    with torch.inference_mode():
        many, one = make_step(HEADS), make_step(1)
        ratios = [seconds(many) / seconds(one) for _ in range(rounds + 1)][1:]  # the first is the warm-up
    log(f"A13: width {width}, multi-head / multi-query: {' '.join(f'{ratio:.2f}' for ratio in ratios)}")
    return statistics.median(ratios)


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
