"""B6, pre-norm and post-norm with and without warm-up; B8, the range of activations in both once trained."""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor, nn

import glasshouse as gh
from glasshouse.data import Batch
from glasshouse.models import Model
from glasshouse.training.step import NonFiniteError
from trained_claims.experiment import SMALL, BatchSampler, Result, build, evaluate, log, make_rng, train

STATES, LENGTH, LAYERS = 32, 16, 12


@cache
def markov_chain() -> tuple[Tensor, Tensor]:
    """Return a Markov chain's transition matrix and its stationary distribution."""
    transitions = (3 * torch.randn(STATES, STATES, generator=make_rng(0))).softmax(-1)
    return transitions, torch.linalg.matrix_power(transitions.double(), 1000)[0].float()


def markov_batches(rows: int) -> BatchSampler:
    """Sample sequences of states with next-state targets."""
    transitions, stationary = markov_chain()

    def sample(rng: torch.Generator) -> Batch:
        states = [torch.multinomial(stationary, rows, replacement=True, generator=rng)]
        for _ in range(LENGTH):
            states.append(torch.multinomial(transitions[states[-1]], 1, generator=rng)[:, 0])
        ids = torch.stack(states, 1)
        return Batch(ids[:, :-1], ids[:, 1:], torch.ones(rows, LENGTH, dtype=torch.bool))

    return sample


def stall_loss() -> float:
    """Return the loss above which a model has learned less than a tenth of what the chain's last state tells."""
    transitions, stationary = markov_chain()
    unigram = float(-(stationary * stationary.log()).sum())
    entropy_rate = float(-(stationary[:, None] * transitions * transitions.log()).sum())
    return unigram - (unigram - entropy_rate) / 10


def deep_model(placement: str, seed: int, norms: bool = True) -> Model:
    """Return 12 layers, pre-norm or post-norm, or with the norms taken out."""
    shape = SMALL | {"n_layers": LAYERS, "d_model": 32, "d_ff": 128, "max_len": LENGTH}
    choices = {"norm_placement": placement, "final_norm": placement == "pre", "init": "xavier"}
    model = build(seed, kind="decoder", vocab_size=STATES, **choices, **shape)
    if not norms:
        for block in model.stack.blocks:
            block.attention.norm = block.feedforward.norm = nn.Identity()
    return model


def stability(
    seeds: int = 3,
    steps: int = 280,
    rates: tuple[float, ...] = (3e-4, 1e-3, 3e-3),
    warm_ups: tuple[bool, ...] = (False, True),
) -> Result:
    """Count the runs that stall, over learning rates and seeds, by norm placement and warm-up."""
    result, limit = Result(along="learning rate"), stall_loss()
    for placement in ("pre", "post"):
        for warm in warm_ups:
            name = f"{placement}-norm {'with' if warm else 'without'} warm-up"
            stalled, means = 0, []
            for lr in rates:
                losses = [deep_loss(placement, steps // 4 if warm else 0, lr, steps, seed) for seed in range(seeds)]
                stalled += sum(not loss < limit for loss in losses)  # NaN counts, too
                log(f"B6: {name}, lr {lr:g}: losses {' '.join(f'{loss:.2f}' for loss in losses)}")
                means.append((lr, sum(losses) / seeds))
            result.figures[f"stalled, {name}, of {len(rates) * seeds}"] = stalled
            result.figures[f"share stalled, {name}"] = stalled / (len(rates) * seeds)
            result.curves[name] = means
    return result


def deep_loss(placement: str, warmup: int, lr: float, steps: int, seed: int) -> float:
    """Return the loss on new sequences after training; NaN where training failed."""
    model = deep_model(placement, seed)
    try:
        train(model, markov_batches(16), steps, lr, seed=seed, warmup=warmup, grad_clip=None)
        return evaluate(model, [markov_batches(512)(make_rng(10**6))])["loss"]
    except NonFiniteError:
        return math.nan


def trained_range(seeds: int = 3, steps: int = 280, norms: bool = True) -> Result:
    """Return how much the residual stream's norm grows over 12 layers, as initialised and trained, in both orders."""
    result = Result(along="layer")
    batch = markov_batches(64)(make_rng(10**6))
    for placement in ("pre", "post"):
        growth: dict[str, list[float]] = {"as initialised": [], "trained": []}
        for seed in range(seeds):
            model = deep_model(placement, seed, norms)
            growth["as initialised"].append(stream_growth(model, batch)[-1])
            train(model, markov_batches(16), steps, 3e-4, seed=seed, warmup=steps // 4)
            stream = stream_growth(model, batch)
            growth["trained"].append(stream[-1])
            log(f"B8: {placement}-norm, seed {seed}: grown by {stream[-1]:.2f} after training")
        for name, values in growth.items():
            result.add(f"{placement}-norm, growth of the stream's norm, {name}", values)
        result.curves[f"{placement}-norm, trained"] = [(float(layer), norm) for layer, norm in enumerate(stream)]
    largest = max(value for name, value in result.figures.items() if "deviation" not in name)
    result.figures["largest growth of the stream's norm over 12 layers"] = largest
    return result


@torch.no_grad()
def stream_growth(model: Model, batch: Batch) -> list[float]:
    """Return the mean norm of the stream after each layer, relative to that of the embedding."""
    with gh.record(model, "embed", "resid_post.*") as recording:
        model(batch.ids)
    first = recording["embed"].norm(dim=-1).mean()
    return [1.0] + [float(recording[f"resid_post.{layer}"].norm(dim=-1).mean() / first) for layer in range(LAYERS)]
