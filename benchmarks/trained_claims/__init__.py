"""Experiments behind statements that need training: benchmarks/claims.py runs them whole, tests/claims in small."""
