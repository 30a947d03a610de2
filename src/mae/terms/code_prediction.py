"""Which code of a codebook each masked patch is nearest to, beside what the target asks."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Float
from torch import Tensor

from mae.core.component import Weight
from mae.core.contracts import Step, Term
from mae.core.types import cross_entropy, take_tokens, weighted_mean


@dataclass(frozen=True, kw_only=True)
class CodePrediction(Term):
    """Tell the code of each masked patch (BEiT: Bao et al. 2021), with --teacher codebook.

    The decoder predicts logits of the codes beside what the target asks. Their cross-entropy is averaged over the
    masked patches; a patch without data adds 0. It is log K at a uniform prediction of K codes. Unlike with the target
    `codes` pixels are predicted too, and drawn.
    """

    kind: ClassVar[str] = "code_prediction"
    needs: ClassVar[frozenset[str]] = frozenset({"codes"})

    weight: Weight = 0.2
    """Weight of a term that predicts the codes of --teacher codebook beside the target. 0: without."""

    def outputs(self, gives: Mapping[str, int]) -> int:
        """As many as there are codes."""
        return gives.get("codes", 0)  # without them the method is refused by `needs`

    def __call__(self, step: Step) -> Float[Tensor, ""]:
        """The value, float32, not multiplied by `weight`."""
        assert step.projected is not None
        codes = take_tokens(step.taught["codes"], step.plan.predicted)
        return weighted_mean(cross_entropy(step.projected, codes), step.plan.weight)
