"""What every test runs under."""

import torch

# Tiny models lose more to threads that wait for each other than they gain.
torch.set_num_threads(1)
