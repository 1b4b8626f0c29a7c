"""The loss that a decoder of some size reaches after some tokens: what `train.minutes` chooses by."""

from __future__ import annotations

import math

# L = E + A / N^ALPHA + B / D^BETA of Chinchilla (Hoffmann et al. 2022), N the parameters of the blocks, D the tokens.
E, A, ALPHA, B, BETA = 1.69, 406.4, 0.34, 410.7, 0.28
REPEATS = 15.4  # R* of Muennighoff et al. (2023): what many epochs are worth, in epochs of new text


def effective_tokens(tokens: float, unique: float) -> float:
    """Return how many tokens of new text are worth as much as `tokens`, where there are only `unique` ones.

    Four epochs are almost worth four times the text, a hundred no more than sixteen times.

    >>> [round(effective_tokens(epochs * 1e6, 1e6) / 1e6, 2) for epochs in (0.5, 1, 4, 100)]
    [0.5, 1.0, 3.73, 16.38]
    """
    repeats = max(0.0, tokens / unique - 1)
    return min(tokens, unique) * (1 + REPEATS * -math.expm1(-repeats / REPEATS))


def predicted_loss(block_parameters: float, tokens: float, unique: float) -> float:
    """Return the validation loss, in nats per token, that training is expected to reach.

    >>> predicted_loss(1e6, 1e7, 1e7) < predicted_loss(1e6, 1e7, 1e6) < predicted_loss(1e6, 1e6, 1e6)
    True
    """
    return E + A / block_parameters**ALPHA + B / effective_tokens(tokens, unique) ** BETA
