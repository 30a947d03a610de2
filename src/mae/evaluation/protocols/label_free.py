"""How spread out the features are, and how alike those of two crops of an image."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mae.errors import UsageError
from mae.evaluation.protocol import THIS_MODEL, EvaluationProtocol, ProtocolResult

if TYPE_CHECKING:
    from mae.evaluation.common.task import UnlabelledTask


@dataclass(frozen=True, kw_only=True)
class LabelFree(EvaluationProtocol):
    """Effective rank, std, cosine, uniformity and alignment of the features: the fields of `FeatureStats`.

    Raises:
        UsageError: fewer than one view.
    """

    name = "label_free"
    title = "Features without labels"
    summary = "how spread out the features are"
    labels = "none"
    cheap = True

    views: int = 1000
    """Images of which two random crops are compared, for the alignment."""
    baselines: bool = True
    """Evaluate the same model with random weights too."""

    def __post_init__(self) -> None:
        if self.views < 1:
            raise UsageError(f"views is {self.views}; expected 1 or more images to take two crops of")

    def run(self, task: "UnlabelledTask") -> ProtocolResult:
        """Evaluate; see `EvaluationProtocol`."""
        from mae.evaluation.common.feature_stats import measure_spread
        from mae.evaluation.common.two_views import two_views
        from mae.evaluation.extractors.extractor import baseline_extractors

        others = (
            [other for other in baseline_extractors(task.extractor) if other.model is not None]
            if self.baselines
            else []
        )
        numbers: dict[str, dict[str, dict[str, float | None]]] = {}
        for extractor in [task.extractor, *others]:
            first, second = two_views(task, extractor, count=self.views)
            numbers[THIS_MODEL if extractor is task.extractor else extractor.name] = {
                name: measure_spread(array, views=(first[name], second[name])).as_dict()
                for name, array in task.features(extractor).arrays.items()
            }
        widths = {name: array.shape[1] for name, array in task.features().arrays.items()}
        return ProtocolResult(
            numbers=numbers,
            header=("features", "rank", "width", "std", "cosine", "uniformity", "alignment"),
            rows=tuple(
                (f"{who}, {name}", f"{of['effective_rank']:.1f}", str(widths[name]), *_cells(of))
                for who, by_name in numbers.items()
                for name, of in by_name.items()
            ),
            note="A rank near 1, a std near 0 or a cosine near 1 mean collapse: all images look alike to the model. "
            "Higher rank alone does not mean better features.",
        )


def _cells(numbers: Mapping[str, float | None]) -> tuple[str, ...]:
    names = ("feature_std", "mean_cosine", "uniformity", "alignment")
    return tuple("" if numbers[name] is None else f"{numbers[name]:.3f}" for name in names)
