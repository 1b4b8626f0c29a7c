"""The evaluation loop: metrics summed over the batches of a dataset."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from glasshouse.data import Batch, Dataset
from glasshouse.objectives.loss.cross_entropy import autocast
from glasshouse.objectives.metrics import MetricSums, evaluate_batch


def evaluate_samples(
    model: nn.Module,
    samples: Dataset,
    batch_size: int,
    *,
    limit: int | None = None,
    token_bytes: Tensor | None = None,
    autocast_dtype: torch.dtype = torch.float32,
    evaluate_batch: Callable[[nn.Module, Batch, Tensor | None], MetricSums] = evaluate_batch,
    on_batch: Callable[[], None] = lambda: None,
) -> MetricSums:
    """Evaluate a model on all samples, or the first `limit`, in batches of `batch_size`.

    `evaluate_batch` is the one of the objective, `on_batch` is called before each batch. The model is in its previous
    mode afterwards.
    """
    device = next(model.parameters()).device
    token_bytes = None if token_bytes is None else token_bytes.to(device)
    count = len(samples) if limit is None else min(limit, len(samples))
    was_training = model.training
    model.eval()
    total: MetricSums | None = None  # of the objective's own kind
    try:
        for start in range(0, count, batch_size):
            on_batch()
            batch = samples.batch(range(start, min(start + batch_size, count))).to(device)
            with autocast(device, autocast_dtype):
                sums = evaluate_batch(model, batch, token_bytes)
            total = sums if total is None else total + sums
    finally:
        model.train(was_training)
    return MetricSums() if total is None else total
