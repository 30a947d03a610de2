"""Whether edges stand where they should: the Laplacian of the reconstruction against that of the image."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from mae.core.component import Weight
from mae.core.contracts import Step, Term


def laplacian(images: Shaped[Tensor, "B C H W"]) -> Shaped[Tensor, "B C H W"]:
    """Sum of the four neighbours less four times the pixel, channel by channel; the border is repeated outwards.

    In other words the sum of (neighbour - pixel) over the neighbours there are, since a repeated border adds 0. A
    constant image therefore gives 0 everywhere, at its border too.
    """
    result = torch.zeros_like(images)
    down = images[..., 1:, :] - images[..., :-1, :]
    result[..., :-1, :] += down
    result[..., 1:, :] -= down
    across = images[..., 1:] - images[..., :-1]
    result[..., :-1] += across
    result[..., 1:] -= across
    return result


@dataclass(frozen=True, kw_only=True)
class LaplacianError(Term):
    """Mean over hidden pixels and channels of |Laplacian of the reconstruction - Laplacian of the image|.

    Kernel and border are linear, so the difference of the two Laplacians is the Laplacian of the error: one
    pass is enough, and only the error is asked for.

    At the rim of a hidden patch the kernel reads its neighbours. By default these are the true pixels of a
    visible patch, as in the picture that is put together from both: a step between the predicted and the true
    patch (a seam) counts, and gradients reach masked patches alone. With `raw` they are what the decoder
    predicts for the visible patch, which no other term trains: the prediction is compared as one image, a seam
    to the true pixels is not seen, and gradients flow into those predictions as well.
    """

    kind: ClassVar[str] = "laplacian"
    reads_pixels: ClassVar[bool] = True
    reads_whole: ClassVar[bool] = True

    weight: Weight = 0.05
    """Weight of the Laplacian's error over masked pixels: fine detail. 0: without."""
    raw: bool = False
    """Take the decoder's output for visible patches too, rather than the image with the masked patches pasted in."""

    @property
    def predicts_visible(self) -> bool:
        """Whether predictions of visible tokens are read."""
        return self.raw

    def __call__(self, step: Step) -> Float[Tensor, ""]:
        """The value in float32, not multiplied by `weight`."""
        return self.of(step.pixel_error(raw=self.raw), step.masked_pixels())

    def of(self, error: Float[Tensor, "B C H W"], hidden: Bool[Tensor, "B 1 H W"]) -> Float[Tensor, ""]:
        """The value for the error of a picture.

        Args:
            error: prediction minus image as pictures, any floating type; without `raw` 0 on visible pixels.
            hidden: true on the pixels of masked patches; at least one.
        """
        error = error.float()
        # With s the signs on hidden pixels, the sum of |L e| is <s, L e> = <L s, e>: L is symmetric. The gradient
        # is L s itself, so nothing of the way there is kept for the backward pass; within -8 and 8, it fits a byte.
        with torch.no_grad():
            slope = laplacian(laplacian(error).sign_().to(torch.int8).mul_(hidden))
        return (slope * error).sum() / (hidden.sum() * error.shape[1])
