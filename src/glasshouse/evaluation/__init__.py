"""How good a model is, and whether it is what it claims to be."""

from glasshouse.evaluation.verify import Check, verify

__all__ = ["Check", "verify"]
