"""The features of a teacher as the target."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Float, Int64
from torch import Tensor

from mae.core.contracts import Batch, Target, Taught
from mae.core.types import Layout, take_tokens


@dataclass(frozen=True, kw_only=True)
class FeatureTarget(Target):
    """What the teacher says of each token of the whole sample (data2vec: Baevski et al. 2022); with --teacher."""

    kind: ClassVar[str] = "features"
    reads_whole: ClassVar[bool] = True
    needs: ClassVar[frozenset[str]] = frozenset({"tokens"})

    def width(self, layout: Layout, gives: Mapping[str, int] | None = None) -> int:
        """As wide as the teacher's tokens."""
        assert gives is not None  # a method without a teacher is refused by `needs`
        return gives["tokens"]

    def __call__(
        self, batch: Batch, tokens: Int64[Tensor, "B M"] | None = None, taught: Taught | None = None
    ) -> Float[Tensor, "B M D"]:
        """Target values of the given tokens (None: every token in raster order), float32."""
        assert taught is not None
        values = taught["tokens"].float()
        return values if tokens is None else take_tokens(values, tokens)
