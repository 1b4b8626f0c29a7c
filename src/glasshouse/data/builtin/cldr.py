"""Names and patterns of the Unicode CLDR, from the installed Babel.

They depend on Babel's version: a new CLDR may rename a country or move a comma.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from glasshouse.errors import InputError

if TYPE_CHECKING:
    from babel import Locale

# Direction marks of right-to-left text are dropped, since a model would have to learn where each pattern has one;
# joiners stay, as they are spelling. All spaces become U+0020.
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
            "this dataset is generated from Babel's names and dates, and Babel is not installed; "
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
    """Return a language's names of places, languages, scripts and currencies.

    Excluded are names that are only a code, names with digits (years of a currency) and names with commas, which
    separate names in lists.

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
