"""Passes before training begins that leave no trace."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from mae.training.checkpoint import teacher_of


@contextmanager
def rehearsal(module: nn.Module, device: torch.device) -> Iterator[None]:
    """Forward and backward passes inside leave no gradients, and buffers and random numbers as they were.

    Args:
        module: with its teacher, where it has one.
        device: where it is.
    """
    teacher = teacher_of(module)
    modules = [module] if teacher is None else [module, teacher]
    buffers = [(buffer, buffer.clone()) for each in modules for buffer in each.buffers()]  # as a running mean
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            yield
    finally:
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
        module.zero_grad(set_to_none=True)
