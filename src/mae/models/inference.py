"""Using a model in the middle of its training without leaving a trace."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Evaluation mode and no gradients inside; each part's mode and PyTorch's generators are put back after.

    The generators matter because a loader draws its base seed from the global one: looking at a run must not
    change it.
    """
    modes = [(module, module.training) for module in model.modules()]
    gpus = {parameter.device for parameter in model.parameters() if parameter.device.type == "cuda"}
    with torch.random.fork_rng(devices=list(gpus)), torch.no_grad():
        model.eval()
        try:
            yield
        finally:
            for module, training in modes:  # one by one: a frozen part may have its own mode
                module.training = training
