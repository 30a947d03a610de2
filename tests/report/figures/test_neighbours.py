"""Queries and their neighbours: the right picture in the right place, its numbers under it."""

import pytest
import torch
from PIL import Image

from mae.errors import UsageError
from mae.report.figures import neighbours
from mae.report.figures.canvas import text_width
from mae.report.figures.neighbours import draw_neighbours
from mae.report.figures.sheet import write_sheet
from mae.report.figures.tones import choose_tones


@pytest.fixture
def sheets(monkeypatch):
    """What was given to the sheet, and still a file each."""
    found = []
    monkeypatch.setattr(
        neighbours, "write_sheet", lambda columns, **rest: (found.append((columns, rest)), write_sheet(columns, **rest))
    )
    return found


def draw(path, queries=None, near=None, query_names=None, neighbour_names=None, scale=1.0):
    generator = torch.Generator().manual_seed(0)
    queries = torch.rand(2, 3, 8, 8, generator=generator) * scale if queries is None else queries
    near = torch.rand(2, 3, 3, 8, 8, generator=generator) * scale if near is None else near
    num, k = near.shape[:2]
    channels = near.shape[2]
    draw_neighbours(
        queries,
        near,
        torch.arange(num * k).view(num, k) / 10 - 0.2,
        query_names=query_names or [f"q{row}.png" for row in range(num)],
        neighbour_names=neighbour_names or [[f"n{row}{rank}.png" for rank in range(k)] for row in range(num)],
        mean=(0.5,) * channels,
        std=(0.25,) * channels,
        path=path,
        title="t",
    )
    return queries, near


def test_each_picture_stands_with_its_cosine_and_name(sheets, tmp_path):
    queries, near = draw(tmp_path / "new" / "n.png")
    columns, rest = sheets[0]
    assert [column.name for column in columns] == ["query", "nearest 1", "nearest 2", "nearest 3"]
    tones = choose_tones(torch.cat([queries, near.flatten(0, 1)]), (0.5,) * 3, (0.25,) * 3)
    assert torch.equal(columns[0].pictures, tones.paint(queries))
    assert torch.equal(columns[3].pictures, tones.paint(near[:, 2]))
    assert columns[0].notes == [["q0.png"], ["q1.png"]]
    assert columns[2].notes == [["centred cosine -0.10", "n01.png"], ["centred cosine 0.20", "n11.png"]]
    with Image.open(tmp_path / "new" / "n.png") as image:
        assert image.size[0] == 2 * 24 + 4 * 162 - 12


def test_notes_stand_under_their_picture(monkeypatch, tmp_path):
    from mae.report.figures import sheet

    figures = []
    monkeypatch.setattr(sheet, "save_png", lambda figure, path: figures.append(figure))
    draw(tmp_path / "n.png")
    place = {text.get_text(): text.get_position() for text in figures[0].texts}
    height = figures[0].bbox.height
    first, second, last = (place[name] for name in ("centred cosine -0.20", "n00.png", "centred cosine 0.10"))
    assert first[0] == second[0] == last[0] == place["nearest 1"][0]
    assert (first[1] - second[1]) * height == pytest.approx(16)
    assert (first[1] - last[1]) * height == pytest.approx(128 + 2 * 16 + 8)


def test_rows_of_pictures_leave_room_for_their_notes(tmp_path):
    queries = torch.tensor([0.25, 0.75]).view(2, 1, 1, 1).expand(2, 3, 8, 8)
    draw(tmp_path / "n.png", (queries - 0.5) / 0.25)
    with Image.open(tmp_path / "n.png") as image:
        column = torch.tensor([image.getpixel((30, row))[0] for row in range(image.size[1])])
    first, second = ((column - level).abs() <= 1 for level in (64, 191))
    starts = [int(found.nonzero()[0]) for found in (first, second)]
    assert starts[1] - starts[0] == 128 + 2 * 16 + 8
    assert first[starts[0] : starts[0] + 128].all() and second[starts[1] : starts[1] + 128].all()


def test_neighbours_count_when_the_scale_is_chosen(sheets, tmp_path):
    draw(tmp_path / "n.png", near=torch.rand(2, 3, 3, 8, 8) * 4e4)
    assert sheets[0][0][0].pictures.max() < 0.1 and sheets[0][0][2].pictures.std() > 0.2


@pytest.mark.parametrize(("channels", "note"), [(1, "beyond"), (2, "as grey"), (13, "of 13")])
def test_other_channels_and_ranges_are_scaled_and_the_caption_says_so(sheets, tmp_path, channels, note):
    draw(tmp_path / "n.png", torch.rand(1, channels, 300, 200) * 9e4, torch.rand(1, 1, channels, 300, 200) * 9e4)
    columns, rest = sheets[0]
    assert note in " ".join(rest["caption"])
    assert columns[1].pictures.aminmax() == (0, 1) and columns[0].pictures.mean().item() == pytest.approx(0.5, abs=0.02)


def test_names_fit_their_column_whatever_they_hold(sheets, tmp_path):
    names = ["W" * 300, "a/b/" * 80 + "\u202e\udcff\n.png"]
    draw(tmp_path / "n.png", query_names=names, neighbour_names=[[name] * 3 for name in names])
    for column in sheets[0][0]:
        for lines in column.notes:
            assert all(text_width(line, 8.5) <= 150 for line in lines) and "\u202e" not in lines[-1]
    assert sheets[0][0][0].notes[1][0].endswith(".png")


@pytest.mark.parametrize("wrong", [{"query_names": ["a"]}, {"neighbour_names": [["a"] * 3, ["b"] * 2]}])
def test_another_number_of_names_is_refused(tmp_path, wrong):
    with pytest.raises(UsageError, match="expected one name per image"):
        draw(tmp_path / "n.png", **wrong)


def test_nothing_to_draw_is_said(tmp_path):
    with pytest.raises(UsageError, match="2 queries with 0 neighbours"):
        draw(tmp_path / "n.png", near=torch.rand(2, 0, 3, 8, 8))
    assert list(tmp_path.iterdir()) == []
