"""The confusion matrix: the colours where they belong, names that cannot break the page."""

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from PIL import Image

from mae.errors import UsageError
from mae.report.figures import confusion
from mae.report.figures.canvas import fit_text, text_width
from mae.report.figures.confusion import draw_confusion

HOSTILE = [
    "long " * 40,
    "two\nlines",
    "\u202egpj.exe",
    "W" * 300,
    "a" + "\u0301" * 90,
    "$\\frac{a",
    "猫",
    "\udcff",
    "\x1b[31m",
    "",
]


@pytest.fixture
def drawn(monkeypatch):
    """The figures, and still a file each."""
    figures: list[Figure] = []
    original = confusion.save_png
    monkeypatch.setattr(confusion, "save_png", lambda figure, path: (figures.append(figure), original(figure, path)))
    return figures


def texts(figure):
    return [text.get_text() for text in figure.texts]


def draw(matrix, path, names=None):
    names = names or [f"class {number}" for number in range(len(matrix))]
    draw_confusion(torch.as_tensor(matrix), class_names=names, title="t", path=path)
    with Image.open(path) as image:
        return np.asarray(image.convert("RGB")).astype(int)


def test_rows_are_true_and_columns_predicted(drawn, tmp_path):
    page = draw([[80, 20], [0, 50]], tmp_path / "new" / "c.png", ["cat", "dog"])
    assert {"80", "20", "50", "130 of 150 correct, 86.7%"} <= set(texts(drawn[0])) and "0" not in texts(drawn[0])
    place = {text.get_text(): text.get_position() for text in drawn[0].texts}
    assert place["20"][0] > place["80"][0] and place["20"][1] == place["80"][1]
    assert place["50"][0] == place["20"][0] and place["50"][1] < place["20"][1]
    # Two cells of 96 pixels; a corner of each is free of its number.
    height, width = page.shape[:2]
    left, top = round(place["80"][0] * width) - 40, round((1 - place["80"][1]) * height) - 30
    corners = page[[[top, top], [top + 96, top + 96]], [[left, left + 96], [left, left + 96]]]
    expected = (confusion._colour(torch.tensor([[0.8, 0.2], [0.0, 1.0]])) * 255).numpy()
    np.testing.assert_allclose(corners, expected, atol=1)
    assert (corners[1, 0] == 255).all()


def test_a_row_without_samples_has_its_own_colour(tmp_path):
    pages = [draw([[5, 1], [0, last]], tmp_path / "c.png") for last in (0, 3)]
    grey_blue = (np.array(confusion._NO_SAMPLE) * 255).round()
    assert [int((abs(page - grey_blue) <= 1).all(-1).sum()) > 15_000 for page in pages] == [True, False]


@pytest.mark.parametrize(("classes", "numbers", "names", "listed"), [
    (2, True, True, False), (20, True, True, False), (21, False, True, False),
    (60, False, True, False), (61, False, False, True), (1000, False, False, True), (1300, False, False, True),
])  # fmt: skip
def test_what_is_printed_follows_the_number_of_classes(drawn, tmp_path, classes, numbers, names, listed):
    matrix = torch.eye(classes, dtype=torch.long) * 777
    matrix[1, 0] = 9
    page = draw(matrix, tmp_path / "c.png")
    found = texts(drawn[0])
    assert ("777" in found) == numbers
    assert (found.count("class 0") == 2) == names
    assert ("class 1 → class 0" in found) == listed and ("9 (1%)" in found) == listed
    assert sum("→ class" in text for text in found) == listed  # what never happened is not listed
    assert 400 <= max(page.shape[:2]) < 1600


def test_fifteen_most_common_confusions_are_listed_in_order(drawn, tmp_path):
    matrix = torch.eye(70, dtype=torch.long) * 1000
    matrix[torch.arange(1, 21), 0] = torch.arange(1, 21)
    draw(matrix, tmp_path / "c.png")
    assert [text for text in texts(drawn[0]) if "→ class" in text] == [
        f"class {true} → class 0" for true in range(20, 5, -1)
    ]


def test_above_a_thousand_classes_a_rare_confusion_is_still_a_pixel(tmp_path):
    matrix = torch.zeros(2000, 2000, dtype=torch.long)
    matrix[:, 0] = 1
    matrix[7, :2], matrix[7, 1999] = 0, 1
    assert (confusion._paint(matrix.to_sparse().coalesce(), 1)[3, -1] < 0.1).all()


@pytest.mark.parametrize("classes", [7, 1000, 1001, 1999, 2300])
def test_a_pixel_shows_the_largest_share_of_the_cells_that_it_covers(classes):
    generator = torch.Generator().manual_seed(classes)
    rows, columns = torch.randint(0, classes, (2, 3 * classes), generator=generator)
    matrix = torch.zeros(classes, classes, dtype=torch.long)
    matrix.view(-1).scatter_add_(0, rows * classes + columns, torch.ones_like(rows))
    total = matrix.sum(dim=1, keepdim=True)
    shares = torch.where(total > 0, matrix / total.clamp(min=1), -1.0)
    largest = torch.nn.functional.adaptive_max_pool2d(shares[None], (min(classes, 1000),) * 2)[0]
    empty = torch.tensor(confusion._NO_SAMPLE)
    expected = torch.where((largest < 0)[..., None], empty, confusion._colour(largest.clamp(min=0)))
    assert torch.equal(confusion._paint(matrix.to_sparse().coalesce(), 1), expected)


def test_classes_without_end_take_the_memory_of_their_samples(drawn, tmp_path):
    classes = 300_000  # whose whole matrix would have 720 GB
    pairs, counts = torch.tensor([[0, 7, 299_999], [0, 299_999, 7]]), torch.tensor([5, 2, 3])
    matrix = torch.sparse_coo_tensor(pairs, counts, (classes, classes), check_invariants=True)
    draw_confusion(matrix, class_names=[f"c{number}" for number in range(classes)], title="t", path=tmp_path / "c.png")
    listed = [text for text in texts(drawn[0]) if "→ c" in text]
    assert listed == ["c299999 → c7", "c7 → c299999"] and "5 of 10 correct, 50.0%" in texts(drawn[0])


@pytest.mark.parametrize("classes", [10, 30, 70])
def test_no_name_breaks_the_page(drawn, tmp_path, classes):
    matrix = torch.ones(classes, classes, dtype=torch.long)
    draw(matrix, tmp_path / "a.png", [HOSTILE[number % 10] for number in range(classes)])
    figure = drawn[0]
    figure.draw_without_rendering()
    for text in figure.texts:
        box = text.get_window_extent()
        assert box.x0 >= 0 and box.y0 >= 0 and box.x1 <= figure.bbox.width and box.y1 <= figure.bbox.height
        assert "\n" not in text.get_text() and "\u202e" not in text.get_text()


def test_large_counts_fit_into_their_cells(drawn, tmp_path):
    page = draw(torch.full((20, 20), 1_234_567), tmp_path / "c.png")
    numbers = [text for text in drawn[0].texts if text.get_text() == "1,234,567"]
    boxes = [text.get_window_extent() for text in numbers[:2]]
    assert len(numbers) == 400 and boxes[0].x1 < boxes[1].x0
    assert page.shape[1] < 2000


@pytest.mark.parametrize(("matrix", "names", "message"), [
    ([[0, 0], [0, 0]], ["a", "b"], "no sample"),
    ([[5, -1], [0, 0]], ["a", "b"], "negative"),
    ([[5, 1], [0, 0]], ["a"], "1 class names for a matrix of 2"),
])  # fmt: skip
def test_invalid_matrices_are_refused(tmp_path, matrix, names, message):
    with pytest.raises(UsageError, match=message):
        draw(matrix, tmp_path / "c.png", names)
    assert list(tmp_path.iterdir()) == []


def test_long_names_lose_their_middle_and_fit():
    for name in ["n" * 5000, "W" * 50, "mixed words 01440764 " * 3]:
        fitted = fit_text(name, width=120, size=8)
        assert text_width(fitted, 8) <= 120 < text_width(name[:400], 8)
        assert "…" in fitted and fitted[0] == name[0] and fitted[-1] == name.strip()[-1]
    assert fit_text("short", width=120, size=8) == "short"
    assert text_width(fit_text("WWWWWWWWWWWWWWW", width=120, size=8, bold=True), 8, bold=True) <= 120
