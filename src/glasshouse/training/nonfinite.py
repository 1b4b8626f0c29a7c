"""Where a NaN or infinite loss comes from: the first weight, activation or gradient that is not finite."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from glasshouse.data import Batch
from glasshouse.device import is_out_of_memory
from glasshouse.objectives.loss.cross_entropy import LossFn, autocast, compute_loss
from glasshouse.training.distributed.fsdp import local

GRADIENT, NOWHERE, NOT_LOCATED = "the gradient of", "nowhere", "not located"


def locate_nonfinite(model: nn.Module, batch: Batch, smoothing: float = 0.0, loss_fn: LossFn = compute_loss) -> str:
    """Locate the first NaN or infinity in the forward and backward pass of a batch, in a few words.

    Weights are checked first, then the output of each module in the order of execution, then gradients from the last
    weight to the first. The model is unchanged, except for its gradients.

    >>> import glasshouse as gh
    >>> model = gh.build(gh.preset("tiny-decoder"))
    >>> ids = torch.tensor([[1, 2, 3]])
    >>> batch = Batch(ids, targets=ids, loss_mask=ids > 0)
    >>> locate_nonfinite(model, batch)
    'nowhere: all weights, activations and gradients are finite'
    >>> with torch.no_grad():
    ...     _ = model.stack.blocks[1].feedforward.layer.up.weight.fill_(torch.inf)
    >>> locate_nonfinite(model, batch)
    'the weight stack.blocks.1.feedforward.layer.up.weight'
    """
    # No early return: where the model is sharded, every rank must take part in both passes.
    found = [f"the weight {name}" for name, weight in model.named_parameters() if not _is_finite(weight)]

    def check(name: str, output: object) -> None:
        if not found and not all(_is_finite(one) for one in _tensors(output)):
            found.append(f"the output of module {name}")

    handles = [
        module.register_forward_hook(lambda _module, _inputs, output, name=name: check(name, output))
        for name, module in model.named_modules()
        if name
    ]
    try:
        loss = loss_fn(model, batch, smoothing)
    finally:
        for handle in handles:
            handle.remove()
    if not found and not _is_finite(loss):
        found.append("the loss, with finite logits")
    model.zero_grad(set_to_none=True)
    loss.backward()
    for name, weight in reversed(list(model.named_parameters())):
        if not found and weight.grad is not None and not _is_finite(weight.grad):
            found.append(f"{GRADIENT} {name}")
    return found[0] if found else f"{NOWHERE}: all weights, activations and gradients are finite"


def first_located(by_rank: list[tuple[str, list[str]]]) -> tuple[str, list[str]]:
    """Return where the first of several processes found a NaN or infinity, and the sources of its batch.

    Gradients are checked after their all-reduce, which spreads a NaN to every process: no process is named for one.

    >>> first_located([("the gradient of head.weight", ["a"]), ("the output of module head", ["b"])])
    ('the output of module head, in process 1', ['b'])
    """
    if len(by_rank) == 1:
        return by_rank[0]
    for rank, (where, sources) in enumerate(by_rank):
        if not where.startswith((GRADIENT, NOWHERE, NOT_LOCATED)):
            return f"{where}, in process {rank}", sources
    where = min((where for where, _ in by_rank), key=lambda where: where.startswith((NOWHERE, NOT_LOCATED)))
    return where, [source for _, sources in by_rank for source in sources]


def locate_in_micro_batches(
    model: nn.Module,
    batch: Batch,
    grad_accum: int,
    smoothing: float,
    autocast_dtype: torch.dtype,
    loss_fn: LossFn,
) -> str:
    """Locate as `locate_nonfinite` does, with the micro-batches and the precision of a training step."""
    found = []
    for micro_batch in batch.microbatches(grad_accum):
        try:
            with autocast(batch.ids.device, autocast_dtype):
                found.append(locate_nonfinite(model, micro_batch, smoothing, loss_fn))
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            return f"{NOT_LOCATED}, out of memory"
    return next((where for where in found if not where.startswith(NOWHERE)), found[0])


def _is_finite(tensor: Tensor) -> bool:
    return not tensor.is_floating_point() or bool(torch.isfinite(local(tensor)).all())


def _tensors(output: object) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, tuple | list):
        for one in output:
            yield from _tensors(one)
