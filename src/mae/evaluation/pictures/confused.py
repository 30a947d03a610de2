"""Example images of the classes that a model confuses most."""

from collections.abc import Sequence
from pathlib import Path

from jaxtyping import Int64
from torch import Tensor

from mae.data.dataset.images import ImageSet
from mae.evaluation.common.metrics import confusion_matrix
from mae.evaluation.pictures.examples import write_examples
from mae.report.figures.confusion import commonest_confusions

_PAIRS, _EACH = 4, 5
"""Pairs of classes, and images of each."""


def draw_confused(
    images: ImageSet,
    labels: Int64[Tensor, " m"],
    predicted: Int64[Tensor, " m"],
    *,
    names: Sequence[str],
    title: str,
    path: Path,
) -> None:
    """Write test images of the commonest confusions as one PNG, a row for each pair of true and predicted class.

    Args:
        images: the test images.
        labels: the class of each readable one.
        predicted: the class that each of these was given, at least one of them a wrong one.
        names: of the classes.
        title: printed above.
        path: the PNG.

    Raises:
        MAEError: an image cannot be read, or the file not be written.
    """
    rows, notes, numbers = [], [], images.readable
    pairs = most_confused(labels, predicted, num_classes=len(names))
    found = [
        numbers[((labels == true) & (predicted == given)).nonzero()[:_EACH, 0]].tolist() for true, given, _ in pairs
    ]
    shown = [number for row in found for number in row]
    called = dict(zip(shown, images.short_names(shown), strict=True))
    for (true, given, count), row in zip(pairs, found, strict=True):
        said = [f"true: {names[true]}", f"predicted: {names[given]}", f"{count:,} of {int((labels == true).sum()):,}"]
        rows.append([*row, *[None] * (_EACH - len(row))])
        notes.append([[*said, called[number]] for number in row] + [[""] * 4] * (_EACH - len(row)))
    caption = "The commonest confusions, a row each: how many images of the true class were given the other one."
    write_examples(images, rows, notes=notes, names=[""] * _EACH, title=title, caption=caption, path=path)


def most_confused(
    labels: Int64[Tensor, " m"], predicted: Int64[Tensor, " m"], *, num_classes: int
) -> list[tuple[int, int, int]]:
    """True class, predicted class and how often, of the commonest confusions; of equally common ones the first."""
    matrix = confusion_matrix(predicted, labels, num_classes)
    cells = commonest_confusions(matrix)[:_PAIRS]
    pairs, counts = matrix.indices()[:, cells], matrix.values()[cells]
    return [(true, given, count) for (true, given), count in zip(pairs.T.tolist(), counts.tolist(), strict=True)]
