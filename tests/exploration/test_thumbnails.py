"""Small pictures: whole, square, and none bleeding into its neighbour."""

from base64 import b64decode
from io import BytesIO

import numpy as np
import pytest
import torch
from PIL import Image

from mae.data.dataset.images import load_images
from mae.data.sources.memory import whole_array
from mae.exploration import thumbnails
from mae.exploration.thumbnails import Thumbnails, make_thumbnails
from mae.models.preprocess import Preprocessing


def made(images: np.ndarray, size: tuple[int, int]) -> Thumbnails:
    opened = load_images(whole_array(images, name="drawn", note=""), in_chans=3)
    return make_thumbnails(opened, Preprocessing(img_size=size, in_chans=3, mean=(0.5,) * 3, std=(0.25,) * 3))


def test_tiny_pictures_keep_their_hard_pixels():
    images = np.random.default_rng(0).integers(0, 256, (3, 8, 8, 3), dtype=np.uint8)
    pictures = made(images, (8, 8)).pictures.numpy()
    assert pictures.shape == (3, 48, 48, 3)
    assert np.abs(pictures.astype(int) - images.repeat(6, axis=1).repeat(6, axis=2)).max() <= 1


def test_large_ones_are_averaged_and_narrow_ones_stand_on_grey():
    images = np.zeros((2, 64, 128, 3), dtype=np.uint8)
    images[:, ::2] = 200  # lines, which are grey from afar
    pictures = made(images, (64, 128)).pictures.numpy()
    inside, beside = pictures[:, 14:34], pictures[:, [0, 1, -2, -1]]
    assert np.abs(inside.astype(int) - 100).max() < 40 and abs(inside.mean() - 100) < 3
    assert len(np.unique(beside)) == 1 and beside.max() > 200


def test_no_thumbnail_bleeds_into_its_neighbour():
    pictures = torch.zeros(9, 48, 48, 3, dtype=torch.uint8)
    pictures[::2] = torch.tensor([255, 0, 0], dtype=torch.uint8)
    pictures[1::2] = torch.tensor([0, 0, 255], dtype=torch.uint8)
    atlas = Thumbnails(pictures=pictures).atlas()
    shown = np.asarray(Image.open(BytesIO(b64decode(atlas.partition(",")[2]))))
    assert shown.shape == (144, 144, 3)
    for number in range(9):
        row, column = divmod(number, 3)
        cell = shown[48 * row : 48 * (row + 1), 48 * column : 48 * (column + 1)].astype(int)
        assert np.abs(cell - pictures[number].numpy()).max() <= 4


def test_many_are_smaller(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(thumbnails, "_SIDES", ((2, 48), (10, 32)))
    assert made(np.zeros((3, 8, 8, 3), dtype=np.uint8) + 90, (8, 8)).side == 32
