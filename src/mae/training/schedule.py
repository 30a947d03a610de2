"""The learning rate over training, counted in samples."""

from dataclasses import dataclass
from math import cos, pi


@dataclass(frozen=True, kw_only=True)
class WarmupCosine:
    """From 0 in a straight line to the peak, then half a cosine down to the floor (He et al. 2021, A.1).

    Attributes:
        peak: highest rate.
        floor: rate at the end.
        warmup_samples: samples over which the rate rises.
        total_samples: samples of the whole run.
    """

    peak: float
    floor: float
    warmup_samples: float
    total_samples: float

    def __call__(self, samples: float) -> float:
        """The rate of the step that begins after `samples` samples."""
        if samples < self.warmup_samples:
            return self.peak * samples / self.warmup_samples
        progress = (samples - self.warmup_samples) / max(self.total_samples - self.warmup_samples, 1)
        return self.floor + (self.peak - self.floor) * 0.5 * (1 + cos(pi * min(progress, 1.0)))
