"""The loss that a decoder of some size reaches after some tokens: what `train.minutes` chooses by."""

from __future__ import annotations

import math

# L = ((N_C / N)^(ALPHA_N / ALPHA_D) + D_C / D)^ALPHA_D (Kaplan et al. 2020), N the parameters of the blocks, D the
# tokens. Fitted to runs on Python's standard library with a vocabulary of 4,096: depths 1 to 3 by the rule of
# model.depth on 0.4 to 2.5 million tokens, and the recipes stdlib and python-3m (2.6 million parameters, 262 million
# tokens), all within 6%. A sum of two powers, as Chinchilla's, fits no better, and from so few runs its optimum is
# thousands of tokens for each parameter: with few tokens size makes hardly any difference, which a sum cannot say.
N_C, ALPHA_N, D_C, ALPHA_D = 5.4e6, 0.26, 8e8, 0.2
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
    return ((N_C / block_parameters) ** (ALPHA_N / ALPHA_D) + D_C / effective_tokens(tokens, unique)) ** ALPHA_D
