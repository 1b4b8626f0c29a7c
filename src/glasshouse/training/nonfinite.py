"""Locates the first NaN or infinite weight, activation or gradient."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from glasshouse.data import Batch
from glasshouse.objectives.loss import LossFn, autocast, compute_loss
from glasshouse.training.memory import is_out_of_memory


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
    for name, weight in model.named_parameters():
        if not _is_finite(weight):
            return f"the weight {name}"
    found: list[str] = []

    def check(name: str, output: object) -> None:
        if not found and not all(_is_finite(one) for one in _tensors(output)):
            found.append(name)

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
    if found:
        return f"the output of module {found[0]}"
    if not _is_finite(loss):
        return "the loss, with finite logits"
    model.zero_grad(set_to_none=True)
    loss.backward()
    for name, weight in reversed(list(model.named_parameters())):
        if weight.grad is not None and not _is_finite(weight.grad):
            return f"the gradient of {name}"
    return "nowhere: all weights, activations and gradients are finite"


def locate_in_micro_batches(
    model: nn.Module,
    batch: Batch,
    grad_accum: int,
    smoothing: float,
    autocast_dtype: torch.dtype,
    loss_fn: LossFn = compute_loss,
) -> str:
    """Locate as `locate_nonfinite` does, with the micro-batches and the precision of a training step."""
    where = ""
    for micro_batch in batch.microbatches(grad_accum):
        try:
            with autocast(batch.ids.device, autocast_dtype):
                where = locate_nonfinite(model, micro_batch, smoothing, loss_fn)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            return "not located, out of memory"
        if not where.startswith("nowhere"):
            break
    return where


def _is_finite(tensor: Tensor) -> bool:
    return not tensor.is_floating_point() or bool(torch.isfinite(tensor).all())


def _tensors(output: object) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, tuple | list):
        for one in output:
            yield from _tensors(one)
