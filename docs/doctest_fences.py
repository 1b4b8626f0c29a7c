"""Lets the examples of docstrings be shown as code in the API reference, an extension of griffe.

Docstrings here have their examples as plain doctests; in Markdown, `>>>` would be a quotation.
"""

from __future__ import annotations

import re

import griffe

# From a line with a prompt to the next blank line.
EXAMPLE = re.compile(r"^>>> .*(?:\n.+)*", re.MULTILINE)


class DoctestFences(griffe.Extension):
    """Puts every doctest into a fence."""

    def on_object(self, *, obj: griffe.Object, **_: object) -> None:
        """Change the docstring of a module, class, function or attribute, as soon as it was read."""
        if obj.docstring is not None:
            obj.docstring.value = EXAMPLE.sub(r"```pycon\n\g<0>\n```", obj.docstring.value)
