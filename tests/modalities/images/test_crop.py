"""Random crops against torchvision's distribution, and the crops' pixels."""

import math
import random

import numpy as np
import pytest
import torch
from data.pictures import noise
from PIL import Image
from scipy.stats import chi2_contingency, ks_2samp
from timm.data import create_transform
from timm.data.auto_augment import rand_augment_transform
from torchvision.transforms import v2

from mae.errors import UsageError
from mae.modalities.images.crop import (
    Augmentation,
    central_crop,
    rand_augment,
    random_crop_boxes,
    resize,
    resized_crop,
)
from mae.randomness import Stream, sample_keys, uniform, view_keys

DRAWS = 3000
UNLIKE = ("Invert", "SolarizeAdd", "PosterizeIncreasing")  # of timm's; torchvision has the first two not, one weaker


def boxes_for(height: int, width: int, count: int = DRAWS, **bounds) -> tuple[torch.Tensor, torch.Tensor]:
    keys = sample_keys(1, 0, torch.arange(count))
    return random_crop_boxes(keys, torch.full((count,), height), torch.full((count,), width), Augmentation(**bounds))


def torchvision_boxes(height: int, width: int, **bounds) -> np.ndarray:
    torch.manual_seed(0)
    crop = v2.RandomResizedCrop(8, **{"scale": (0.2, 1.0), **bounds})
    image = torch.empty(1, height, width)
    found = [crop.make_params([image]) for _ in range(DRAWS)]
    return np.array([[box[side] for side in ("top", "left", "height", "width")] for box in found])


@pytest.mark.parametrize("size", [(224, 224), (375, 500), (500, 200), (40, 33)])
def test_boxes_are_distributed_as_torchvisions(size):
    ours, theirs = boxes_for(*size)[0].numpy(), torchvision_boxes(*size)
    for measure in (
        lambda box: box[:, 2] * box[:, 3],
        lambda box: box[:, 3] / box[:, 2],
        lambda box: box[:, 0],
        lambda box: box[:, 1],
        lambda box: box[:, 0] / np.maximum(size[0] - box[:, 2], 1),
        lambda box: box[:, 1] / np.maximum(size[1] - box[:, 3], 1),
    ):
        assert ks_2samp(measure(ours), measure(theirs)).pvalue > 1e-3


def test_positions_fill_the_spare_room_evenly():
    ours, theirs = boxes_for(12, 12)[0].numpy(), torchvision_boxes(12, 12)
    table = np.array([np.bincount(box[:, 0] * 12 + box[:, 1], minlength=144) for box in (ours, theirs)])
    table = table[:, table.min(axis=0) >= 5]
    assert chi2_contingency(table).pvalue > 1e-3


@pytest.mark.parametrize("size", [(1, 1), (1, 300), (300, 1), (2, 900), (900, 2), (5, 5)])
def test_boxes_lie_inside_any_image(size):
    boxes, _ = boxes_for(*size, count=200)
    top, left, height, width = boxes.unbind(1)
    assert (height >= 1).all() and (width >= 1).all() and (top >= 0).all() and (left >= 0).all()
    assert (top + height <= size[0]).all() and (left + width <= size[1]).all()


@pytest.mark.parametrize("size", [(20, 600), (600, 20)])
def test_images_no_box_fits_get_torchvisions_central_one(size):
    ours = boxes_for(*size, count=50)[0]
    theirs = torchvision_boxes(*size)[:1]
    assert (ours.numpy() == theirs).all()


def test_bounds_are_kept():
    boxes, _ = boxes_for(400, 400, scale=(0.5, 0.6), ratio=(1.0, 1.2))
    share, aspect = boxes[:, 2] * boxes[:, 3] / 400**2, boxes[:, 3] / boxes[:, 2]
    assert 0.495 < share.min() and share.max() < 0.605 and 0.99 < aspect.min() and aspect.max() < 1.21


def test_flips_are_fair_and_independent_of_the_box():
    boxes, flips = boxes_for(100, 100)
    assert abs(flips.float().mean().item() - 0.5) < 0.04
    assert ks_2samp(boxes[flips, 2].numpy(), boxes[~flips, 2].numpy()).pvalue > 1e-3


def test_a_box_depends_on_its_own_key_and_size_alone():
    keys = sample_keys(0, 0, torch.arange(6))
    heights, widths = torch.tensor([50, 60, 70, 80, 90, 100]), torch.tensor([90, 20, 70, 30, 50, 41])
    together, flips = random_crop_boxes(keys, heights, widths, Augmentation())
    for number in range(6):
        one = slice(number, number + 1)
        alone, flip = random_crop_boxes(keys[one], heights[one], widths[one], Augmentation())
        assert torch.equal(alone[0], together[number]) and flip[0] == flips[number]


def test_crop_is_pillows_within_a_level():
    pixels = noise(60, 80)
    smooth = np.array(Image.fromarray(pixels).resize((80, 60), Image.Resampling.BOX).resize((20, 15)).resize((80, 60)))
    found = resized_crop(torch.from_numpy(smooth).permute(2, 0, 1), (5, 7, 40, 50), False, (24, 32))
    expected = Image.fromarray(smooth).crop((7, 5, 57, 45)).resize((32, 24), Image.Resampling.BICUBIC)
    difference = np.abs(found.permute(1, 2, 0).numpy().astype(int) - np.array(expected).astype(int))
    assert found.dtype == torch.uint8 and difference.max() <= 1


def test_flip_mirrors_and_float_stays_float():
    image = torch.rand(13, 20, 30) * 1000
    straight, flipped = (resized_crop(image, (0, 0, 20, 20), flip, (8, 8)) for flip in (False, True))
    assert straight.dtype == torch.float32 and torch.equal(straight.flip(-1), flipped)
    assert not torch.equal(straight, flipped)


@pytest.mark.parametrize("size", [(375, 500), (500, 375), (256, 256), (100, 333), (30, 20)])
def test_central_crop_is_the_fields(size):
    image = torch.from_numpy(noise(*size)).permute(2, 0, 1)
    rule = v2.Compose([v2.Resize(256, interpolation=v2.InterpolationMode.BICUBIC, antialias=True), v2.CenterCrop(224)])
    assert torch.equal(central_crop(image, (224, 224)), rule(image))


def test_central_crop_keeps_what_fits_and_allows_other_shapes():
    image = torch.from_numpy(noise(32, 32)).permute(2, 0, 1)
    assert central_crop(image, (32, 32)) is image
    assert central_crop(image, (16, 64)).shape == (3, 16, 64)
    assert central_crop(image[:, :1, :1], (7, 9)).shape == (3, 7, 9)
    ramp = torch.arange(100, dtype=torch.float32).repeat(1, 200, 1)
    crop = central_crop(ramp, (50, 50))
    assert crop.mean().item() == pytest.approx(49.5, abs=1)
    assert crop.max().item() - crop.min().item() == pytest.approx(87.5, abs=3)


@pytest.mark.parametrize("size", [(32, 32), (375, 500), (500, 60), (1, 40)])
def test_a_single_draw_is_limited_to_the_image(size):
    """The official linear probe's crop, by a loop over its definition; tall and flat images meet the limits."""
    keys = sample_keys(1, 0, torch.arange(400))
    height, width = size
    how = Augmentation(scale=(0.08, 1.0), draws=1)
    boxes, flips = random_crop_boxes(keys, torch.full((400,), height), torch.full((400,), width), how)
    limited = 0
    for box, flip, numbers in zip(boxes.tolist(), flips.tolist(), uniform(keys, 5, Stream.CROP).tolist(), strict=True):
        area = height * width * (0.08 + 0.92 * numbers[0])
        aspect = math.exp(math.log(3 / 4) + numbers[1] * math.log(16 / 9))
        tall, wide = round(math.sqrt(area / aspect)), round(math.sqrt(area * aspect))
        limited += tall > height or wide > width
        tall, wide = min(max(tall, 1), height), min(max(wide, 1), width)
        top, left = int(numbers[2] * (height - tall + 1)), int(numbers[3] * (width - wide + 1))
        assert (box, flip) == ([top, left, tall, wide], numbers[4] < 0.5)
    assert limited


def test_impossible_augmentations_are_refused():
    for scale in ((0.0, 1.0), (0.5, 0.2), (0.5, 1.5)):
        with pytest.raises(UsageError, match="scale is .*0 < low <= high <= 1"):
            Augmentation(scale=scale)
    for ratio in ((0.0, 1.0), (2.0, 1.0)):
        with pytest.raises(UsageError, match="ratio is .*0 < low <= high"):
            Augmentation(ratio=ratio)
    with pytest.raises(UsageError, match="draws is 0; expected 1 or more"):
        Augmentation(draws=0)


@pytest.mark.parametrize("channels", [1, 3])
def test_rand_augment_depends_on_its_seed_alone(channels):
    image = torch.from_numpy(noise(16, 20, channels)).permute(2, 0, 1)
    before = torch.get_rng_state()
    changed = [rand_augment(image, seed) for seed in range(60)]
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(1)
    for seed in reversed(range(60)):
        assert torch.equal(rand_augment(image, seed), changed[seed])
    assert all(one.dtype == torch.uint8 and one.shape == image.shape for one in changed)
    assert len({one.numpy().tobytes() for one in changed}) > 25


def test_rand_augment_is_as_strong_as_timms():
    """The share of images left as they are, and the mean change, with the operations that both have."""
    smooth = np.array(Image.fromarray(noise(5, 5)).resize((24, 24), Image.Resampling.BICUBIC))
    image = torch.from_numpy(smooth).permute(2, 0, 1).contiguous()
    random.seed(0)
    settings = {"translate_const": int(24 * 0.45), "img_mean": (128, 128, 128), "interpolation": Image.BICUBIC}
    whole = rand_augment_transform("rand-m9-mstd0.5-inc1", settings)
    common = [operation for operation in whole.ops if operation.name not in UNLIKE]
    theirs, ours = [], []
    for seed in range(800):
        changed = random.choice(common)(random.choice(common)(Image.fromarray(smooth)))
        theirs.append(np.abs(np.array(changed).astype(float) - smooth).mean())
        ours.append((rand_augment(image, seed).float() - image.float()).abs().mean().item())
    kept = [np.mean(np.array(changes) == 0) for changes in (ours, theirs)]
    assert abs(kept[0] - kept[1]) < 0.08
    assert np.mean(ours) == pytest.approx(np.mean(theirs), rel=0.15)


@pytest.mark.parametrize(("share", "interpolation"), [(1.0, "bicubic"), (0.9, "bilinear"), (0.95, "bicubic")])
def test_central_crop_by_share_is_timms(share, interpolation):
    picture = Image.fromarray(noise(90, 120)).resize((60, 45), Image.Resampling.BOX).resize((120, 90))
    rule = create_transform(32, crop_pct=share, interpolation=interpolation, mean=(0, 0, 0), std=(1, 1, 1))
    image = torch.from_numpy(np.array(picture)).permute(2, 0, 1)
    found = central_crop(image, (32, 32), share, interpolation=interpolation)
    assert (found.float() - rule(picture) * 255).abs().max() < 1.5  # Pillow's rounding


def test_views_of_an_image_are_as_unlike_as_its_crops_of_two_epochs():
    """No crop of a view returns in a later epoch, and of two views one tells nothing of the other."""
    ids, sides = torch.arange(DRAWS), (torch.full((DRAWS,), 375), torch.full((DRAWS,), 500))
    keys = torch.cat([view_keys(sample_keys(1, epoch, ids), 4) for epoch in range(12)])
    assert len(keys.unique()) == len(keys)

    def drawn(keys: torch.Tensor) -> np.ndarray:
        boxes, flips = random_crop_boxes(keys, *sides, Augmentation())
        return np.column_stack([boxes.numpy(), flips.numpy()]).astype(float)

    views = [drawn(of.contiguous()) for of in view_keys(sample_keys(1, 0, ids), 3).view(-1, 3).T]
    plain = drawn(sample_keys(1, 50, ids))
    for first, second in ((0, 1), (0, 2), (1, 2)):
        correlation = np.corrcoef(views[first].T, views[second].T)[:5, 5:]
        assert np.abs(correlation).max() < 5 / DRAWS**0.5
        assert min(ks_2samp(views[second][:, side], plain[:, side]).pvalue for side in range(5)) > 1e-3


@pytest.mark.parametrize("interpolation", ["bicubic", "bilinear"])
@pytest.mark.parametrize("how", ["bytes as they lie in memory", "bytes by channel", "floats", "13 channels"])
def test_resizing_gives_what_torchvision_gives(how, interpolation):
    pixels = torch.randint(0, 256, (48, 65, 13 if how == "13 channels" else 3), dtype=torch.uint8).permute(2, 0, 1)
    image = {"floats": pixels.float() / 255, "bytes by channel": pixels.contiguous()}.get(how, pixels)
    for size in [(17, 30), (96, 65), (48, 65)]:
        wanted = v2.functional.resize(image, list(size), v2.InterpolationMode(interpolation), antialias=True)
        assert torch.equal(resize(image, size, interpolation=interpolation), wanted)
