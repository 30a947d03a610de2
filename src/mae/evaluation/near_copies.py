"""Test images that nearly show a training image, as one saved anew: how many, and how good a model is without them."""

from collections.abc import Mapping
from typing import Any

from mae.evaluation.bench import Bench, Outcome
from mae.evaluation.scores import top_k_accuracy

_SHOWN = 3


def count_near_copies(bench: Bench) -> dict[str, Any]:
    """How many `test_images` `of` how many have a near copy in training, and the names of a few pairs (`examples`)."""
    pairs = [(row, nearest) for row, nearest in enumerate(bench.near_copies.tolist()) if nearest >= 0]
    test, train = bench.images("test"), bench.images("train")
    examples = [
        [test.item_name(int(test.readable[row])), train.item_name(int(train.readable[nearest]))]
        for row, nearest in pairs[:_SHOWN]
    ]
    return {"test_images": len(pairs), "of": len(bench.near_copies), "examples": examples}


def judge_without_near_copies(bench: Bench, outcome: Outcome) -> dict[str, Any]:
    """`count_near_copies`, with the top-1 accuracy of the outcome's ranking over all test images and without those.

    Accuracies are None where there is no ranking, or no test image is left.
    """
    top1 = top1_without = None
    if outcome.ranking is not None:
        clean, labels = bench.near_copies < 0, bench.labels("test")
        top1 = top_k_accuracy(outcome.ranking[:, :1], labels)
        if clean.any():
            top1_without = top_k_accuracy(outcome.ranking[clean, :1], labels[clean])
    return {**count_near_copies(bench), "ranked_by": outcome.ranked_by, "top1": top1, "top1_without": top1_without}


def warning(found: Mapping[str, Any]) -> str:
    """What `count_near_copies` means for scores; empty where it found none."""
    if not found["test_images"]:
        return ""
    shown = "; ".join(f"{test} ~ {train}" for test, train in found["examples"])
    return (
        f"{found['test_images']:,} of {found['of']:,} test images have a near copy among the training images, so "
        f"scores are higher than on new images: {shown}. Keep such images in one part"
    )


def remark(found: Mapping[str, Any]) -> str:
    """One sentence on what `judge_without_near_copies` found; empty where there is nothing to say."""
    if not found["test_images"] or found["top1"] is None:
        return ""
    if found["top1_without"] is None:
        return "Every test image has a near copy among the training images: these scores tell nothing of new images."
    by = f" ({found['ranked_by']})" if found["ranked_by"] else ""
    left = found["of"] - found["test_images"]
    return (
        f"Of the {left:,} test images without a near copy in training {found['top1_without']:.1%} are right, of all "
        f"{found['top1']:.1%}{by}."
    )
