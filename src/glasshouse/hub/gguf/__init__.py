"""Models in the format of llama.cpp: one GGUF file with weights, settings and tokenizer."""
