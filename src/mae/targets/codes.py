"""The codes of a codebook as the target."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Float, Int64
from torch import Tensor

from mae.core.contracts import Batch, Target, Taught
from mae.core.types import Layout, take_tokens


@dataclass(frozen=True, kw_only=True)
class CodeTarget(Target):
    """Which code of a codebook each token is nearest to (BEiT: Bao et al. 2021), with --teacher codebook."""

    kind: ClassVar[str] = "codes"
    classes: ClassVar[bool] = True
    needs: ClassVar[frozenset[str]] = frozenset({"codes"})

    def width(self, layout: Layout, gives: Mapping[str, int] | None = None) -> int:
        """As many as there are codes."""
        assert gives is not None  # a method without a teacher is refused by `needs`
        return gives["codes"]

    def __call__(
        self, batch: Batch, tokens: Int64[Tensor, "B M"] | None = None, taught: Taught | None = None
    ) -> Float[Tensor, "B M 1"]:
        """Numbers of the codes of the given tokens (None: every token in raster order), float32; NaN without data."""
        assert taught is not None
        values = taught["codes"]
        return values if tokens is None else take_tokens(values, tokens)
