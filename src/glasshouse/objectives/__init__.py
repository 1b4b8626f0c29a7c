"""Objectives: what is asked of a model, loss included."""
