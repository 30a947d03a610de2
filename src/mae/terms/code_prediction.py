"""Which code of a codebook each masked patch is nearest to, beside what the target asks."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from annotated_types import Ge, Le
from jaxtyping import Float
from torch import Tensor

from mae.core.component import Weight
from mae.core.contracts import Step, Term, Tokenizer
from mae.core.types import cross_entropy, take_tokens, weighted_mean
from mae.layers.codebook import Codebook


@dataclass(frozen=True, kw_only=True)
class CodePrediction(Term):
    """Tell the code of each masked patch (BEiT: Bao et al. 2021), of a codebook learned on the run's images.

    The decoder predicts logits of the codes beside what the target asks. Their cross-entropy is averaged over the
    masked patches; a patch without data adds 0. It is log K at a uniform prediction of K codes. Unlike with the target
    `codes` pixels are predicted too, and drawn.
    """

    kind: ClassVar[str] = "code_prediction"

    weight: Weight = 0.2
    """Weight of a term that predicts the codes of patches beside the target (BEiT's idea). 0: without."""
    codes: Annotated[int, Ge(2), Le(8192)] = 512
    """Codes."""
    window: Annotated[int, Ge(1), Le(15)] | None = None
    """Patches across of what a code describes, averaged to a patch's size; of small patches 3, else 1 if not given."""

    @property
    def outputs(self) -> int:
        """As many as there are codes."""
        return self.codes

    def own_teacher(self, tokenizer: Tokenizer) -> Codebook:
        """The codebook, with random codes; after the first step it consists of patches."""
        return Codebook(tokenizer.layout, count=self.codes, window=self.window)

    def __call__(self, step: Step) -> Float[Tensor, ""]:
        """The value, float32, not multiplied by `weight`."""
        assert step.projected is not None
        codes = take_tokens(step.taught["codes"], step.plan.predicted)
        return weighted_mean(cross_entropy(step.projected, codes), step.plan.weight)
