"""The statements of the lecture notes about transformers: one source for docs, tests and the page.

Each part of the lectures is a TOML file here. docs/claims.md and docs/notes.md are written from it
(docs/generate_notes.py), tests/claims/ checks its statements, and the page's view `notes` draws a card for each. What
needs training is measured by `make claims`, compared with the thresholds here, and kept in measured.json. The terms
of the field are in glossary.toml, from which docs/glossary.md is written.
"""

from glasshouse.notes.glossary import Entry, glossary
from glasshouse.notes.measurement import Measurement, Verdict, measurements, verdicts
from glasshouse.notes.statement import EXAMPLES, Example, Part, Question, Statement, Threshold, parts, statement

__all__ = [
    "EXAMPLES",
    "Entry",
    "Example",
    "Measurement",
    "Part",
    "Question",
    "Statement",
    "Threshold",
    "Verdict",
    "glossary",
    "measurements",
    "parts",
    "statement",
    "verdicts",
]
