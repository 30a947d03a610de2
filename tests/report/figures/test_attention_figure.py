"""Attention over images, at known places."""

from pathlib import Path

import pytest
import torch

from mae.report.figures import attention
from mae.report.figures.attention import draw_attention
from mae.report.figures.sheet import Column
from mae.report.figures.tones import colour_table


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Column]:
    """Columns of two grey images; the first attends to one patch alone, the second evenly, and a patch is framed."""
    found: dict[str, Column] = {}
    write = attention.write_sheet

    def look(columns, **options):
        found.update({column.name: column for column in columns})
        write(columns, **options)

    monkeypatch.setattr(attention, "write_sheet", look)
    weights = torch.full((2, 2, 3), 1 / 6)
    weights[0] = torch.tensor([[0.0, 0.0, 1.0], [0.0, 0.0, 0.0]])
    draw_attention(
        torch.full((2, 3, 16, 24), 0.5),
        {"head 0": weights},
        mean=(0.0,) * 3,
        std=(1.0,) * 3,
        rgb=None,
        notes=[["one"], ["two"]],
        title="attention",
        caption="c",
        path=tmp_path / "attention.png",
        marked=torch.tensor([3, 0]),
    )
    assert (tmp_path / "attention.png").stat().st_size > 1000
    return found


def test_a_patch_has_the_colour_that_the_scale_gives_its_attention(drawn: dict[str, Column]):
    table, pictures = colour_table("inferno"), drawn["head 0"].pictures
    strongest, none = table[255], table[0]
    torch.testing.assert_close(pictures[0, :8, 16:], strongest.expand(8, 8, 3))
    torch.testing.assert_close(pictures[0, :8, :16], none.expand(8, 16, 3))
    # An even map is as bright as its own largest value everywhere.
    torch.testing.assert_close(pictures[1, 8:, :], strongest.expand(8, 24, 3))


def test_the_patch_that_asks_is_framed_in_every_column(drawn: dict[str, Column]):
    for column in drawn.values():
        first, second = column.pictures
        yellow = torch.tensor([1.0, 0.85, 0.0])
        assert torch.equal(first[8, :8], torch.zeros(8, 3)) and torch.equal(first[9, 1:7], yellow.expand(6, 3))
        assert torch.equal(second[0, :8], torch.zeros(8, 3)) and torch.equal(second[1, 1:7], yellow.expand(6, 3))
    assert torch.equal(drawn["image"].pictures[0, 11, 3], torch.full((3,), 0.5))  # the patch itself is seen
