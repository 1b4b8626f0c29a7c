"""How many examples hypothesis draws: a quarter of the full number, or as the variable EXAMPLES says."""

import os

SHARE = {"few": 16, "all": 1}.get(os.environ.get("EXAMPLES", ""), 4)  # make quick, make examples and make test


def up_to(number: int) -> int:
    """Return the share of the full number that is drawn, at least 5."""
    return max(number // SHARE, min(number, 5))
