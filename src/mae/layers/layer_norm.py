"""A layer norm whose input is kept for the backward pass in the precision of the step."""

from functools import partial

import torch
from jaxtyping import Float
from torch import Size, Tensor, nn
from torch.autograd.graph import saved_tensors_hooks


class LayerNorm(nn.LayerNorm):
    """PyTorch's layer norm; in bfloat16 steps on a CPU it keeps its input in half the memory.

    The residual stream is float32 in such a step, and layer norms alone keep it for the backward pass. Here they keep
    it in bfloat16, as products keep theirs. The output is the same bit for bit; gradients are rounded as others are.
    """

    def forward(self, x: Float[Tensor, "*B L D"]) -> Float[Tensor, "*B L D"]:
        """Normalise each token, scale and shift it."""
        if not _rounds_activations(x):
            return super().forward(x)
        with saved_tensors_hooks(partial(_narrowed, shape=x.shape), Tensor.float):
            return super().forward(x)


def _narrowed(kept: Tensor, shape: Size) -> Tensor:
    """The input, which has that shape, in bfloat16; weights and statistics as they are."""
    return kept.bfloat16() if kept.shape == shape else kept


def _rounds_activations(x: Tensor) -> bool:
    """Whether this is a bfloat16 step on a CPU in which nobody else chooses what is kept.

    Compiled code does, and so do activation checkpointing, whose hooks ours would replace, and `torch.func`.
    """
    return (
        x.device.type == "cpu"
        and x.dtype == torch.float32
        and torch.is_autocast_enabled("cpu")
        and torch.get_autocast_dtype("cpu") == torch.bfloat16
        and torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
        and torch._C._autograd._saved_tensors_hooks_is_enabled()  # type: ignore[attr-defined]
        and torch._C._autograd._top_saved_tensors_default_hooks(False) is None
    )
