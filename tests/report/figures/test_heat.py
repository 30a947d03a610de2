from pathlib import Path

import pytest
import torch

from mae.report.figures import heat
from mae.report.figures.heat import draw_heat
from mae.report.figures.sheet import Column
from mae.report.figures.tones import colour_table


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Column]:
    """The columns of two images of one grey, under weights of which the largest stands at a known place."""
    found: dict[str, Column] = {}
    write = heat.write_sheet

    def look(columns, **options):
        found.update({column.name: column for column in columns})
        write(columns, **options)

    monkeypatch.setattr(heat, "write_sheet", look)
    weights = torch.tensor([[[0.5, 0.25, 0.125], [0.125, 0.0, 0.0]], [[0.25, 0.25, 0.125], [0.125, 0.125, 0.125]]])
    images = torch.full((2, 3, 8, 12), 0.5)
    path = tmp_path / "heat.png"
    draw_heat(
        images, weights, mean=(0.0,) * 3, std=(1.0,) * 3, rgb=None, notes=[["one"], ["two"]], title="heat", path=path
    )
    assert path.stat().st_size > 1000
    return found


def test_a_patch_has_the_colour_of_its_weight(drawn: dict[str, Column]):
    table, pictures = colour_table("viridis"), drawn["weight"].pictures
    assert pictures.shape == (2, 8, 12, 3)
    assert torch.equal(pictures[0, :4, :4], table[255].expand(4, 4, 3))
    assert torch.equal(pictures[0, :4, 4:8], table[128].expand(4, 4, 3))  # half of the largest
    assert torch.equal(pictures[0, 4:, 4:], table[0].expand(4, 8, 3))
    bar = drawn["weight"].bar
    assert bar is not None and (bar.low, bar.high) == ("0", "3")  # times the even weight of a sixth


def test_each_image_is_brightest_where_it_counts_most(drawn: dict[str, Column]):
    assert torch.equal(drawn["image"].pictures, torch.full((2, 8, 12, 3), 0.5))
    lit = drawn["where it looks"].pictures
    assert torch.equal(lit[0, :4, :4], torch.full((4, 4, 3), 0.5)) and torch.equal(
        lit[1, :4, :8], lit[0, :4, :4].repeat(1, 2, 1)
    )
    assert torch.allclose(lit[0, 4:, 4:], torch.tensor(0.075))
