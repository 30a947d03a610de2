"""The online evaluations of a run, as far as they can be compared; read without PyTorch."""

from collections.abc import Iterable

from mae.training.log import LogRow

OF_LABELS = ("knn", "probe", "commonest_class", "chance", "near_copies")
"""Numbers that are measured on labelled images."""


def read_looks(rows: Iterable[LogRow]) -> list[LogRow]:
    """The rows that hold an evaluation, without numbers of other labelled images than were looked at last.

    A resumed run may be given other labelled images, or its first ones: accuracies on two sets are no course.
    """
    looks: list[tuple[str | None, LogRow]] = []
    images = None
    for row in rows:
        images = row.get("monitor", images)  # holds for all looks after it
        if "evaluation" in row:
            looks.append((images, row))
    return [row if images == looks[-1][0] else _without_labels(row) for images, row in looks]


def _without_labels(row: LogRow) -> LogRow:
    kept = {name: value for name, value in row["evaluation"].items() if name not in OF_LABELS}
    return {**row, "evaluation": kept}
