"""The KV cache: preallocated keys and values, owned by the caller and written by the modules."""

from glasshouse.layers.cache.cache import Cache
from glasshouse.layers.cache.concatenated import ConcatenatedCache
from glasshouse.layers.cache.packed import MixedBatch, PackedPrefill
from glasshouse.layers.cache.source import SourceCache
from glasshouse.layers.cache.storage import KVShape
from glasshouse.layers.cache.view import CacheView

__all__ = ["Cache", "CacheView", "ConcatenatedCache", "KVShape", "MixedBatch", "PackedPrefill", "SourceCache"]
