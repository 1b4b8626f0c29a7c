"""Attention: small maps of all heads, tiles of one head's map, head scores, and one query-key pair."""

from glasshouse.page.views.attention.head_scoring import SCORE_FIELDS, Scores, scores, telling_selection
from glasshouse.page.views.attention.map_tiles import TILE, Maps, Tile, levels, maps, tile
from glasshouse.page.views.attention.query_key_pair import QueryKey, query_key
from glasshouse.page.views.attention.view import VIEW, initial_requests

__all__ = [
    "SCORE_FIELDS",
    "TILE",
    "VIEW",
    "Maps",
    "QueryKey",
    "Scores",
    "Tile",
    "initial_requests",
    "levels",
    "maps",
    "query_key",
    "scores",
    "telling_selection",
    "tile",
]
