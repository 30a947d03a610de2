"""The learning rate over training, counted in samples."""

from dataclasses import dataclass
from math import cos, pi


@dataclass(frozen=True, kw_only=True)
class WarmupCosine:
    """Linear warm-up to the peak, then a cosine schedule down to the floor (He et al. 2021, A.1).

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
        return self.floor + (self.peak - self.floor) * 0.5 * (1 + cos(pi * min(progress, 1.0)))
