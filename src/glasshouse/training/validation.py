"""Validation during training: the metrics of the model, or of its EMA, on the start of the validation set."""

from __future__ import annotations

from contextlib import nullcontext

from torch import Tensor

from glasshouse.data.batches import Share
from glasshouse.evaluation.eval_loop import evaluate_samples
from glasshouse.objectives.metric_sums import MetricSums
from glasshouse.training.parallel import reshard
from glasshouse.training.setup import Setup


def validate(setup: Setup, token_bytes: Tensor | None) -> dict[str, float]:
    """Return the metrics over the samples of one validation."""
    with nullcontext() if setup.ema is None else setup.ema.applied():
        return shared_sums(setup, setup.eval_samples, token_bytes).metrics()


def shared_sums(setup: Setup, count: int, token_bytes: Tensor | None) -> MetricSums:
    """Return the sums over the first `count` validation samples; each process evaluates its share of them."""
    processes, done = setup.processes, 0

    def on_batch() -> None:
        nonlocal done
        if not processes.is_parallel:  # several stop together, between steps
            setup.signals.check()
        setup.reporter.stage("validating", done, count)
        done += processes.data_size * setup.micro_batch_size

    sums = evaluate_samples(
        setup.model,
        Share(setup.val_samples, count, rank=processes.data_rank, world_size=processes.data_size),
        setup.micro_batch_size,
        token_bytes=token_bytes,
        autocast_dtype=setup.train_step.precision,
        evaluate_batch=setup.objective.evaluate_batch,
        on_batch=on_batch,
    )
    reshard(setup.model)
    return sums.reduced(processes.sum)
