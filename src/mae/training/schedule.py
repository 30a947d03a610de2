"""The learning rate over training, counted in samples."""

from dataclasses import dataclass
from math import cos, pi

_FIRST_STEP, _SECOND_STEP = 163_889 / 184_375, 177_546 / 184_375


@dataclass(frozen=True, kw_only=True)
class Warmup:
    """Linear warm-up to the peak, then down to the floor.

    Attributes:
        peak: highest learning rate.
        floor: learning rate at the end.
        warmup_samples: of the warm-up.
        total_samples: of the whole run.
    """

    peak: float
    floor: float
    warmup_samples: float
    total_samples: float

    def __call__(self, samples: float) -> float:
        """The learning rate of the step that begins after `samples` samples."""
        if samples < self.warmup_samples:
            return self.peak * samples / self.warmup_samples
        progress = (samples - self.warmup_samples) / max(self.total_samples - self.warmup_samples, 1)
        return self.floor + (self.peak - self.floor) * self._share(min(progress, 1.0))

    def _share(self, progress: float) -> float:
        """What is left of the way down, in [0, 1]."""
        raise NotImplementedError


class WarmupCosine(Warmup):
    """Behind the warm-up a cosine schedule (He et al. 2021, A.1)."""

    def _share(self, progress: float) -> float:
        return 0.5 * (1 + cos(pi * progress))


class WarmupLinear(Warmup):
    """Behind the warm-up straight down: the "poly" schedule of power 1 of segmentation."""

    def _share(self, progress: float) -> float:
        return 1 - progress


class WarmupSteps(Warmup):
    """Behind the warm-up the peak, a tenth of it from 8/9 and a hundredth from 0.963 of the way on (ViTDet)."""

    def _share(self, progress: float) -> float:
        return 1.0 if progress < _FIRST_STEP else 0.1 if progress < _SECOND_STEP else 0.01
