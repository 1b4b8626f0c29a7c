"""How often a run is validated and saved by default."""

from __future__ import annotations

from glasshouse import device as machine
from glasshouse.models import Model, count_parameters
from glasshouse.training.setup.execution import count_blocks, step_seconds
from glasshouse.training.setup.resolve import Resolved

MOST, FEWEST = 10, 3  # times per run
# Of a short run on a GPU, where writing a checkpoint takes longer than training (docs/lab/training-gpu.md).
WRITE_RATE = 0.5e9  # bytes per second
WRITE_SHARE = 0.2  # of the run's time


def choose_interval(resolved: Resolved, model: Model, steps: int) -> int:
    """Return the steps between validations, and between checkpoints, where the settings name none."""
    choice, device, processes = resolved.run.train, resolved.device, resolved.processes
    if device.type != "cuda":
        return default_interval(steps)
    size = count_parameters(model.spec)
    flops = processes.world_size * machine.nominal_flops(device)
    copies = 3 + bool(choice.ema)  # the weights, AdamW's two averages, the weights' own
    written = copies * 4 * size / processes.world_size
    return default_interval(steps, step_seconds(size, count_blocks(model), choice.batch_tokens, flops), written)


def default_interval(steps: int, step_seconds: float = 0.0, checkpoint_bytes: float = 0.0) -> int:
    """Return the interval of a run, from estimates so that a resumed run has that of an uninterrupted one.

    >>> default_interval(1000), default_interval(7)
    (100, 1)
    >>> gpt2 = {"step_seconds": 0.18, "checkpoint_bytes": 1.5e9}
    >>> default_interval(20_000, **gpt2), default_interval(200, **gpt2)
    (2000, 66)
    """
    count = MOST
    if checkpoint_bytes:
        affordable = WRITE_SHARE * steps * step_seconds / (checkpoint_bytes / WRITE_RATE)
        count = min(MOST, max(FEWEST, int(affordable)))
    return max(1, steps // count)
