"""Several processes: FSDP2, tensor parallelism, and processes that fail or lag behind."""
