"""Looking inside: recording and editing what passes through a model, and tools that explain it."""
