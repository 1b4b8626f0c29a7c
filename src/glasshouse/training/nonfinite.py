"""Where a number stopped being one: the first module whose answer, or weight whose gradient, is not finite."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from glasshouse.data import Batch
from glasshouse.evaluation.eval_loop import autocast
from glasshouse.training.memory import is_out_of_memory
from glasshouse.training.objective import compute_loss


def locate_nonfinite(model: nn.Module, batch: Batch, smoothing: float = 0.0) -> str:
    """Say in a few words where infinity or not-a-number first appears when a model is taught a batch.

    Weights are looked at first, then what each module makes of finite input, in the order in which they run, then
    gradients from the last weight to the first. The model is left as it was, gradients apart.

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

    def look(name: str, output: object) -> None:
        if not found and not all(_is_finite(one) for one in _tensors(output)):
            found.append(name)

    handles = [
        module.register_forward_hook(lambda _module, _inputs, output, name=name: look(name, output))
        for name, module in model.named_modules()
        if name
    ]
    try:
        loss = compute_loss(model, batch, smoothing)
    finally:
        for handle in handles:
            handle.remove()
    if found:
        return f"what the module {found[0]} gives"
    if not _is_finite(loss):
        return "the loss, of finite logits"
    model.zero_grad(set_to_none=True)
    loss.backward()
    for name, weight in reversed(list(model.named_parameters())):
        if weight.grad is not None and not _is_finite(weight.grad):
            return f"the gradient of {name}"
    return "nowhere: all weights, activations and gradients are finite"


def locate_in_micro_batches(
    model: nn.Module, batch: Batch, parts: int, smoothing: float, compute: torch.dtype
) -> str:
    """Say where, as `locate` does, with the batch in parts, as a step computes it."""
    where = ""
    for part in batch.microbatches(parts):
        try:
            with autocast(batch.ids.device, compute):
                where = locate_nonfinite(model, part, smoothing)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            return "a place that there was no memory to look for"
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
