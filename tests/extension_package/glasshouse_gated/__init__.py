"""Attention with an output gate, and what belongs to it. Importing this alone is cheap: a recipe is a file."""

from pathlib import Path

RECIPE = Path(__file__).parent / "gated.toml"
