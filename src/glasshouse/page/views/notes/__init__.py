"""The statements of the lecture notes as cards, each with a live figure."""

from glasshouse.page.views.notes.view import FIGURES, VIEW

__all__ = ["FIGURES", "VIEW"]
