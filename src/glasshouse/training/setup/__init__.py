"""What a run trains with, made from its settings: datasets, model, and the caller's own objects."""
