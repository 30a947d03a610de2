"""Tables of numbers as colours."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from mae.errors import UsageError
from mae.report.figures import grids as module
from mae.report.figures.grids import Grid, draw_grids
from mae.report.figures.tones import colour_table


def grid(values: torch.Tensor, name: str = "numbers") -> Grid:
    rows, columns = (list("abcdefghijklmnopqrstuvwxyz"[:count]) for count in values.shape)
    return Grid(name=name, values=values, rows=rows, columns=columns, show=lambda value: f"{value:.2f}")


def colours_in(path: Path) -> Counter[tuple[int, ...]]:
    """How many pixels have each colour."""
    return Counter(tuple(colour) for colour in np.asarray(Image.open(path).convert("RGB")).reshape(-1, 3).tolist())


def as_bytes(colour: torch.Tensor) -> tuple[int, ...]:
    return tuple((colour * 255).floor().int().tolist())


def test_cells_have_the_colours_of_their_numbers_and_an_unknown_one_is_empty(tmp_path: Path):
    path, table = tmp_path / "grid.png", colour_table("viridis")
    draw_grids([grid(torch.tensor([[1.0, 2.0], [float("nan"), 3.0]]))], title="t", caption="c", path=path)
    found = colours_in(path)
    for place in (0, 128, 255):
        near = [as_bytes(table[place]), tuple(round(float(part) * 255) for part in table[place])]
        assert any(found[colour] > 900 for colour in near), place  # most of a cell
    assert found[237, 237, 237] > 900


def test_each_cell_says_its_number_and_labels_stand_beside(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    said: list[str] = []
    write = module.write_lines

    def look(figure, place, lines, size, **options):
        said.extend(lines)
        write(figure, place, lines, size, **options)

    monkeypatch.setattr(module, "write_lines", look)
    values = torch.tensor([[1.0, 2.0], [float("nan"), 3.0]])
    draw_grids([grid(values), grid(2 * values, "others")], title="t", caption="c", path=tmp_path / "grid.png")
    assert said.count("1.00") == 1 and said.count("3.00") == 1 and said.count("6.00") == 1 and "nan" not in said
    assert {"numbers", "others", "a", "b", "t", "c"} <= set(said)


def test_the_name_of_a_narrow_table_is_whole(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    said: dict[str, float] = {}
    monkeypatch.setattr(module, "write_lines", lambda _, place, lines, size, **__: said.update({lines[0]: place[0]}))
    names = ["class token's share for itself", "distance in patches, mean of heads"]
    draw_grids([grid(torch.ones(2, 1), name) for name in names], title="t", caption="c", path=tmp_path / "grid.png")
    first, second = (said[name] for name in names)
    assert second > first + module.text_width(names[0], module._NAME_SIZE, bold=True)


def test_many_tables_wrap_and_equal_numbers_are_drawn(tmp_path: Path):
    path = tmp_path / "grid.png"
    draw_grids([grid(torch.ones(3, 8))] * 4, title="t", caption="c", path=path)
    width, height = Image.open(path).size
    assert width <= 1300 and height > 2 * 3 * 24
    with pytest.raises(UsageError, match="there is no table"):
        draw_grids([], title="t", caption="c", path=path)
