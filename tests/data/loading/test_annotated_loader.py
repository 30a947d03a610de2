"""Annotated images: image and annotation are changed together, by the sample's key alone."""

import contextlib
import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from data.pictures import Pictures, noise
from torch import Tensor
from torchvision import tv_tensors
from torchvision.transforms import v2

from mae.data.dataset.images import ImageSet, load_images
from mae.data.loading.annotated import AnnotatedBatch, AnnotatedLoader
from mae.errors import MAEError, UsageError


def image_set(broken: frozenset[int] = frozenset()) -> ImageSet:
    """Images of several sizes; broken ones are met while training only."""
    source = Pictures([noise(20 + number % 3, 24, 3, number) for number in range(22)])
    images = load_images(source, in_chans=None, memory_limit=0, max_unreadable=0.5)
    source.broken = broken
    return images


def loader(images: ImageSet, **changes: Any) -> AnnotatedLoader:
    """Masks that repeat the first channel, and boxes around a pixel of it."""

    def annotate(number: int) -> Mapping[str, Any]:
        image = images.get(number)
        size = (image.shape[1], image.shape[2])
        box = [[number % 5, 3, number % 5 + 6, 12]]
        boxes = tv_tensors.BoundingBoxes(box, format="XYXY", canvas_size=size)  # type: ignore[call-overload]
        return {"mask": tv_tensors.Mask(image[0]), "boxes": boxes, "number": torch.tensor(number)}

    transform = v2.Compose([v2.RandomCrop((16, 12)), v2.RandomHorizontalFlip()])
    settings = dict(annotate=annotate, transform=transform, stacked=True, batch_size=8, accumulate=2, seed=5, workers=0)
    return AnnotatedLoader(images=images, **{**settings, **changes})  # type: ignore[arg-type]


def taken(source: AnnotatedLoader, count: int, start_step: int = 0) -> list[AnnotatedBatch]:
    with contextlib.closing(source.iterate(start_step)) as batches:
        return list(itertools.islice(batches, count))


def same(first: list[AnnotatedBatch], second: list[AnnotatedBatch]) -> bool:
    return len(first) == len(second) and all(
        a.samples.keys() == b.samples.keys()
        and all(torch.equal(a.samples[name], b.samples[name]) for name in a.samples)
        and torch.equal(a.keys, b.keys)
        for a, b in zip(first, second, strict=True)
    )


def test_image_mask_and_boxes_are_changed_together():
    images = image_set()
    for batch in taken(loader(images), 6):
        for image, mask, boxes, number in zip(*batch.samples.values(), strict=True):
            assert type(image) is Tensor and type(boxes) is Tensor and image.shape == (3, 16, 12)
            assert torch.equal(image[0], mask)
            left, top, right, bottom = boxes[0].tolist()
            whole = images.get(int(number))[0, 3:12, int(number) % 5 : int(number) % 5 + 6]
            if 0 < left and right < 12 and 0 < top and bottom < 16:  # else it was cut
                inside = image[0, int(top) : int(bottom), int(left) : int(right)]
                assert torch.equal(inside, whole) or torch.equal(inside.flip(-1), whole)


@pytest.mark.parametrize("workers", [0, 2])
def test_samples_depend_on_seed_and_step_alone(workers: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("mae.data.loading.annotated._PIECE", 3)  # of 4 samples: two pieces each
    whole = taken(loader(image_set()), 12)
    torch.manual_seed(77)  # what the caller draws has no part in it
    state = torch.get_rng_state()
    assert same(whole[5 * 2 :], taken(loader(image_set(), workers=workers), 2, start_step=5))
    assert torch.equal(state, torch.get_rng_state())
    assert not same(whole, taken(loader(image_set(), seed=6), 12))
    # Another epoch changes the same image in another way.
    found = [dict(zip(batch.samples["number"].tolist(), batch.samples["image"], strict=True)) for batch in whole]
    first, later = ({number: each[number] for each in part for number in each} for part in (found[:4], found[4:]))
    assert sum(not torch.equal(first[number], later[number]) for number in first.keys() & later.keys()) > 10


def test_ranks_share_a_batch_of_one_process():
    whole = taken(loader(image_set()), 6)
    parts = [taken(loader(image_set(), rank=rank, world=2), 6) for rank in range(2)]
    joined = [
        AnnotatedBatch(
            samples={name: torch.cat([one.samples[name], other.samples[name]]) for name in one.samples},
            keys=torch.cat([one.keys, other.keys]),
            shown=torch.cat([one.shown, other.shown]),
            unreadable=(),
        )
        for one, other in zip(*parts, strict=True)
    ]
    assert same(whole, joined)


def test_samples_of_different_shapes_are_listed():
    images = image_set()
    batch = taken(loader(images, stacked=False, transform=lambda sample: sample), 1)[0]
    assert isinstance(batch.samples["image"], list) and len(batch.samples["image"]) == 4
    for image, number in zip(batch.samples["image"], batch.shown.tolist(), strict=True):
        assert torch.equal(image, images.get(number))


def test_an_unreadable_image_is_replaced_with_its_annotation():
    images = image_set(broken=frozenset({1, 4, 7, 20}))
    for batch in taken(loader(images), 8):
        assert torch.equal(batch.samples["number"], batch.shown)
        assert torch.equal(batch.samples["image"][:, 0], batch.samples["mask"])
    assert len(images.unreadable) == 4


@pytest.mark.parametrize("workers", [0, 1])
def test_a_wrong_annotation_is_one_line(workers: int):
    def annotate(number: int) -> Mapping[str, Any]:
        raise MAEError(f"mask {np.sign(number + 1)} is wrong")

    with pytest.raises(MAEError, match="^mask 1 is wrong$"):
        taken(loader(image_set(), annotate=annotate, workers=workers), 1)


@pytest.mark.parametrize(("changes", "told"), [({"batch_size": 23}, "lower it"), ({"world": 3}, "multiple of 6")])
def test_batches_that_cannot_be_made_are_refused(changes: dict[str, Any], told: str):
    with pytest.raises(UsageError, match=told):
        loader(image_set(), **changes)
