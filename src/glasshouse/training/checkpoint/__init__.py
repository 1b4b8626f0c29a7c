"""Checkpoints: their contents, sharded writing and reading by all ranks, and the run folder."""
