"""Noise masking: the visible patches are the peaks of random noise of one range of spatial frequencies."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Bool
from torch import Tensor

from mae.core.component import NotNegative, Positive, Share
from mae.core.types import Layout, MaskPlan, MaskRequest
from mae.errors import UsageError
from mae.masks.planar import PlanarMask, plan_in_order
from mae.randomness import Stream, uniform

_REST = 1e-3
"""What passes of other frequencies: it orders by chance, not by rounding, the equal values that few waves have."""


@dataclass(frozen=True, kw_only=True)
class NoiseMasking(PlanarMask):
    """Peaks of band-passed noise stay visible, between them all is masked (ColorMAE: Hinojosa et al. 2024).

    White noise on the grid of patches is filtered by its Fourier transform, periodic at the borders; a frequency
    (f_row, f_column) passes if its length is in the band. The largest values stay visible. ColorMAE takes windows of
    stored patterns and does not say their bands; the limits here are a choice of our own: waves of about three to ten
    patches, which is its green noise in kind. A lower band makes larger, smoother regions.

    Every position is masked equally often, in a fraction (N - V) / N of the samples: white noise looks alike from every
    position, and the filter treats all alike. Devices agree to rounding: where two values are equal to seven digits,
    the patches may change places.
    """

    kind: ClassVar[str] = "noise"

    ratio: Share = 0.75
    """Fraction of the patches masked."""
    min_frequency: NotNegative = 0.1
    """Lowest spatial frequency of the noise, in cycles per patch."""
    max_frequency: Positive = 0.35
    """Highest spatial frequency of the noise, in cycles per patch; 0.5 is every second row, 0.71 a checkerboard."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.min_frequency > self.max_frequency:
            raise UsageError(
                f"mask_min_frequency is {self.min_frequency}, above the mask_max_frequency of {self.max_frequency}; "
                "give the lower one first"
            )

    def num_visible(self, layout: Layout, ratio: float | None = None) -> int:
        """How many tokens stay visible; see `Mask.num_visible`.

        Raises:
            UsageError: a grid without a frequency in the band; see `PlanarMask.num_visible`.
        """
        count = super().num_visible(layout, ratio)
        if not bool(self._passes(layout, torch.device("cpu")).any()):
            found = sorted({round(value, 3) for value in _frequencies(layout, torch.device("cpu")).flatten().tolist()})
            near = min(found[1:], key=lambda value: abs(value - (self.min_frequency + self.max_frequency) / 2))
            raise UsageError(
                f"mask_min_frequency {self.min_frequency} to mask_max_frequency {self.max_frequency} holds no "
                f"frequency of a grid of {'x'.join(map(str, layout.grid))} patches; the nearest is {near} cycles per "
                "patch: widen the band"
            )
        return count

    def plan(self, request: MaskRequest) -> MaskPlan:
        """The mask of each sample; see `Mask.plan`."""
        layout, count = request.layout, self.num_visible(request.layout, request.ratio)
        white = (uniform(request.keys, layout.num_tokens, Stream.MASK) - 0.5).unflatten(1, layout.grid)
        gain = self._passes(layout, white.device).float().clamp(min=_REST)
        noise = torch.fft.irfft2(torch.fft.rfft2(white) * gain, s=layout.grid)
        return plan_in_order(noise.flatten(1).argsort(dim=1, descending=True, stable=True), count)

    def _passes(self, layout: Layout, device: torch.device) -> Bool[Tensor, "rows half"]:
        """Which waves are in the band; the constant one is in none."""
        length, rounding = _frequencies(layout, device), 1e-6
        within = (length >= self.min_frequency - rounding) & (length <= self.max_frequency + rounding)
        return within & (length > 0)


def _frequencies(layout: Layout, device: torch.device) -> Tensor:
    """The length of each frequency of a real Fourier transform, `[rows, columns // 2 + 1]`, in cycles per patch."""
    rows, columns = layout.grid
    down, across = torch.fft.fftfreq(rows, device=device), torch.fft.rfftfreq(columns, device=device)
    return torch.hypot(down.unsqueeze(1), across)
