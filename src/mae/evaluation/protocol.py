"""What an evaluation protocol is: its name, its options, and the numbers it returns.

Protocols are listed, with their options and help, without PyTorch: nothing here, and nothing at the top of a protocol's
file, imports it.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from mae.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor

    from mae.evaluation.common.verdict import Verdict

THIS_MODEL = "this model"
"""What tables and records call the evaluated model."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ProtocolResult:
    """What a protocol measured.

    Attributes:
        numbers: JSON values, shares in [0, 1].
        header: names of the table's columns.
        rows: the table that is shown, the evaluated model first.
        note: what a reader must know beside the table.
        ranking: `[m, r]`, for each test image the classes by falling score, best first; for the confusion matrix.
        ranked_by: which of the table's scores the ranking belongs to; empty where there is only one.
        baselines: `[m]` for each baseline, by its name: the classes that it gives the test images.
        curve: how training went, one mapping a row.
        curve_over: which number of its rows the others are drawn over; one other than `epoch` on a logarithmic axis.
        verdict: the model beside its baselines, where the protocol says so itself; else the ranking tells.
        pictures: what writes each further picture to a path, by what it shows.
        classifier: what was trained to tell the classes apart, to be stored beside the record; None: nothing of use.
        variant: added to the names of the record and its pictures, so that variants of a protocol stand side by side.
    """

    numbers: Mapping[str, Any]
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""
    ranking: "Tensor | None" = None
    ranked_by: str = ""
    baselines: "Mapping[str, Tensor]" = field(default_factory=dict)
    curve: tuple[Mapping[str, float], ...] = ()
    curve_over: str = "epoch"
    variant: str = ""
    verdict: "Verdict | None" = None
    pictures: "Mapping[str, Callable[..., None]]" = field(default_factory=dict)
    classifier: Any = None


class EvaluationProtocol(ABC):
    """A way to evaluate a model: a frozen dataclass whose fields are its options, checked when it is made.

    The command line, `evaluate all`, tables and pages read these; `protocols/__init__.py` lists the classes.

    Attributes:
        name: on the command line and in records.
        title: of its tables and pictures.
        summary: what it measures, for `mae evaluate --help`.
        labels: what it needs beside images: `classes` of images (it is given a `LabelledTask`), `masks` with the class
            of each pixel (a `SegmentationTask`), `boxes` around objects (a `DetectionTask`), or `none` (an
            `UnlabelledTask`).
        cheap: whether `mae evaluate all` runs it: minutes on a CPU once features are stored.
        own_page: whether it is shown on a page of its own, `evaluation/<name>.html`.
        measure: the share that stands for a model: its key in the `numbers` of a result, at any depth, and its name.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    summary: ClassVar[str]
    labels: ClassVar[Literal["classes", "masks", "boxes", "none"]] = "classes"
    cheap: ClassVar[bool] = False
    own_page: ClassVar[bool] = False
    measure: ClassVar[tuple[str, str]] = ("top1", "top-1")

    def why_not(self, extractor: Any) -> str | None:
        """One line that says why the protocol does not apply to the model of an `Extractor`; None if it does."""
        return None

    @abstractmethod
    def run(self, task: Any) -> ProtocolResult:
        """Evaluate the task's model.

        Raises:
            UsageError: the options do not fit the task's images.
            MAEError: it failed on the way.
        """


@dataclass(frozen=True, kw_only=True)
class SegmentationProtocol(EvaluationProtocol):
    """A protocol on images with masks.

    Raises:
        UsageError: a number that no mask can hold.
    """

    labels = "masks"
    measure = ("mean_iou", "mean IoU")

    ignore: tuple[int, ...] = ()
    """Numbers in masks that do not count, beside 255 and classes called unlabelled or void."""

    def __post_init__(self) -> None:
        if any(not 0 <= number < 1 << 16 for number in self.ignore):
            raise UsageError(f"ignore is {list(self.ignore)}; expected numbers in masks, 0 to 65535")


@dataclass(frozen=True, kw_only=True)
class DetectionProtocol(EvaluationProtocol):
    """A protocol on images with boxes around objects, perhaps with their outlines."""

    labels = "boxes"
    measure = ("ap", "AP")


def headline(by_name: Mapping[str, Any]) -> str:
    """The feature whose number stands for a model: the mean of the patch tokens where there is one."""
    return "mean" if "mean" in by_name else next(iter(by_name))


def against_baselines(
    rankings: "Mapping[str, Mapping[str, Tensor]]",
) -> "tuple[Tensor, str, dict[str, Tensor]]":
    """What stands for a model and what for its baselines.

    Args:
        rankings: `[m, r]` of each contender, by its name, and of each of its features.

    Returns:
        The model's ranking by its headline feature, that feature's name, and the classes `[m]` by each baseline's.
    """
    ours = rankings[THIS_MODEL]
    name = headline(ours)
    others = {who: of[headline(of)][:, 0] for who, of in rankings.items() if who != THIS_MODEL}
    return ours[name], name, others
