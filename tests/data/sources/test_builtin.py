"""The built-in sources: sizes, balance, and that training and test part share nothing."""

from pathlib import Path

import numpy as np
import pytest
from data.pictures import loaded

from mae.data.sources import builtin
from mae.data.sources.open import open_labelled, open_source
from mae.errors import MAEError

ROOT = Path("/nowhere")


def test_photos_are_balanced_square_and_in_colour():
    data = open_labelled("builtin:photos", data_root=ROOT)
    assert len(data.class_names) == 8 and "astronaut" in data.class_names
    assert data.train.labels.bincount().tolist() == [256] * 8
    assert data.test.labels.bincount().tolist() == [48] * 8
    pretraining = open_source("builtin:photos", data_root=ROOT)
    assert len(pretraining) == 8 * 256 and pretraining.item_name(256) == "builtin:photos/camera[0]"
    sides = (builtin.LABELLED_SIDE, builtin.LABELLED_SIDE, builtin.TRAINING_SIDE)
    for source, side in zip((data.train.source, data.test.source, pretraining), sides, strict=True):
        for index in range(0, len(source), 7):
            image = loaded(source, index)
            assert image.shape == (side, side, 3) and image.dtype == np.uint8
            assert image.std() > 1, f"{source.item_name(index)} is nearly blank"


def test_photos_training_and_test_pixels_are_disjoint(monkeypatch: pytest.MonkeyPatch):
    """Each pixel of a marked photograph names its place; no place may be in both parts, and none is lost."""
    height, width = 300, 451
    places = np.arange(height * width).reshape(height, width)
    marked = np.stack([places // 65536, places // 256 % 256, places % 256], axis=2).astype(np.uint8)
    monkeypatch.setattr(builtin, "_photo", lambda file: np.ascontiguousarray(marked))
    monkeypatch.setattr(builtin, "_PHOTOS", {"a/beside.png": 1, "a/below.png": 0})
    monkeypatch.setattr(builtin, "LABELLED_SIDE", 90)
    monkeypatch.setattr(builtin, "TRAINING_SIDE", 180)
    train, test = builtin.labelled_photo_tiles()
    for photo in (0, 1):
        trained_on, voting, judged = (_pixels(source, photo) for source in (builtin.photo_tiles(), train, test))
        assert np.array_equal(trained_on, voting)
        assert not (voting & judged).any()
        assert np.flatnonzero(voting | judged).tolist() == list(range(height * width))


def test_a_photograph_smaller_than_its_squares_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(builtin, "LABELLED_SIDE", 160)
    with pytest.raises(MAEError, match="builtin:photos test: the part of coins is 154 x .* at least 160 x 160"):
        open_labelled("builtin:photos", data_root=ROOT)


def _pixels(source: builtin.TileSource, photo: int) -> np.ndarray:
    """Whether a photograph's squares show a place, by its number."""
    cells = source.grid[0] * source.grid[1]
    tiles = [loaded(source, photo * cells + cell).astype(np.int64) for cell in range(cells)]
    assert {tile.shape for tile in tiles} == {(source.side, source.side, 3)}
    shown = np.zeros(2**18, dtype=bool)
    for tile in tiles:
        shown[tile @ np.array([65536, 256, 1])] = True
    return shown


def test_a_missing_photograph_is_explained(monkeypatch):
    monkeypatch.setattr(builtin, "_PHOTOS", {"skimage/data/unicorn.png": 1})
    with pytest.raises(MAEError, match="needs .*unicorn.png, which this version of skimage does not include"):
        open_source("builtin:photos", data_root=ROOT)
    monkeypatch.setattr(builtin, "_PHOTOS", {"no_such_package/a.png": 1})
    with pytest.raises(MAEError, match="needs the package no_such_package"):
        open_source("builtin:photos", data_root=ROOT)


@pytest.mark.digits
def test_digits_keep_their_test_part_unseen():
    data = open_labelled("builtin:digits", data_root=ROOT)
    source = open_source("builtin:digits", data_root=ROOT)
    assert len(source) == len(data.train.source) == 1438 and len(data.test.source) == 359
    train = {data.train.source.item_name(index) for index in range(1438)}
    test = {data.test.source.item_name(index) for index in range(359)}
    assert not train & test and len(train | test) == 1797
    share = data.test.labels.bincount() / (data.test.labels.bincount() + data.train.labels.bincount())
    assert share.min() > 0.18 and share.max() < 0.22
    assert loaded(source, 0).shape == (8, 8, 1)
    assert max(int(loaded(source, index).max()) for index in range(50)) == 255
