"""Model families: one file for each, its config.json and tensor names mapped to specs and back."""
