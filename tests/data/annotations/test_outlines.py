"""Masks drawn from polygons and run lengths, beside pycocotools."""

import numpy as np
import pytest
from matplotlib.path import Path as MplPath
from pycocotools import mask as oracle

from mae.data.annotations.coco import _uncompressed
from mae.data.annotations.objects import Objects, RunLengths, objects_of
from mae.errors import MAEError

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # pycocotools'

HEIGHT, WIDTH = 37, 53


def outlined(*outlines) -> Objects:
    return objects_of([[0, 0, 1, 1]] * len(outlines), [0] * len(outlines), [False] * len(outlines), outlines)


def star(draw: np.random.Generator) -> np.ndarray:
    """A polygon of random corners around a random middle, some of them beyond the image."""
    angles = np.sort(draw.uniform(0, 2 * np.pi, draw.integers(3, 12)))
    radius = draw.uniform(4, 30, len(angles))
    corners = np.stack([np.cos(angles), np.sin(angles)], axis=1) * radius[:, None]
    return (corners + draw.uniform([0, 0], [WIDTH, HEIGHT])).astype(np.float32)


def test_polygons_hold_the_middles_of_pixels():
    draw = np.random.default_rng(0)
    middles = np.stack(np.meshgrid(np.arange(WIDTH) + 0.5, np.arange(HEIGHT) + 0.5), axis=-1).reshape(-1, 2)
    for _ in range(50):
        part = star(draw)
        expected = MplPath(part).contains_points(middles).reshape(HEIGHT, WIDTH)
        assert (outlined((part,)).masks(HEIGHT, WIDTH)[0] == expected).all()


def test_polygons_are_those_of_pycocotools_but_for_pixels_at_edges():
    draw = np.random.default_rng(0)
    for _ in range(50):
        part = star(draw)
        ours = outlined((part,)).masks(HEIGHT, WIDTH)[0]
        theirs = oracle.decode(oracle.frPyObjects([part.ravel().tolist()], HEIGHT, WIDTH))[:, :, 0] > 0
        padded = np.pad(theirs, 2, mode="edge")
        near = [padded[y : y + HEIGHT, x : x + WIDTH] for y in range(5) for x in range(5)]
        assert not (ours & ~np.any(near, axis=0)).any() and not (np.all(near, axis=0) & ~ours).any()
        assert abs(int(ours.sum()) - int(theirs.sum())) <= 0.1 * theirs.sum() + 8


def test_whole_pixels_are_exact():
    square = np.array([[3, 2], [8, 2], [8, 6], [3, 6]], dtype=np.float32)
    hole_less = np.array([[20, 20], [22, 20], [22, 21], [20, 21]], dtype=np.float32)
    mask = outlined((square, hole_less)).masks(HEIGHT, WIDTH)[0]
    expected = np.zeros((HEIGHT, WIDTH), dtype=bool)
    expected[2:6, 3:8] = expected[20, 20:22] = True
    assert (mask == expected).all()


def test_run_lengths_are_those_of_pycocotools():
    draw = np.random.default_rng(1)
    for share in (0.0, 0.02, 0.5, 0.9, 1.0):
        mask = draw.random((HEIGHT, WIDTH)) < share
        packed = oracle.encode(np.asfortranarray(mask.astype(np.uint8)))
        counts = np.array(_uncompressed(packed["counts"].decode()))
        runs = RunLengths(height=HEIGHT, width=WIDTH, counts=counts)
        assert (outlined(runs).masks(HEIGHT, WIDTH)[0] == mask).all()
    large = np.zeros((3000, 3000), dtype=np.uint8)
    large[1:2999, 5:2000] = 1
    packed = oracle.encode(np.asfortranarray(large))["counts"].decode()
    assert (RunLengths(height=3000, width=3000, counts=np.array(_uncompressed(packed))).drawn() == large).all()


@pytest.mark.parametrize("counts", [[3, 2], [7, -1], [1 << 40, 6 - (1 << 40)], []])
def test_runs_that_do_not_cover_the_mask_are_refused(counts: list[int]):
    with pytest.raises(MAEError, match="expected 6"):
        RunLengths(height=2, width=3, counts=np.array(counts, dtype=np.int64))


@pytest.mark.parametrize("text", ["\n", "é", "P" * 40, "P"])
def test_text_that_is_no_run_lengths_is_refused(text: str):
    with pytest.raises(ValueError, match="mask's counts"):
        _uncompressed(text)


def test_masks_are_of_the_image_and_bounded():
    runs = RunLengths(height=2, width=3, counts=np.array([6]))
    with pytest.raises(MAEError, match="a mask has 2 x 3 pixels, its image 3 x 2"):
        outlined(runs).masks(3, 2)
    with pytest.raises(MAEError, match="boxes alone"):
        objects_of([], [], []).masks(2, 2)
    with pytest.raises(MAEError, match="take over 4 GiB"):
        outlined(*[runs] * 70).masks(8192, 8192)


def test_scaling_and_cutting_keep_outlines_with_their_boxes():
    objects = objects_of(
        [[0.5, 0.5, 0.5, 0.7], [-0.5, 0, 0.5, 1.5]],
        [3, 4],
        [False, True],
        [(np.zeros((3, 2), np.float32),), (np.array([[0, 0], [1, 0], [0.5, 1]], np.float32),)],
    )
    kept = objects.scaled(10, 20).within(20, 10)
    assert kept.boxes.tolist() == [[0, 0, 5, 20]] and kept.classes.tolist() == [4] and kept.crowd.tolist() == [True]
    assert kept.outlines is not None and kept.outlines[0][0].tolist() == [[0, 0], [10, 0], [5, 20]]
