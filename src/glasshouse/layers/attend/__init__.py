"""The attention kernel: masks, the layout of a batch, and the backends that compute it."""
