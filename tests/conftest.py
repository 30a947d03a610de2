"""What every test runs under."""

import os

import torch

# Tiny models lose more to threads that wait for each other than they gain; the processes that tests start as well.
torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"
