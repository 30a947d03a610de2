"""The studies, one a file. A new study is its file, its line in `STUDIES` and its test.

A study is a frozen dataclass of its options with a class attribute `trains` and a method that plans it:
`study(setup: StudySetup) -> Study` where it trains; otherwise `study() -> Study` and a field `models`, the paths and
names of what it compares.
"""

from collections.abc import Mapping
from importlib import import_module
from typing import Any, NamedTuple

from mae.records import check_known


class StudyEntry(NamedTuple):
    """A study in the list.

    Attributes:
        options: the class in the study's file; the file is called as the study.
        summary: one line of help.
    """

    options: str
    summary: str


STUDIES: Mapping[str, StudyEntry] = {
    "compare": StudyEntry("Compare", "the plain run against the improved one, each part of it alone, or any recipes"),
    "mask_ratio": StudyEntry("MaskRatio", "how much of an image should be masked?"),
    "decoder": StudyEntry("Decoder", "self-attention over all patches, or cross-attention to visible ones?"),
    "decoder_depth": StudyEntry("DecoderDepth", "how deep should the decoder be?"),
    "ablate": StudyEntry("Ablate", "which changes of a run make a better encoder, each tried alone"),
    "quality": StudyEntry("Quality", "which recipe makes a good encoder soonest?"),
    "target": StudyEntry("Target", "predict pixels, or per-patch normalised pixels?"),
    "features": StudyEntry("Features", "trained models compared by k-NN and linear probe"),
}

STUDIED = "mae"
"""The recipe whose variants a study trains unless another is asked for: additions are told by what they add to it."""


def find_study(name: str) -> type[Any]:
    """The class of a study's options; imports its file, and no PyTorch.

    Raises:
        UsageError: no such study; the nearest names are given.
    """
    check_known([name], list(STUDIES), what="study")
    return getattr(import_module(f"{__name__}.{name}"), STUDIES[name].options)
