"""Test images that are also training images: what to say of them, and the set without them."""

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Literal, TypeVar

import torch

from mae.data.annotations.detection import DetectionData
from mae.data.annotations.segmentation import SegmentationData
from mae.data.sources.folder import count_of
from mae.data.sources.labels import LabelledData, LabelledSplit, check_parts
from mae.errors import UsageError

Overlap = Literal["error", "drop"]
"""What to do with them."""

_SHOWN = 3
_Data = TypeVar("_Data", LabelledData, SegmentationData, DetectionData)


def overlap_message(data: LabelledData | SegmentationData | DetectionData, pairs: Sequence[tuple[int, int]]) -> str:
    """How many there are, some of them by name, and what to do.

    Args:
        data: the set.
        pairs: numbers of a training image and the test image with the same pixels, of each test image once.
    """
    shown = "; ".join(
        f"{data.train.source.item_name(first)} and {data.test.source.item_name(second)}"
        for first, second in pairs[:_SHOWN]
    )
    found = "1 test image is" if len(pairs) == 1 else f"{len(pairs):,} test images are"
    return (
        f"{found} among the training images too: {shown}. Remove what is in both from one part, or leave it out of the "
        "test with --overlap drop"
    )


def without_images(data: _Data, numbers: Collection[int]) -> _Data:
    """The set without these test images.

    Raises:
        UsageError: no test image is left, none of a class, or a source that cannot leave any out.
    """
    if not isinstance(data, LabelledData):
        return data.without(numbers)
    kept = torch.tensor([number for number in range(len(data.test.labels)) if number not in numbers])
    if len(kept) == 0:
        raise UsageError("every test image is among the training images; give another test part with --test")
    take = getattr(data.test.source, "take", None)
    if take is None:
        raise UsageError(f"{data.test.source.name} comes whole; its test images cannot be left out")
    source = take(kept.numpy(), f"{count_of(len(kept), 'test image')} not among the training images")
    test = LabelledSplit(source=source, labels=data.test.labels[kept])
    check_parts(data.class_names, [data.class_names[label] for label in test.labels.tolist()], name=source.name)
    return replace(data, test=test, note=f"{data.note}; {count_of(len(numbers), 'test image')} left out: trained on")
