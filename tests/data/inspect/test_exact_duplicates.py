"""The same image found again under other names, and only the same."""

import numpy as np
import pytest
import torch
from data.pictures import Pictures, archive, noise
from PIL import Image

from mae.data.dataset.images import load_images
from mae.data.inspect.exact_duplicates import contents_of, same_content
from mae.data.sources.open import open_source


@pytest.mark.parametrize("limit", [None, 0])
def test_images_are_known_by_their_pixels(tree, tmp_path, limit):
    pixels = [noise(8, 9, 3, seed) for seed in range(4)]
    root = tree({"x.png": b"", "y.bmp": b"", "z.png": b""})
    for name, image in zip(("x.png", "y.bmp", "z.png"), (pixels[2], pixels[0], pixels[0]), strict=True):
        Image.fromarray(image).save(root / name)
    files = load_images(open_source(str(root), data_root=root), in_chans=None, memory_limit=limit)
    packed = archive(tmp_path / "x.zip", {"a/b.png": (root / "x.png").read_bytes()})
    zipped = load_images(open_source(str(packed), data_root=root), in_chans=None, memory_limit=limit)
    arrays = load_images(Pictures(pixels), in_chans=None, memory_limit=limit)
    found, numbers = zip(*(contents_of(images, images.readable)[:2] for images in (arrays, files, zipped)), strict=True)
    assert [part.tolist() for part in numbers] == [[0, 1, 2, 3], [0, 1, 2], [0]]
    assert found[0].dtype == torch.int64 and len(found[0].unique()) == 4
    assert same_content(found[0], found[1]) == [(2, 0), (0, 1), (0, 2)]
    assert same_content(found[1], found[0]) == [(1, 0), (0, 2)]  # image 0 once, though it is there twice
    assert same_content(found[0], found[2]) == [(2, 0)]
    some, of, *_ = contents_of(arrays, torch.tensor([3, 1]))
    assert torch.equal(some, found[0][[3, 1]]) and of.tolist() == [3, 1]
    for part in contents_of(arrays, torch.tensor([], dtype=torch.int64))[:2]:
        assert part.shape == (0,) and part.dtype == torch.int64


def test_one_value_the_shape_and_the_type_matter():
    image = noise(6, 8, 1)
    other = image.copy()
    other[5, 7, 0] ^= 1
    pictures = Pictures([image, other, image.reshape(8, 6, 1), np.rot90(image).copy(), image.copy()])
    images = load_images(pictures, in_chans=None)
    digests, *_ = contents_of(images, images.readable)
    assert digests[0] == digests[4] and len(digests.unique()) == 4
    wide = load_images(Pictures([image.astype(np.float32)]), in_chans=None)
    assert contents_of(wide, wide.readable)[0][0] != digests[0]


@pytest.mark.parametrize("limit", [None, 0])
def test_unreadable_images_are_left_out_and_told(limit, monkeypatch):
    monkeypatch.setattr("mae.data.dataset.survey._SURVEYED", 1)
    pixels = [noise(4, 4, 3, seed) for seed in range(7)]
    images = load_images(
        Pictures(pixels, broken=frozenset({1, 4})), in_chans=None, max_unreadable=0.3, memory_limit=limit
    )
    whole = load_images(Pictures(pixels), in_chans=None)
    expected, *_ = contents_of(whole, whole.readable)
    digests, numbers, _, unreadable = contents_of(images, torch.tensor([6, 4, 0, 1, 2, 3, 5]))
    assert numbers.tolist() == [6, 0, 2, 3, 5] and torch.equal(digests, expected[numbers])
    assert unreadable == ["picture-4 is broken for this test", "picture-1 is broken for this test"]
