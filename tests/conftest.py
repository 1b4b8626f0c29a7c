"""Settings every test runs under."""

import torch

# Tensors here are tiny: a second thread only waits for the first.
torch.set_num_threads(1)
