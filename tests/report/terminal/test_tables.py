"""A table with a header in the terminal."""

from io import StringIO

import pytest
from rich.console import Console

from mae.report.terminal.tables import numeric_columns, show_grid


def shown(header, rows, title="t", width=80):
    buffer = StringIO()
    show_grid(Console(file=buffer, width=width), title, header, rows)
    return [line.rstrip() for line in buffer.getvalue().splitlines()]


def test_numbers_stand_to_the_right_and_text_to_the_left():
    lines = shown(["protocol", "top-1", "images"], [["k-NN", "7.3 %", "2,000"], ["linear", "78.15 %", "90"]])
    assert lines == ["t", "protocol    top-1  images", "k-NN        7.3 %   2,000", "linear    78.15 %      90"]


def test_nothing_in_a_cell_is_markup_and_nothing_reaches_the_terminal_raw():
    lines = shown(
        ["[red]file[/red]"], [["[bold]a[/bold]"], ["\x1b[2J\u202e\udcff"], ["[/]"], [":smile:"]], title="[blue]"
    )
    assert lines == ["[blue]", "[red]file[/red]", "[bold]a[/bold]", "\ufffd[2J\ufffd\ufffd", "[/]", ":smile:"]


def test_long_cells_are_folded_not_cut():
    assert "".join(shown(["file"], [["x" * 100]], width=40)).count("x") == 100


@pytest.mark.parametrize("width", [100, 80, 60, 30, 14])
def test_nothing_is_lost_on_a_narrow_terminal(width):
    header = ["way", "images/s", "beside ViTMAE", "of copy", "memory, GB"]
    rows = [
        ["self, compiled", "103.7 (101.8–103.9)", "2.12 (2.10–2.13)", "80%", "0.51"],
        ["ViTMAE", "9", "", "", "0.41"],
    ]
    lines = shown(header, rows, width=width)
    assert max(map(len, lines)) <= width
    assert sorted("".join(lines[1:]).replace(" ", "")) == sorted(
        "".join(map("".join, [header, *rows])).replace(" ", "")
    )
    if width == 60:  # words stay whole as long as that is possible
        assert {"0.51", "compiled", "(101.8–103.9)"} <= set(" ".join(lines).split())


@pytest.mark.parametrize(
    "cell",
    ["3", "-1.5", "+2e-3", "1,234", "61.5 %", "61.5%", "80.1 ± 0.3", "−4", "nan", "-inf", ".5", "12 / 40", "2.1 x"],
)
def test_numbers(cell):
    assert numeric_columns(["a"], [[cell], [""], ["–"]]) == [True]


@pytest.mark.parametrize("cell", ["k-NN", "3 epochs", "1.2.3", "a1", "2024-01-01", "0x10", "mean", "1 2"])
def test_no_numbers(cell):
    assert numeric_columns(["a"], [["3"], [cell]]) == [False]


def test_a_column_without_anything_is_text():
    assert numeric_columns(["a", "b"], [["", "1"], ["", "2"]]) == [False, True]
    assert numeric_columns(["a"], []) == [False]


def test_a_short_row_is_an_error():
    with pytest.raises((IndexError, ValueError)):
        shown(["a", "b"], [["1"]])
