"""Sampling: from logits to tokens, for each slot by its own parameters."""
