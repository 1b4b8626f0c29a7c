"""`glasshouse tokenizer`: train, use and inspect tokenizers."""
