"""A codebook of patches, learned on the images of the run, as the teacher."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from annotated_types import Ge, Le, Lt

from mae.core.component import Metavar, Share
from mae.core.contracts import Encoder, Teacher
from mae.layers.codebook import Codebook


@dataclass(frozen=True, kw_only=True)
class CodebookTeacher(Teacher):
    """A codebook of patches, learned on the run's images while it goes on: it says which code a patch is nearest to.

    BEiT's idea (Bao et al. 2021) without a tokenizer trained elsewhere; see `Codebook`.
    """

    kind: ClassVar[str] = "codebook"
    changes: ClassVar[bool] = True

    codes: Annotated[int, Ge(2), Le(8192)] = 512
    """Codes."""
    decay: Share = 0.99
    """Share of a code's past that it keeps in a step."""
    restart: Annotated[float, Ge(0), Lt(1), Metavar("FRACTION")] = 0.01
    """A code begins anew where it is used less than this fraction of an even use."""
    window: Annotated[int, Ge(1), Le(15)] | None = None
    """Patches across of what a code describes, averaged to a patch's size; of small patches 3, else 1 if not given."""

    def gives(self, encoder: Encoder) -> Mapping[str, int]:
        """The `codes`: which of them is nearest to each token."""
        return {"codes": self.codes}

    def build(self, student: Any) -> Codebook:
        """The codebook, with random codes; after the first step it consists of patches."""
        return Codebook(
            student.tokenizer.layout, count=self.codes, decay=self.decay, restart=self.restart, window=self.window
        )
