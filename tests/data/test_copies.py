"""Outlines, groups and the estimate of how much of a set is copied."""

import io

import numpy as np
import pytest
import torch
from pictures import SHARED
from PIL import Image
from scipy.fft import dctn
from torchvision.transforms.v2 import InterpolationMode
from torchvision.transforms.v2.functional import resize

from mae.data.copies import NEAR_BITS, SURE_PAIRS, Copies, copies, near, outline, same
from mae.data.decoding import decode


def field(seed: int, height: int = 48, width: int = 64, channels: int = 3) -> torch.Tensor:
    """A smooth random picture, uint8."""
    coarse = torch.randint(0, 256, (channels, 16, 16), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    return resize(coarse, [height, width], interpolation=InterpolationMode.BICUBIC)


def distance(first: int, second: int) -> int:
    return (first ^ second).bit_count()


def test_outline_is_the_signs_of_the_slowest_cosines():
    image = torch.randn(3, 32, 32, generator=torch.Generator().manual_seed(0)) * 7 + 100
    waves = dctn(image.double().mean(dim=0).numpy(), type=2)[:8, :8].ravel()[1:]
    assert f"{outline(image):064b}" == "".join(str(int(wave > 0)) for wave in waves) + "0"


@pytest.mark.parametrize("channels", [1, 3, 13])
def test_outline_stays_with_size_brightness_and_contrast(channels):
    image = field(3, channels=channels)
    smaller = resize(image, [37, 51], antialias=True)
    darker = (image * 0.6 + 20).round().to(torch.uint8)
    for changed in (smaller, darker, image.float() / 255):
        assert distance(outline(image), outline(changed)) <= 2


def test_outlines_of_different_pictures_differ_in_half_their_bits():
    codes = [outline(field(seed)) for seed in range(100)]
    found = [distance(codes[i], codes[j]) for i in range(100) for j in range(i)]
    assert 30 < np.mean(found) < 33 and min(found) > 2 * NEAR_BITS


def test_near_groups_join_what_is_within_the_bound():
    far = (1 << 40) - 1
    codes = [0, far, (1 << NEAR_BITS) - 1, 1 << 63, far ^ ((1 << NEAR_BITS + 1) - 1), (1 << 2 * NEAR_BITS) - 1]
    pairs, groups = near(np.array(codes, dtype=np.uint64))
    # Numbers 0 and 5 are too far apart, and belong together through number 2.
    assert pairs == 3 and groups == [[0, 2, 3, 5], [1], [4]]
    between = [0, (1 << 2 * NEAR_BITS) - 1, (1 << NEAR_BITS) - 1]
    assert near(np.array(between, dtype=np.uint64)) == (2, [[0, 1, 2]])


def test_near_pairs_are_those_of_all_distances():
    codes = np.random.default_rng(0).integers(0, 1 << 9, 60).astype(np.uint64)
    wanted = sum(distance(int(codes[i]), int(codes[j])) <= NEAR_BITS for i in range(60) for j in range(i))
    assert near(codes)[0] == wanted > 100
    assert near(np.array([], dtype=np.uint64)) == (0, [])


def test_same_codes_in_order_of_their_first():
    assert same([5, 7, 5, 9, 7, 5]) == [[0, 2, 5], [1, 4], [3]]


def told(groups: list[list[int]], *, pairs: int, looked_at: int, total: int) -> Copies:
    return copies(groups, pairs=pairs, looked_at=looked_at, total=total, name=str)


def test_copies_of_a_whole_set_are_counted():
    found = told([[0, 2, 5], [1, 4], [3], [6, 7], [8, 9]], pairs=6, looked_at=10, total=10)
    assert (found.pairs, found.extra, found.share) == (6, 5, 0.5)
    assert found.groups == (("0", "2", "5"), ("1", "4"), ("6", "7"))
    assert told([], pairs=0, looked_at=0, total=4).share == 0


def test_share_of_a_sample_is_that_of_the_set():
    """A set in which every second image is a copy: half of it could be left out, few copies meet in a sample."""
    rng, shares = np.random.default_rng(0), []
    for _ in range(200):
        groups = same((rng.permutation(1000)[:100] // 2).tolist())
        pairs = sum(len(group) == 2 for group in groups)
        shares.append((pairs, told(groups, pairs=pairs, looked_at=100, total=1000).share))
    assert np.mean([pairs for pairs, _ in shares]) / 100 < 0.06
    assert np.mean([share for pairs, share in shares if pairs >= SURE_PAIRS]) == pytest.approx(0.5, abs=0.06)
    assert all(share == pairs / 100 for pairs, share in shares if pairs < SURE_PAIRS)


@pytest.mark.skipif(not (SHARED / "photos").exists(), reason="needs shared/data/photos")
def test_photographs_are_far_from_each_other_and_near_to_themselves_saved_anew():
    files = sorted((SHARED / "photos").iterdir())
    images = [torch.from_numpy(decode(file.read_bytes(), name=file.name)).permute(2, 0, 1) for file in files[:60]]
    codes = [outline(image) for image in images]
    assert min(distance(codes[i], codes[j]) for i in range(60) for j in range(i)) > 2 * NEAR_BITS
    moved = []
    for file, code in zip(files[:30], codes, strict=False):
        with Image.open(file) as image:
            buffer = io.BytesIO()
            image.convert("RGB").reduce(2).save(buffer, "JPEG", quality=75)
        again = torch.from_numpy(decode(buffer.getvalue(), name="again")).permute(2, 0, 1)
        moved.append(distance(code, outline(again)))
    assert np.mean(np.array(moved) <= NEAR_BITS) > 0.95
