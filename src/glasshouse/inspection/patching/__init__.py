"""Interventions on pairs of prompts and on heads: activation and path patching, ablation, and their metrics."""
