"""Validation during training: the metrics of the model, or of its EMA, on the start of the validation set."""

from __future__ import annotations

from contextlib import nullcontext

from torch import Tensor

from glasshouse.data.batches import Share
from glasshouse.evaluation.eval_loop import evaluate_samples
from glasshouse.training.parallel import reshard
from glasshouse.training.setup import Setup


def validate(setup: Setup, token_bytes: Tensor | None) -> dict[str, float]:
    """Return the metrics over the samples of one validation; each process evaluates its share of them."""
    processes, done = setup.processes, 0

    def on_batch() -> None:
        nonlocal done
        if not processes.is_parallel:  # several stop together, between steps
            setup.signals.check()
        setup.reporter.stage("validating", done, setup.eval_samples)
        done += processes.data_size * setup.micro_batch_size

    share = Share(setup.val_samples, setup.eval_samples, rank=processes.data_rank, world_size=processes.data_size)
    with nullcontext() if setup.ema is None else setup.ema.applied():
        sums = evaluate_samples(
            setup.model,
            share,
            setup.micro_batch_size,
            token_bytes=token_bytes,
            autocast_dtype=setup.train_step.precision,
            evaluate_batch=setup.objective.evaluate_batch,
            on_batch=on_batch,
        )
        reshard(setup.model)
    return sums.reduced(processes.sum).metrics()
