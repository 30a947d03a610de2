"""Pieces of HTML: well-formed, escaped, bounded."""

from math import inf, nan
from xml.etree import ElementTree

from mae import fragments

EVIL = '<script>alert("1")</script>&\x1b[2J'


def parsed(html: str) -> ElementTree.Element:
    return ElementTree.fromstring(f"<div>{html}</div>")


def test_a_table_escapes_every_text_and_cuts_long_ones():
    html = fragments.table(EVIL, [(EVIL, EVIL, "x" * 5000), ("a\nb", 1, 2)], header=(EVIL, "1", "2"))
    found = parsed(html)
    assert found.find(".//script") is None and "\x1b" not in html
    told = EVIL.replace("\x1b", "\ufffd")
    assert [each.text for each in found.iter("caption")] == [told]
    assert [each.text for each in found.iter("td")][0] == told
    assert max(len(each) for each in found.itertext()) == 600
    assert [cell.find("br") is not None for cell in found.findall(".//tr/th[@scope='row']")] == [False, True]


def test_cells_are_drawn_where_they_are_and_runs_are_one_rectangle():
    html = fragments.cells([["a", "a", "b"], ["b", "b", "b"]], {"a": "#000", "b": "#fff", "c": "#999"}, label=EVIL)
    svg = parsed(html).find("svg")
    assert (
        svg is not None and svg.get("viewBox") == "0 0 3 2" and (svg.get("width"), svg.get("height")) == ("144", "96")
    )
    drawn = {path.get("fill"): path.get("d") for path in svg.findall("path") if path.get("fill")}
    assert drawn == {"#000": "M0 0h2v1h-2z", "#fff": "M2 0h1v1h-1zM0 1h3v1h-3z"}
    assert fragments.cells([["a"] * 201] * 100, {"a": "#000"}, label="") == ""


def test_a_curve_ends_at_its_last_value_between_zero_and_the_highest_level():
    html = fragments.curve([0, 50, 100], [4.0, nan, 1.0], levels={"a_b": 2.0, "none": inf}, label="loss")
    svg = parsed(html).find("svg")
    assert svg is not None
    line = svg.find("polyline")
    assert line is not None and line.get("points") == "0.0,7.2 480.0,91.8"
    assert [each.text for each in svg.findall("text")] == ["a b 2"]
    assert [each.get("fill") for each in svg.findall("text")] == ["currentColor"]  # readable on any page
    assert fragments.curve([1], [nan], levels={}, label="") == ""
    assert "NaN" not in fragments.curve([0], [0.0], levels={}, label="")


def test_a_long_curve_has_few_points_and_its_two_ends():
    html = fragments.curve(range(10_000), [float(value) for value in range(10_000)], levels={}, label="")
    points = parsed(html).find("svg/polyline").get("points").split()  # type: ignore[union-attr]
    assert len(points) == 201 and points[0] == "0.0,120.0" and points[-1] == "480.0,7.2"


def test_levels_that_lie_together_have_labels_apart():
    html = fragments.curve([0, 1], [1.0, 0.5], levels={"a": 0.5, "b": 0.501, "c": 0.502}, label="")
    heights = sorted(float(each.get("y", 0)) for each in parsed(html).iter("text"))
    assert all(after - before > 12 for before, after in zip(heights, heights[1:], strict=False))
