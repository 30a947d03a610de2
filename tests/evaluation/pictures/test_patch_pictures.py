"""Frames around patches and the sheets they stand on."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from data.pictures import noise
from PIL import Image
from rich.console import Console
from tiny_task import CPU, by_function

from mae.data.dataset.images import ImageSet
from mae.data.sources.memory import whole_array
from mae.evaluation.common.task import UnlabelledTask
from mae.evaluation.pictures import patches as module
from mae.evaluation.pictures.patches import draw_nearest_patches, draw_patch_colours
from mae.models.preprocess import Preprocessing
from mae.report.figures.sheet import Column

GRID, SIZE = (3, 4), (24, 20)
WANTED = Preprocessing(img_size=SIZE, in_chans=1, mean=(0.0,), std=(1.0,), crop_share=None)
PIXELS = np.stack([noise(*SIZE, 1, seed) for seed in range(5)])


@pytest.fixture
def images(tmp_path: Path) -> ImageSet:
    task = UnlabelledTask(
        extractor=by_function(lambda images: images.flatten(1), img_size=SIZE),
        source=whole_array(PIXELS, name="photos/noise", note=""),
        folder=tmp_path,
        device=CPU,
        seed=0,
        console=Console(quiet=True),
    )
    return task.images()


@pytest.fixture
def sheets(monkeypatch: pytest.MonkeyPatch) -> list[list[Column]]:
    """The columns of each sheet that is written."""
    written: list[list[Column]] = []
    original = module.write_sheet

    def write_sheet(columns: list[Column], **options: Any) -> None:
        written.append(columns)
        original(columns, **options)

    monkeypatch.setattr(module, "write_sheet", write_sheet)
    return written


@pytest.mark.parametrize("place", range(20))
def test_a_frame_surrounds_the_patch_and_touches_nothing_else(place: int):
    picture = 0.2 + 0.5 * torch.rand(240, 320, 3, generator=torch.Generator().manual_seed(place))
    framed = module._framed(picture, place, (4, 5))  # patches too large to be enlarged
    top, left = place // 5 * 60, place % 5 * 64
    frame = torch.zeros(240, 320, dtype=torch.bool)
    frame[max(0, top - 6) : top + 66, max(0, left - 6) : left + 70] = True
    frame[top : top + 60, left : left + 64] = False
    assert torch.equal((framed != picture).any(dim=2), frame)
    inner, outer = (torch.tensor(colour) for colour in (module._FRAME, module._EDGE))
    row, column = (top - 1, left) if top else (top + 60, left)
    assert torch.equal(framed[row, column], inner)
    assert torch.equal(framed[row - 3 if top else row + 3, column], outer)


@pytest.mark.parametrize(
    ("place", "corner"), [(0, (-18, -20)), (7, (-18, 14)), (72, (14, -20)), (79, (14, 14)), (44, (14, -20))]
)
def test_a_small_patch_is_enlarged_in_the_corner_farthest_from_it(place: int, corner: tuple[int, int]):
    picture = torch.rand(240, 320, 3, generator=torch.Generator().manual_seed(place))
    framed = module._framed(picture, place, (8, 10))
    patch = picture.unflatten(0, (8, 30)).unflatten(2, (10, 32))[place // 10, :, place % 10]
    assert torch.equal(framed[corner[0], corner[1]], patch[4 if corner[0] > 0 else -6, 4 if corner[1] > 0 else -7])
    top, left = (6 if corner[0] > 0 else 240 - 6 - 60), (6 if corner[1] > 0 else 320 - 6 - 64)
    assert torch.equal(framed[top : top + 60 : 2, left : left + 64 : 2], patch)


def test_rows_are_queries_by_model_and_each_picture_is_of_its_patch(
    images: ImageSet, sheets: list[list[Column]], tmp_path: Path
):
    queries = torch.tensor([4, 1]), torch.tensor([11, 0])
    found = {
        "one": (torch.tensor([[0.5, 0.25], [1.0, -1.0]]), torch.tensor([[39, 12], [59, 40]])),
        "other": (torch.tensor([[0.0, 0.0], [0.0, 0.0]]), torch.tensor([[12, 47], [36, 58]])),
    }
    draw_nearest_patches(images, WANTED, queries, found, grid=GRID, title="t", path=tmp_path / "n.png")
    (columns,) = sheets
    assert [column.name for column in columns] == ["query", "nearest 1", "nearest 2"]
    assert [notes[0] for notes in columns[0].notes] == ["by one", "by other"] * 2
    assert [notes[0] for notes in columns[1].notes] == ["cosine 0.50", "cosine 0.00", "cosine 1.00", "cosine 0.00"]
    expected = [[59, 59, 12, 12], [39, 12, 59, 36], [12, 47, 40, 58]]  # images 0 and 2 are not there
    for column, numbers in zip(columns, expected, strict=True):
        for picture, number, notes in zip(column.pictures, numbers, column.notes, strict=True):
            image, place = divmod(number, 12)
            assert f"photos/{notes[1]}" == images.item_name(image)
            whole = (torch.from_numpy(PIXELS[image]).float() / 255).expand(*SIZE, 3)
            torch.testing.assert_close(picture, module._framed(whole, place, GRID))
            assert picture.shape == (216, 180, 3)  # enlarged
    with Image.open(tmp_path / "n.png") as picture:
        assert picture.width > 3 * 180


def test_each_patch_has_its_colour_at_its_place(images: ImageSet, sheets: list[list[Column]], tmp_path: Path):
    colours = torch.rand(2, *GRID, 3, generator=torch.Generator().manual_seed(0))
    explained = {"one": 0.504}
    rows = torch.tensor([3, 1])
    draw_patch_colours(images, WANTED, rows, {"one": colours}, explained=explained, path=tmp_path / "c.png")
    ((image, column),) = sheets
    assert torch.equal(column.pictures[:, 4::8, 2::5], colours) and column.pictures.shape == (2, *SIZE, 3)
    assert column.caption == "50% of the variance"
    torch.testing.assert_close(image.pictures[1, ..., 0], torch.from_numpy(PIXELS[1, ..., 0]).float() / 255)
    assert [f"photos/{name}" for (name,) in image.notes] == [images.item_name(3), images.item_name(1)]
    assert (tmp_path / "c.png").stat().st_size > 1000
