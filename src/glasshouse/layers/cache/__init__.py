"""The KV cache: preallocated keys and values, owned by the caller and written by the modules."""

from glasshouse.layers.cache.cache import Cache
from glasshouse.layers.cache.packed import MixedBatch, PackedPrefill
from glasshouse.layers.cache.source import SourceCache
from glasshouse.layers.cache.storage import KVShape
from glasshouse.layers.cache.view import CacheView

__all__ = ["Cache", "CacheView", "KVShape", "MixedBatch", "PackedPrefill", "SourceCache"]
