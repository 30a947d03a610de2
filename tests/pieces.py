"""What components are called with, made from little."""

from torch import Tensor

from mae.core.contracts import Batch
from mae.core.types import Layout, MaskRequest
from mae.modalities.images.tokenizer import ImagePatches


def batch_of(images: Tensor, patch: int | tuple[int, int] = 4, *, nodata: str | None = None) -> Batch:
    """A batch of these images, in patches of this size."""
    tokenizer = ImagePatches(
        img_size=(images.shape[2], images.shape[3]), patch_size=patch, in_chans=images.shape[1], nodata=nodata
    )
    return Batch(x=images, tokenizer=tokenizer)


def layout_of(grid: tuple[int, ...]) -> Layout:
    """Samples of this grid, each token one value."""
    return Layout(size=grid, patch=(1,) * len(grid), channels=1)


def asked(grid: tuple[int, ...], keys: Tensor, ratio: float | None = None) -> MaskRequest:
    """What a mask strategy is asked for samples of this grid."""
    return MaskRequest(layout=layout_of(grid), keys=keys, ratio=ratio)
