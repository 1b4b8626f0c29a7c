"""The engine: continuous batching over the slots of a KV cache."""
