"""In how many parts a step is computed, so that it fits: guessed before the first, and learned from running out."""

from __future__ import annotations

import torch

from glasshouse import device as machine
from glasshouse import spec

SHARE = 0.4  # of the memory, for what a pass keeps: weights, their gradients and averages have to fit beside it
KEPT = 40  # numbers a token, layer and unit of width, that a pass keeps for the way back; by measurement 20 to 35
WORDS = ("out of memory", "can't allocate memory", "not enough memory", "CUBLAS_STATUS_ALLOC_FAILED")
LOGITS = 4  # numbers a token and entry of the vocabulary: logits, in float32, their softmax and the gradient


def estimate_grad_accum(s: spec.Spec, batch_size: int, length: int, device: torch.device) -> int:
    """Return in how many parts a batch of so many rows should fit, by arithmetic.

    >>> estimate_grad_accum(spec.preset("tiny-decoder"), batch_size=8, length=64, device=torch.device("cpu"))
    1
    """
    layers = s.n_layers + (s.n_encoder_layers if isinstance(s, spec.Seq2SeqSpec) else 0)
    token = 4 * (KEPT * layers * s.d_model + LOGITS * s.vocab_size)
    parts = 1
    while parts < batch_size and -(-batch_size // parts) * length * token > SHARE * machine.memory_bytes(device):
        parts *= 2
    return min(parts, batch_size)


def is_out_of_memory(error: Exception) -> bool:
    """Say whether an error means that there was no memory left.

    >>> is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory")), is_out_of_memory(RuntimeError("shapes differ"))
    (True, False)
    """
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return any(words in str(error) for words in WORDS)
