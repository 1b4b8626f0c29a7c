"""The engine: continuous batching over the slots of a KV cache."""

from glasshouse.generation.engine.engine import Engine as Engine
