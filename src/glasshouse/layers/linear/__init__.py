"""Linear layers: plain, fused, quantized, prepacked."""

from glasshouse.layers.linear.linear import Linear as Linear
