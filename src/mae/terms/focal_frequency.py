"""The error in the Fourier plane, with more weight on frequencies that are still wrong."""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Complex, Float
from torch import Tensor

from mae.core.component import Count, NotNegative, Weight
from mae.core.contracts import Step, Term
from mae.errors import UsageError
from mae.layers.precision import without_autocast
from mae.layers.together import gather_features, largest_together


def mirrored(width: int, device: torch.device) -> Float[Tensor, " half"]:
    """How often each column of a half spectrum stands in the whole: 2, but 1 for 0 and the highest of an even width."""
    columns = torch.arange(width // 2 + 1, device=device)
    return 2 - (columns * 2 % width == 0).float()


@dataclass(frozen=True, kw_only=True)
class FocalFrequencyError(Term):
    """The focal frequency loss (Jiang et al. 2021, "Focal Frequency Loss for Image Reconstruction", section 3).

    With d the modulus of the error's orthonormal 2-D Fourier transform: the mean of `w * d^2`, where w is
    `d^alpha` over its maximum, within [0, 1] and taken as a constant. The transform is linear, so the spectrum
    of the error is all that is needed.

    By default the image is put together first: the true pixels stand on visible patches, so the error is 0
    there and gradients reach masked patches alone. With `raw` the decoder's picture is compared as it is,
    visible patches included.
    """

    kind: ClassVar[str] = "focal_frequency"
    reads_pixels: ClassVar[bool] = True
    reads_whole: ClassVar[bool] = True

    weight: Weight = 1.0
    """Weight of the focal frequency loss. 0: without."""
    alpha: NotNegative = 1.0
    """How sharply its weight falls for frequencies that are right already; 0 weighs all alike."""
    patch_factor: Count = 1
    """Cut the image into this many pieces along each side, and transform each by itself."""
    average_spectrum: bool = False
    """Compare the mean spectrum of the batch instead of each image's own."""
    log_matrix: bool = False
    """Take the logarithm of d^alpha + 1 as the weight, which lifts small ones."""
    batch_matrix: bool = False
    """Divide the weights by the maximum of the whole batch instead of each image's and channel's."""
    raw: bool = False
    """Take the decoder's output for visible patches too, rather than the image with the masked patches pasted in."""

    @property
    def reads_batch(self) -> bool:  # type: ignore[override]
        """Whether it compares samples of a batch."""
        return self.average_spectrum or self.batch_matrix

    @property
    def predicts_visible(self) -> bool:
        """Whether predictions of visible tokens are read."""
        return self.raw

    def __call__(self, step: Step) -> Float[Tensor, ""]:
        """The value in float32, not multiplied by `weight`.

        Raises:
            UsageError: a side of the image is not a multiple of the patch factor.
        """
        return self.of(step.pixel_error(raw=self.raw))

    def of(self, error: Float[Tensor, "B C H W"]) -> Float[Tensor, ""]:
        """The value for the error of a picture.

        Args:
            error: prediction minus image as pictures, any floating type; without `raw` 0 on visible pixels.

        Raises:
            UsageError: see `__call__`.
        """
        error = error.float()
        parts = self._parts(error)
        with without_autocast(error.device):
            spectrum = torch.fft.rfft2(parts, norm="ortho")  # half the plane: the other half mirrors it
        if self.average_spectrum:
            spectrum = _mean_together(spectrum)
        power = spectrum.real.square() + spectrum.imag.square()
        values = self._matrix(power.detach()) * power * mirrored(parts.shape[-1], error.device)
        return values.sum() / (values[..., 0].numel() * parts.shape[-1])

    def _parts(self, error: Float[Tensor, "B C H W"]) -> Float[Tensor, "B C R S h w"]:
        """The image cut into `patch_factor` times `patch_factor` parts."""
        batch, channels, height, width = error.shape
        factor = self.patch_factor
        if height % factor != 0 or width % factor != 0:
            raise UsageError(
                f"image size {height}x{width} does not divide into {factor}x{factor} parts; choose a patch factor "
                f"of the focal frequency term that divides both sides, such as {math.gcd(height, width, factor)}"
            )
        parts = error.reshape(batch, channels, factor, height // factor, factor, width // factor)
        return parts.transpose(3, 4)

    def _matrix(self, power: Float[Tensor, "B C R S h w"]) -> Float[Tensor, "B C R S h w"]:
        """The weight of each frequency, within [0, 1], from the squared modulus."""
        matrix = power.sqrt().pow(self.alpha)
        if self.log_matrix:
            matrix = matrix.log1p()
        largest = largest_together(matrix.amax()) if self.batch_matrix else matrix.amax(dim=(-2, -1), keepdim=True)
        return (matrix / largest).nan_to_num(nan=0.0).clamp(0, 1)  # 0 / 0 where nothing is wrong


def _mean_together(spectrum: Complex[Tensor, "B *parts"]) -> Complex[Tensor, "1 *parts"]:
    """The mean over the images of all processes."""
    numbers = torch.view_as_real(spectrum.mean(dim=0, keepdim=True))
    mean = gather_features(numbers.flatten(1)).mean(dim=0, keepdim=True)
    return torch.view_as_complex(mean.unflatten(1, numbers.shape[1:]))
