"""Images without their fine detail as the target."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from mae.errors import UsageError
from mae.targets.pixels import PixelTarget

EDGE_SLACK = 1e-6  # a wave on the circle itself stays, whatever the rounding


def low_pass(images: Float[Tensor, "B C H W"], cutoff: float) -> Float[Tensor, "B C H W"]:
    """Keep the waves whose frequency lies in a circle around 0, its edge included; float32.

    Args:
        images: of any size; taken as periodic, as the discrete Fourier transform does.
        cutoff: the circle's radius as a share of 0.5 cycles per pixel, the highest frequency a side can hold.
    """
    height, width = images.shape[-2:]
    down = torch.fft.fftfreq(height, device=images.device)
    across = torch.fft.rfftfreq(width, device=images.device)
    squared_radius = down.square().unsqueeze(-1) + across.square()
    keep = squared_radius <= (0.5 * cutoff) ** 2 * (1 + EDGE_SLACK)
    with torch.autocast(images.device.type, enabled=False):
        return torch.fft.irfft2(torch.fft.rfft2(images.float()) * keep, s=(height, width))


@dataclass(frozen=True, kw_only=True)
class LowPassTarget(PixelTarget):
    """The hidden pixels of the image after an ideal low pass, a circle in the 2-D Fourier plane.

    PixMIM (Liu et al. 2023) has the idea and the default: radius 40 for 224 pixels, where the highest
    frequency is 112. It filters images of values from 0 up and takes the absolute value of what comes out. Here
    the normalised images are filtered, whose values have either sign, so no absolute value is taken: the
    filter stays linear. The radius is a share, so that it means the same for any size, and a circle in cycles
    per pixel also where the sides differ.

    Attributes:
        cutoff: the circle's radius as a share of the highest frequency a side can hold (0.5 cycles per pixel), above
            0 and at most 1. At 1 only the corners of the plane go.

    Raises:
        UsageError: a cut-off out of range.
    """

    cutoff: float = 40 / 112

    def __post_init__(self) -> None:
        if not 0 < self.cutoff <= 1:
            raise UsageError(
                f"cut-off of the low-pass target is {self.cutoff}; expected a share of the highest frequency, "
                "above 0 and at most 1"
            )

    def picture(self, images: Float[Tensor, "B C H W"]) -> Float[Tensor, "B C H W"]:
        """What the predicted patches are cut from: the images without their high frequencies, float32."""
        return low_pass(images, self.cutoff)
