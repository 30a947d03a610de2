"""Fresh weights."""

from torch import Tensor, nn


def init_normal_(tensor: Tensor, *, std: float) -> None:
    """Fill a parameter from a normal distribution of mean 0; one on the meta device has no values, and stays as it is.

    There `nn.init.normal_` would do nothing either, and have PyTorch load its compiler first, which takes a second or
    two of each command that opens a model.
    """
    if not tensor.is_meta:
        nn.init.normal_(tensor, std=std)
