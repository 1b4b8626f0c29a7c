"""The attention kernel: masks, the layout of a batch, and the backends that compute it."""

from glasshouse.layers.attend.kernel import Attend as Attend
