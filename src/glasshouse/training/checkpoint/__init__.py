"""Checkpoints: what they contain, how processes write and read them together, and the run folder they are in."""
