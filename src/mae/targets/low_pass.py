"""Images without their fine detail as the target."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from mae.core.component import Alias, ShareOfAll
from mae.layers.precision import without_autocast
from mae.targets.pixels import PixelTarget

EDGE_SLACK = 1e-6  # a wave on the circle itself stays, whatever the rounding


def low_pass(images: Float[Tensor, "B C H W"], cutoff: float) -> Float[Tensor, "B C H W"]:
    """Keep the waves whose frequency lies in a circle around 0, its edge included; float32.

    Args:
        images: of any size; taken as periodic, as the discrete Fourier transform does.
        cutoff: the circle's radius as a share of 0.5 cycles per pixel, the highest frequency a side can hold.
    """
    height, width = images.shape[-2:]
    # In cycles per pixel, as `fftfreq` and `rfftfreq` have them, which no ONNX graph can hold.
    down = ((torch.arange(height, device=images.device) + height // 2) % height - height // 2) / height
    across = torch.arange(width // 2 + 1, device=images.device) / width
    squared_radius = down.square().unsqueeze(-1) + across.square()
    keep = squared_radius <= (0.5 * cutoff) ** 2 * (1 + EDGE_SLACK)
    with without_autocast(images.device):
        return torch.fft.irfft2(torch.fft.rfft2(images.float()) * keep, s=(height, width))


@dataclass(frozen=True, kw_only=True)
class LowPassTarget(PixelTarget):
    """Pixels of the image without its fine detail: a circle in the 2-D Fourier plane stays (PixMIM, Liu et al. 2023).

    The default is theirs: radius 40 for 224 pixels, where the highest frequency is 112. They filter images of values
    from 0 up and take the absolute value of what comes out. Here the normalised images are filtered, whose values have
    either sign, so no absolute value is taken: the filter stays linear. The radius is a fraction, so that it means the
    same for any size, and a circle in cycles per pixel also where the sides differ.
    """

    kind: ClassVar[str] = "low_pass"
    reads_whole: ClassVar[bool] = True

    norm: Annotated[bool, Alias("norm_pix_loss")] = True
    """Normalise each target patch by its own mean and std: better features. Off: pictures need no estimate of them."""
    cutoff: ShareOfAll = 0.35714285714285715
    """Radius as a fraction of the highest frequency a side can hold; at 1 only the corners of the plane go."""

    def picture(self, x: Float[Tensor, "B C H W"]) -> Float[Tensor, "B C H W"]:
        """What the target's patches are cut from: the images without their high frequencies, float32."""
        return low_pass(x, self.cutoff)
