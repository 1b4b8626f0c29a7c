"""Checks of a tokenizer.json from an untrusted source."""
