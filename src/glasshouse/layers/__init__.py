"""The layers of a transformer."""
