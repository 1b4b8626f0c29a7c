"""Losses and their kernels."""
