"""How many examples hypothesis draws: a quarter of the full number in `make test`, all of it in `make examples`."""

import os

ALL = os.environ.get("EXAMPLES") == "all"


def up_to(number: int) -> int:
    """Return the full number of examples, or a quarter of it, at least 10."""
    return number if ALL else max(10, number // 4)
