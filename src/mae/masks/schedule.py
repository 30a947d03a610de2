"""How much is hidden, step by step: a curriculum over training, or chance."""

from dataclasses import dataclass
from math import cos, isfinite, pi
from typing import Literal, get_args

import torch

from mae.errors import UsageError
from mae.randomness import Stream, sample_keys, uniform

Kind = Literal["const", "linear", "cosine", "random"]

_LEVELS = 8
"""Steps between the two ratios: each ratio is another sequence length, and a compiled model meets nine at most."""


@dataclass(frozen=True, kw_only=True)
class RatioSchedule:
    """The share of patches hidden in each step of a run: a pure function of the step, alike in every process.

    `linear` and `cosine` (half a wave, flat at both ends) go from `start` to `end` over the first `warmup` epochs
    and stay there; `random` draws a ratio between the two for each batch; `const` is `end` throughout. Every ratio
    is one of nine, evenly spaced from `start` to `end`.

    Attributes:
        kind: `const`, `linear`, `cosine` or `random`.
        start: the first ratio, in (0, 1).
        end: the last ratio, in (0, 1).
        warmup: epochs until `end` is reached, 0 or more.
        seed: decides what `random` draws.

    Raises:
        UsageError: another kind, or a value out of range.
    """

    kind: str = "const"
    start: float = 0.5
    end: float = 0.75
    warmup: float = 5.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise UsageError(f"mask_schedule is {self.kind!r}; expected one of {', '.join(get_args(Kind))}")
        for name, ratio in (("mask_start", self.start), ("mask_ratio", self.end)):
            if not 0 < ratio < 1:
                raise UsageError(f"{name} is {ratio}; expected a share between 0 and 1, both excluded")
        if not (isfinite(self.warmup) and self.warmup >= 0):
            raise UsageError(f"mask_warmup is {self.warmup}; expected 0 or more epochs")

    def ratio(self, step: int, *, steps_per_epoch: int) -> float:
        """The share hidden in a step.

        Args:
            step: optimizer steps done before it.
            steps_per_epoch: optimizer steps in a pass over the images.
        """
        share = round(self._share(step, step / steps_per_epoch) * _LEVELS) / _LEVELS
        return (1 - share) * self.start + share * self.end

    def _share(self, step: int, epoch: float) -> float:
        """How far from `start` to `end`, in [0, 1]."""
        if self.kind == "random":
            key = sample_keys(self.seed, step, torch.zeros(1, dtype=torch.int64))
            # A ninth of the draws for each ratio, both ends included.
            return int(uniform(key, 1, Stream.RATIO).item() * (_LEVELS + 1)) / _LEVELS
        if self.kind == "const" or epoch >= self.warmup:
            return 1.0
        progress = epoch / self.warmup
        return progress if self.kind == "linear" else (1 - cos(pi * progress)) / 2
