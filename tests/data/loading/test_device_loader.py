"""CropDataset made on the device are those of the loader, to rounding."""

import contextlib
import itertools

import numpy as np
import pytest
import torch
from data.pictures import Pictures, noise

from mae.data.dataset.images import ImageSet, load_images
from mae.data.loading.device_loader import DeviceLoader, batched_crops, resizing
from mae.data.loading.loader import RawBatch, TrainingLoader
from mae.errors import MAEError, UsageError
from mae.modalities.images.crop import Augmentation, random_crop_boxes, resized_crop

CPU = torch.device("cpu")


def image_set(count: int = 22, *, broken: frozenset[int] = frozenset(), sizes: tuple[int, ...] = (20,)) -> ImageSet:
    """Broken images are met while the set is read into memory."""
    source = Pictures([noise(sizes[number % len(sizes)], 24, 3, number) for number in range(count)])
    source.broken = broken
    return load_images(source, in_chans=None, memory_limit=None, max_unreadable=0.5)


def loader(images: ImageSet, **changes) -> TrainingLoader:
    return TrainingLoader(
        **(dict(images=images, batch_size=8, accumulate=2, img_size=(16, 12), seed=5, workers=0) | changes)
    )


def taken(source: TrainingLoader | DeviceLoader, count: int, start_step: int = 0) -> list[RawBatch]:
    with contextlib.closing(source.iterate(start_step)) as batches:
        return list(itertools.islice(batches, count))


def boxes_of(count: int, height: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    keys = torch.randint(-(2**62), 2**62, (count,), generator=torch.Generator().manual_seed(height))
    return random_crop_boxes(keys, torch.full_like(keys, height), torch.full_like(keys, width), Augmentation())


@pytest.mark.parametrize("kind", [torch.uint8, torch.float32])
@pytest.mark.parametrize(
    ("height", "width", "size"),
    [(32, 32, (32, 32)), (48, 40, (16, 20)), (20, 24, (32, 32)), (9, 70, (24, 8)), (1, 1, (4, 4))],
)
def test_crops_of_a_batch_are_those_of_its_images(height, width, size, kind):
    images = torch.randint(0, 256, (64, 3, height, width), generator=torch.Generator().manual_seed(1)).to(kind)
    boxes, flips = boxes_of(64, height, width)
    assert flips.any() and not flips.all()
    found = batched_crops(images, boxes, flips, size)
    expected = torch.stack(
        [resized_crop(*each, size) for each in zip(images, map(tuple, boxes.tolist()), flips.tolist(), strict=True)]
    )
    assert found.dtype == kind and found.shape == expected.shape
    error = (found.double() - expected.double()).abs()
    if kind == torch.uint8:
        assert error.max() <= 2 and error.mean() <= 0.01
    else:
        assert error.max() <= 255 * 1e-5


def test_weights_of_a_stretch_sum_to_1_and_stay_inside_it():
    starts, lengths = torch.tensor([0, 3, 5]), torch.tensor([8, 5, 1])
    weights = resizing(starts, lengths, 8, 4)
    assert torch.allclose(weights.sum(dim=-1), torch.ones(3, 4))
    assert not weights[1, :, :3].any() and torch.equal(weights[2].nonzero()[:, 1], torch.full((4,), 5))


@pytest.mark.parametrize("broken", [frozenset(), frozenset({3, 7, 11})])
@pytest.mark.parametrize("changes", [{}, {"accumulate": 1}, {"views": 2}, {"rank": 1, "world": 2}])
@pytest.mark.parametrize("start_step", [0, 3])
def test_batches_are_those_of_the_loader(broken, changes, start_step):
    plain = loader(image_set(broken=broken), **changes)
    resident = DeviceLoader(loader=loader(image_set(broken=broken), **changes), device=CPU)
    for expected, batch in zip(taken(plain, 9, start_step), taken(resident, 9, start_step), strict=True):
        for field in ("keys", "ids", "shown"):
            assert torch.equal(getattr(batch, field), getattr(expected, field))
        assert batch.unreadable == expected.unreadable
        assert (batch.images.int() - expected.images.int()).abs().max() <= 2
    assert resident.loader.images.unreadable == plain.images.unreadable


def test_values_of_16_bit_images_are_scaled_as_they_are_elsewhere():
    pictures = [(noise(20, 24, 1, number).astype(np.uint16) << 8) for number in range(9)]
    images = load_images(Pictures(pictures), in_chans=None)
    plain = loader(images)
    for expected, batch in zip(taken(plain, 2), taken(DeviceLoader(loader=plain, device=CPU), 2), strict=True):
        assert batch.images.dtype == torch.float32 and torch.allclose(batch.images, expected.images, atol=1e-5)


def test_what_cannot_lie_in_one_tensor_is_refused(tmp_path):
    with pytest.raises(
        UsageError, match="--cache-on-device needs images of one size .* pictures are 24x20 to 24x22 pixels"
    ):
        DeviceLoader(loader=loader(image_set(sizes=(20, 21, 22))), device=CPU)
    aside = load_images(Pictures([noise(20, 24, 3, number) for number in range(22)]), in_chans=None, memory_limit=0)
    with pytest.raises(UsageError, match="are too many to be kept decoded"):
        DeviceLoader(loader=loader(aside), device=CPU)
    augmented = loader(image_set(), augmentation=Augmentation(rand_augment=True))
    with pytest.raises(UsageError, match="are to be changed by RandAugment"):
        DeviceLoader(loader=augmented, device=CPU)
    coloured = loader(image_set(), augmentation=Augmentation(color_jitter=1))
    with pytest.raises(UsageError, match="are to change colours .--color-jitter, --grayscale., which the loader does"):
        DeviceLoader(loader=coloured, device=CPU)
    with pytest.raises(UsageError, match="--cache-on-device needs 64-bit floats, which MPS does not support"):
        DeviceLoader(loader=loader(image_set()), device=torch.device("mps"))


def test_an_image_of_another_size_than_those_looked_at_is_named():
    images = image_set(400)
    images._decoded.shapes[399] = (10, 48, 3)  # as large, and beyond those whose headers are read first
    with pytest.raises(UsageError, match=r"--cache-on-device needs images of one size; .*399.* has \(3, 10, 48\)"):
        taken(DeviceLoader(loader=loader(images), device=CPU), 1)


def test_where_no_replacement_can_be_read_the_run_stops():
    images = image_set(40, broken=frozenset(range(1, 20)))
    alone = loader(images, numbers=torch.arange(1, 20), batch_size=2, accumulate=1)
    with pytest.raises(MAEError, match="17 images in a row cannot be used"):
        taken(DeviceLoader(loader=alone, device=CPU), 1)
