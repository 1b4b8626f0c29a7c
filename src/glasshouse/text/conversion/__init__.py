"""Builds the tokenizer.json of a folder that has the older vocabulary files instead."""
