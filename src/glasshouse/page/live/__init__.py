"""A page with the model inside: its graph and weights in one file, run by an interpreter in the browser."""

from glasshouse.page.live.file import export_live

__all__ = ["export_live"]
