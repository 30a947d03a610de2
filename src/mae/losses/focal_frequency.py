"""The error in the Fourier plane, with more weight on frequencies that are still wrong."""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from mae.errors import UsageError


def mirrored(width: int, device: torch.device) -> Float[Tensor, " half"]:
    """How often each column of a half spectrum stands in the whole: 2, but 1 for 0 and the highest of an even width."""
    columns = torch.arange(width // 2 + 1, device=device)
    return 2 - (columns * 2 % width == 0).float()


@dataclass(frozen=True, kw_only=True)
class FocalFrequencyError:
    """The focal frequency loss (Jiang et al. 2021, "Focal Frequency Loss for Image Reconstruction", section 3).

    With d the modulus of the error's orthonormal 2-D Fourier transform: the mean of `w * d^2`, where w is
    `d^alpha` over its maximum, within [0, 1] and taken as a constant. The transform is linear, so the spectrum
    of the error is all that is needed.

    By default the image is put together first: the true pixels stand on visible patches, so the error is 0
    there and gradients reach hidden patches alone. With `raw` the decoder's picture is judged as it is,
    visible patches included.

    Attributes:
        weight: how much the term counts in the objective; the call returns the value without it.
        alpha: how sharply the weight falls for frequencies that are right already; 0 weighs all alike.
        patch_factor: cut the image into this many parts along each side, and transform each by itself.
        average_spectrum: judge the mean spectrum of the batch instead of each image's own.
        log_matrix: take the logarithm of `d^alpha + 1` as the weight, which lifts small ones.
        batch_matrix: divide the weights by the maximum of the whole batch instead of each image's and channel's.
        raw: judge the decoder's picture as it is; visible patches must then be predicted too.

    Raises:
        UsageError: a weight or alpha that is negative or not finite, a patch factor below 1.
    """

    weight: float = 1.0
    alpha: float = 1.0
    patch_factor: int = 1
    average_spectrum: bool = False
    log_matrix: bool = False
    batch_matrix: bool = False
    raw: bool = False

    def __post_init__(self) -> None:
        for name, value in (("weight", self.weight), ("alpha", self.alpha)):
            if not (math.isfinite(value) and value >= 0):
                raise UsageError(f"{name} of the focal frequency term is {value}; expected a finite number from 0 up")
        if self.patch_factor < 1:
            raise UsageError(f"patch factor of the focal frequency term is {self.patch_factor}; expected at least 1")

    def __call__(self, error: Float[Tensor, "B C H W"], hidden: Bool[Tensor, "B 1 H W"]) -> Float[Tensor, ""]:
        """The value in float32, not multiplied by `weight`.

        Args:
            error: prediction minus image as pictures, any floating type; without `raw` 0 on visible pixels.
            hidden: not asked for: each frequency is one of the whole image.

        Raises:
            UsageError: a side of the image is not a multiple of the patch factor.
        """
        error = error.float()
        parts = self._parts(error)
        with torch.autocast(error.device.type, enabled=False):
            spectrum = torch.fft.rfft2(parts, norm="ortho")  # half the plane: the other half mirrors it
        if self.average_spectrum:
            spectrum = spectrum.mean(dim=0, keepdim=True)
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
        largest = matrix.amax() if self.batch_matrix else matrix.amax(dim=(-2, -1), keepdim=True)
        return (matrix / largest).nan_to_num(nan=0.0).clamp(0, 1)  # 0 / 0 where nothing is wrong
