"""Labelled data: training and test split, what is held out for testing, and the classes both must have."""

import hashlib
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int64
from torch import Tensor

from mae.data.sources.source import Source
from mae.errors import UsageError

HELD_OUT = 0.2
"""Fraction of each class that is held out where a source has no test split of its own."""


@dataclass(frozen=True, kw_only=True, eq=False)
class LabelledSplit:
    """One split of a labelled data set; `labels[i]` is the class of the source's image i."""

    source: Source
    labels: Int64[Tensor, " n"]


@dataclass(frozen=True, kw_only=True, eq=False)
class LabelledData:
    """A labelled data set; labels are positions in `class_names`."""

    train: LabelledSplit
    test: LabelledSplit
    class_names: tuple[str, ...]
    note: str


def hold_out(names: Sequence[str], labels: np.ndarray) -> np.ndarray:
    """Which items are held out for testing: a fifth of each class, chosen by a hash of the names.

    At least one item of each class of two or more is held out, and none of a class of one.

    Args:
        names: the items' names.
        labels: class numbers `[n]`.

    Returns:
        Booleans `[n]`, True for the test split.
    """
    order = np.array([hashlib.sha256(name.encode("utf-8", "surrogateescape")).hexdigest() for name in names])
    test = np.zeros(len(names), dtype=bool)
    by_class = np.argsort(labels, kind="stable")  # once, and not a pass over all for each class
    for members in np.split(by_class, np.flatnonzero(np.diff(labels[by_class])) + 1):
        count = max(round(HELD_OUT * len(members)), 1) if len(members) > 1 else 0
        test[members[np.argsort(order[members], kind="stable")][:count]] = True
    return test


def check_classes(class_names: Sequence[str], *, name: str) -> None:
    """Refuses data that cannot be classified.

    Raises:
        UsageError: fewer than two classes.
    """
    if len(class_names) < 2:
        found = f"only the class {class_names[0]!r}" if class_names else "no class folders"
        raise UsageError(
            f"{name} holds {found}; expected a folder for each of two or more classes, as in train/cat/1.jpg"
        )


def check_parts(class_names: Sequence[str], test_classes: Iterable[str], *, name: str) -> None:
    """Refuses splits with different classes.

    Args:
        class_names: the classes of the training split.
        test_classes: the class of each test image.
        name: what the user called the test split.

    Raises:
        UsageError: a test class without training images, or a training class without test images.
    """
    trained, tested = set(class_names), set(test_classes)
    if unknown := sorted(tested - trained):
        raise UsageError(
            f"{name}: the test class {unknown[0]!r} is not among the training classes; "
            + (_misspelt(unknown[0], trained) or "remove it, or add training images of it")
        )
    if untested := sorted(trained - tested):
        raise UsageError(f"{name}: the training class {untested[0]!r} has no test image; add some, or remove the class")


def _misspelt(class_name: str, others: Iterable[str]) -> str:
    """What to do where another name differs only in case or Unicode form, and so may look the same; else empty."""
    alike = sorted(other for other in others if _letters(other) == _letters(class_name))
    if not alike:
        return ""
    form = f"{ascii(class_name)} differs from it in case or Unicode form"
    return f"{ascii(alike[0])} is, and {form}: give both the same name"


def _letters(name: str) -> str:
    return unicodedata.normalize("NFC", unicodedata.normalize("NFC", name).casefold())


def check_divisible(classes: Sequence[str], *, name: str) -> None:
    """Refuses images that cannot be split into training and test images.

    Args:
        classes: the class of each image.
        name: what the user called them.

    Raises:
        UsageError: a class of one image.
    """
    lonely = sorted(class_name for class_name, number in Counter(classes).items() if number == 1)
    if lonely:
        raise UsageError(
            f"{name}: the class {lonely[0]!r} has one image; expected at least two, one to train on and one to test "
            f"on: add some, or remove the class"
        )
