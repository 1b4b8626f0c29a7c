"""The statements of the lecture notes about transformers: one source for docs, tests and the page.

Each part of the lectures is a TOML file here. docs/claims.md and docs/notes.md are written from it
(docs/generate_notes.py), tests/claims/ checks its statements, and the page's view `notes` draws a card for each.
"""

from glasshouse.notes.statement import EXAMPLES, Example, Part, Question, Statement, parts, statement

__all__ = ["EXAMPLES", "Example", "Part", "Question", "Statement", "parts", "statement"]
