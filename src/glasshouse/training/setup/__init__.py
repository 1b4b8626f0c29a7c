"""Builds a run from its settings: datasets, model, trainer, and custom objects passed by the caller."""
