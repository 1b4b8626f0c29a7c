"""How many micro-batches a step needs to fit into memory: estimated first, raised on out-of-memory errors."""

from __future__ import annotations

import torch

from glasshouse import device as machine
from glasshouse import spec

SHARE = 0.4  # of memory for activations; weights, gradients and optimizer state need the rest
KEPT = 40  # stored activations per token, layer and unit of d_model; measured: 20 to 35
MESSAGES = ("out of memory", "can't allocate memory", "not enough memory", "CUBLAS_STATUS_ALLOC_FAILED")
LOGITS = 4  # numbers per token and vocabulary entry: logits, in float32, softmax and gradient


def estimate_grad_accum(s: spec.Spec, batch_size: int, length: int, device: torch.device) -> int:
    """Estimate the gradient accumulation with which a batch fits into memory.

    >>> estimate_grad_accum(spec.preset("tiny-decoder"), batch_size=8, length=64, device=torch.device("cpu"))
    1
    """
    layers = s.n_layers + (s.n_encoder_layers if isinstance(s, spec.Seq2SeqSpec) else 0)
    token = 4 * (KEPT * layers * s.d_model + LOGITS * s.vocab_size)
    grad_accum = 1
    while grad_accum < batch_size and -(-batch_size // grad_accum) * length * token > SHARE * machine.memory_bytes(
        device
    ):
        grad_accum *= 2
    return min(grad_accum, batch_size)


def is_out_of_memory(error: Exception) -> bool:
    """Tell whether an error means out of memory.

    >>> is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    True
    >>> is_out_of_memory(RuntimeError("shapes differ"))
    False
    """
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return any(message in str(error) for message in MESSAGES)
