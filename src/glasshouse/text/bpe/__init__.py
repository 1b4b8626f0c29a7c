"""Byte-pair encoding: the algorithm, pre-tokenization, and training on a corpus."""
