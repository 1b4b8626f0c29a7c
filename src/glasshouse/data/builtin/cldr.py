"""The names and patterns of the Unicode CLDR, as the installed Babel has them.

What they say follows Babel's version: a new CLDR may rename a country or move a comma.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from glasshouse.errors import InputError

if TYPE_CHECKING:
    from babel import Locale

# Marks that only steer the display of right-to-left text are dropped, since a model would have to learn where each
# pattern happens to have one; joiners stay, as they are spelling. All spaces become the one that people type.
_PLAIN = {ord(mark): None for mark in "\u200e\u200f\u061c"} | {ord(space): " " for space in "\u00a0\u202f\u2009"}


@functools.cache
def locale(code: str) -> Locale:
    """Return Babel's locale of a code such as `pt-BR`.

    >>> locale("pt-BR").english_name
    'Portuguese (Brazil)'
    """
    try:
        from babel import Locale
    except ImportError:
        raise InputError(
            "this data set is made from Babel's names and dates, and Babel is not installed; "
            "run pip install 'glasshouse[cldr]'."
        ) from None
    return Locale.parse(code, sep="-")


def plain(text: str) -> str:
    r"""Return the text without direction marks, and with plain spaces.

    >>> plain("4\u200f/3\u200f/2021"), plain("4\u00a0mars\u202f2021")
    ('4/3/2021', '4 mars 2021')
    """
    return text.translate(_PLAIN)


def names(code: str) -> Mapping[str, str]:
    """Return a language's own names of places, languages, scripts and currencies.

    Left out are those that are but a code, those with numbers (years of a currency) and those with commas, which
    separate names in our lists.

    >>> names("fr")["territory:DE"], names("de")["currency:DKK"]
    ('Allemagne', 'Dänische Krone')
    """
    own = locale(code)
    groups = {
        "territory": own.territories,
        "language": own.languages,
        "script": own.scripts,
        "currency": own.currencies,
    }
    return {
        f"{group}:{key}": plain(name)
        for group, named in groups.items()
        for key, name in sorted(named.items())
        if name != key and not re.search(r"[\d,\u060c\u3001\uff0c]", name)
    }
