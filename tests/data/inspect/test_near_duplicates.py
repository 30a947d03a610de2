"""Outlines, groups and the estimate of how much of a set is copied."""

import io

import numpy as np
import pytest
import torch
from data.pictures import SHARED
from PIL import Image
from scipy.fft import dctn
from sklearn.datasets import load_digits
from torchvision.transforms.v2 import InterpolationMode
from torchvision.transforms.v2.functional import resize

from mae.data.decode.image import decode
from mae.data.inspect.near_duplicates import NEAR, SURE_PAIRS, WAVES, Copies, copies, near, near_copies, outline, same


def field(seed: int, height: int = 48, width: int = 64, channels: int = 3) -> torch.Tensor:
    """A smooth random picture, uint8."""
    coarse = torch.randint(0, 256, (channels, 16, 16), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    return resize(coarse, [height, width], interpolation=InterpolationMode.BICUBIC)


def cosine(first: np.ndarray, second: np.ndarray) -> float:
    first, second = first.astype(np.float64), second.astype(np.float64)
    return float(first @ second / np.linalg.norm(first) / np.linalg.norm(second))


def saved(image: torch.Tensor, quality: int, reduced: int = 1) -> torch.Tensor:
    """The image after a JPEG file."""
    buffer = io.BytesIO()
    Image.fromarray(image.permute(1, 2, 0).numpy()).reduce(reduced).save(buffer, "JPEG", quality=quality)
    return torch.from_numpy(decode(buffer.getvalue(), name="again")).permute(2, 0, 1)


def test_outline_is_the_slowest_cosines():
    image = torch.randn(3, 32, 32, generator=torch.Generator().manual_seed(0)) * 7 + 100
    luma = 0.299 * image[0] + 0.587 * image[1] + 0.114 * image[2]
    np.testing.assert_allclose(outline(image), outline(luma[None]), atol=1e-5)
    np.testing.assert_allclose(outline(image[:2]), outline(image[:2].mean(dim=0, keepdim=True)), atol=1e-5)
    waves = dctn(luma.double().numpy(), type=2, norm="ortho")[:8, :8].ravel()[1:]
    np.testing.assert_allclose(outline(luma[None]), waves / 32, atol=1e-5)


@pytest.mark.parametrize("size", [(8, 8), (31, 65), (224, 300), (1, 10000)])
def test_other_sizes_are_averaged_as_torchvision_resizes(size):
    image = torch.rand(3, *size, generator=torch.Generator().manual_seed(1))
    small = resize(image, [32, 32], interpolation=InterpolationMode.BILINEAR, antialias=True)
    np.testing.assert_allclose(outline(image), outline(small), atol=1e-6)


@pytest.mark.parametrize("channels", [1, 3, 13])
def test_outline_stays_with_size_brightness_and_contrast(channels):
    image = field(3, channels=channels)
    smaller = resize(image, [37, 51], antialias=True)
    darker = (image * 0.6 + 20).round().to(torch.uint8)
    for changed in (smaller, darker, image.float() / 255, image.float() * 1e36):
        assert cosine(outline(image), outline(changed)) > 0.999


def test_outlines_of_different_pictures_have_nothing_in_common():
    outlines = [outline(field(seed)) for seed in range(100)]
    found = [cosine(outlines[i], outlines[j]) for i in range(100) for j in range(i)]
    assert abs(np.mean(found)) < 0.01 and max(found) < 0.8


def test_what_is_constant_or_not_measured_has_no_outline():
    gaps = field(2).float()
    gaps[:, 3:5, 7:20] = torch.nan
    assert cosine(outline(gaps), outline(field(2))) > 0.99
    for plain in (
        torch.full((3, 7, 9), 77, dtype=torch.uint8),
        torch.full((1, 5, 5), 3e38),
        torch.full((2, 4, 4), torch.nan),
    ):
        assert not outline(plain).any()


def test_near_copies_are_found_among_all(monkeypatch):
    """Each chunk a few rows, so that the nearest may lie in any."""
    monkeypatch.setattr("mae.data.inspect.near_duplicates._CHUNK", 7)
    rng = np.random.default_rng(0)
    bank = rng.normal(size=(40, WAVES)).astype(np.float32)
    bank[30] = bank[3] + 0.05 * bank[4]  # the nearer of two near ones counts
    asked = rng.normal(size=(20, WAVES)).astype(np.float32)
    copied = {0: 39, 5: 3, 13: 0, 19: 17}
    for row, of in copied.items():
        asked[row] = 3 * bank[of] + 0.05 * rng.normal(size=WAVES)
    expected = [copied.get(row, -1) for row in range(20)]
    assert near_copies(bank, asked).tolist() == expected
    assert near_copies(bank, np.concatenate([asked, bank[[30]]])).tolist() == [*expected, 30]
    empty = bank[:0]
    assert near_copies(bank, empty).shape == (0,) and near_copies(empty, asked).tolist() == [-1] * 20


def test_plain_images_are_copies_of_none():
    images = np.stack([outline(field(seed)) for seed in range(9)])
    dark = images[:3] * 1e-3  # the faint glow that every dark frame of a camera has
    black = np.zeros_like(dark)
    assert near_copies(np.concatenate([images, dark, black]), np.concatenate([dark, black])).tolist() == [-1] * 6
    assert near_copies(images, images * 0.1).tolist() == list(range(9))  # faded ones are
    assert near_copies(black, black).tolist() == [-1] * 3


def test_near_groups_join_what_is_within_the_bound():
    x, y, z = np.eye(WAVES, dtype=np.float32)[:3]
    a, b, c = x, x + 0.07 * y, x + 0.14 * y  # a and c belong together through b
    assert cosine(a, b) > NEAR > cosine(a, c)
    assert near(np.stack([a, z, b, c, -z])) == (2, [[0, 2, 3], [1], [4]])
    assert near(np.stack([a, c, b])) == (2, [[0, 1, 2]])


def test_near_pairs_are_those_of_all_cosines():
    rng = np.random.default_rng(0)
    outlines = (1 + 0.05 * rng.uniform(size=(60, 1)) * rng.normal(size=(60, WAVES))).astype(np.float32)
    wanted = sum(cosine(outlines[i], outlines[j]) > NEAR for i in range(60) for j in range(i))
    assert near(outlines)[0] == wanted > 100
    assert near(np.zeros((0, WAVES), dtype=np.float32)) == (0, [])


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


def test_handwritten_digits_that_look_alike_are_no_copies_and_their_jpegs_are():
    """8 x 8 pixels of the same ten shapes: the hardest images to tell apart that there are."""
    pixels = np.uint8(load_digits().images / 16 * 255)
    outlines = np.stack([outline(torch.from_numpy(image)[None]) for image in pixels])
    assert (near_copies(outlines[:1437], outlines[1437:]) == -1).all()
    assert near(outlines)[0] == 0
    again = [outline(saved(torch.from_numpy(image).expand(3, -1, -1), 97)) for image in pixels[:200]]
    assert near_copies(outlines, np.stack(again)).tolist() == list(range(200))


@pytest.mark.skipif(not (SHARED / "photos").exists(), reason="needs shared/data/photos")
def test_photographs_are_far_from_each_other_and_near_to_themselves_saved_anew():
    files = sorted((SHARED / "photos").iterdir())[:60]
    images = [torch.from_numpy(decode(file.read_bytes(), name=file.name)).permute(2, 0, 1) for file in files]
    outlines = np.stack([outline(image) for image in images])
    assert near(outlines)[0] == 0 and (near_copies(outlines[:30], outlines[30:]) == -1).all()
    again = np.stack([outline(saved(image, quality=75, reduced=2)) for image in images[:30]])
    assert near_copies(outlines, again).tolist() == list(range(30))
