"""Test images that nearly show a training image, as one saved anew: how many, and how good a model is without them."""

from collections.abc import Mapping
from typing import Any

from mae.data.sources.folder import count_of
from mae.evaluation.common.metrics import top_k_accuracy
from mae.evaluation.common.task import LabelledTask
from mae.evaluation.protocol import ProtocolResult

_SHOWN = 3


def count_near_copies(task: LabelledTask) -> dict[str, Any]:
    """How many `test_images` `of` how many have a near copy in training, and the names of a few pairs (`examples`)."""
    pairs = [(row, nearest) for row, nearest in enumerate(task.near_copies.tolist()) if nearest >= 0]
    test, train = task.images("test"), task.images("train")
    examples = [
        [test.item_name(int(test.readable[row])), train.item_name(int(train.readable[nearest]))]
        for row, nearest in pairs[:_SHOWN]
    ]
    return {"test_images": len(pairs), "of": len(task.near_copies), "examples": examples}


def accuracy_without_near_copies(task: LabelledTask, result: ProtocolResult) -> dict[str, Any]:
    """`count_near_copies`, with the top-1 accuracy of the result's ranking over all test images and without those.

    Accuracies are None where there is no ranking, or no test image is left.
    """
    top1 = top1_without = None
    if result.ranking is not None:
        clean, labels = task.near_copies < 0, task.labels("test")
        top1 = top_k_accuracy(result.ranking[:, :1], labels)
        if clean.any():
            top1_without = top_k_accuracy(result.ranking[clean, :1], labels[clean])
    return {**count_near_copies(task), "ranked_by": result.ranked_by, "top1": top1, "top1_without": top1_without}


def warning(count: Mapping[str, Any]) -> str:
    """What `count_near_copies` means for scores; empty where there are none."""
    if not count["test_images"]:
        return ""
    shown = "; ".join(f"{test} ~ {train}" for test, train in count["examples"])
    return (
        f"{count['test_images']:,} of {count['of']:,} test images have a near copy among the training images, so "
        f"scores are higher than on new images: {shown}. Keep such images in one part"
    )


def remark(count: Mapping[str, Any]) -> str:
    """One sentence on `accuracy_without_near_copies`; empty where there is nothing to say."""
    if not count.get("test_images") or count["top1"] is None:
        return ""
    if count["top1_without"] is None:
        return "Every test image has a near copy among the training images: these scores tell nothing of new images."
    by = f" ({count['ranked_by']})" if count["ranked_by"] else ""
    left = count["of"] - count["test_images"]
    return (
        f"Of the {count_of(left, 'test image')} without a near copy in training {count['top1_without']:.1%} are right, "
        f"of all {count['top1']:.1%}{by}."
    )
