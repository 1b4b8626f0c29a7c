"""Distributed training: FSDP2, tensor parallelism, failed ranks and stragglers."""
