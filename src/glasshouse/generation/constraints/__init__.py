"""Constrained decoding: JSON, schemas, regular expressions and grammars."""
