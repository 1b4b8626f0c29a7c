"""Examples do not see the kinds that another page registered."""

from registered_kinds import forget_kinds as forget_kinds
