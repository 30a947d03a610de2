"""Boxes and outlines on pictures, pixel by pixel."""

import numpy as np
import torch

from mae.report.figures.boxes import draw_boxes, fit, on_one_size, tint

RED, BLUE = [1.0, 0.0, 0.0], [0.0, 0.0, 1.0]


def is_colour(picture: torch.Tensor, colour: list[float]) -> torch.Tensor:
    return (picture == torch.tensor(colour)).all(dim=-1)


def test_the_edges_of_a_box_are_its_first_and_last_pixels():
    picture = draw_boxes(torch.zeros(20, 30, 3), np.float32([[4, 3, 14, 11]]), ["name"], torch.tensor([RED]))
    expected = np.zeros((20, 30), dtype=bool)
    expected[3:11, 4:14] = True
    expected[5:9, 6:12] = False
    assert (is_colour(picture, RED).numpy() == expected).all()


def test_smaller_boxes_and_names_lie_above_larger_ones():
    boxes = np.float32([[30, 30, 34, 34], [0, 0, 60, 60], [-50, -50, 500, 1e9]])
    picture = draw_boxes(torch.zeros(80, 80, 3), boxes, ["", "a", ""], torch.tensor([BLUE, RED, RED]))
    assert is_colour(picture, BLUE)[30, 30:34].all() and is_colour(picture, RED)[0, 20:60].all()
    assert (picture[:16, :20].sum() > 0) and not is_colour(picture, RED)[20:30, 20:50].any()


def test_empty_and_turned_round_boxes_are_drawn_where_they_begin():
    picture = draw_boxes(
        torch.zeros(9, 9, 3), np.float32([[4, 4, 4, 4], [7, 7, 2, 2]]), ["a", "b"], torch.tensor([RED, RED])
    )
    assert is_colour(picture, RED)[4, 4] and is_colour(picture, RED)[7, 7]
    assert draw_boxes(torch.zeros(9, 9, 3), np.zeros((0, 4), np.float32), [], torch.zeros(0, 3)).sum() == 0


def test_a_name_in_vietnamese_has_its_letters():
    """A letter that the font lacks is drawn as a box; it has no Chinese ones."""
    plain, box = torch.zeros(30, 60, 3), np.array([[0, 0, 60, 30]], np.float32)
    missing, *letters = [draw_boxes(plain, box, [name], torch.ones(1, 3)) for name in "日ìộấẵđ"]
    assert not any(torch.equal(letter, missing) for letter in letters)


def test_a_name_of_several_lines_is_printed_in_one():
    plain, box = torch.zeros(60, 200, 3), np.array([[0, 0, 190, 50]], np.float32)
    drawn = [draw_boxes(plain, box, [name], torch.ones(1, 3)) for name in ("red\n\tcar", "red car")]
    assert torch.equal(*drawn)


def test_the_smallest_object_is_tinted_last():
    masks = np.zeros((2, 4, 4), dtype=bool)
    masks[0, 1, 1] = masks[1] = True
    tinted = tint(torch.zeros(4, 4, 3), masks, torch.tensor([RED, BLUE]))
    assert tinted[1, 1, 0] > 0 and tinted[1, 1, 2] == 0 and tinted[0, 0, 2] > 0


def test_pictures_are_fitted_and_stand_on_one_size():
    large, by = fit(torch.rand(200, 100, 3), 50)
    assert large.shape == (50, 25, 3) and by == 0.25
    small, by = fit(torch.rand(10, 20, 3), 50)
    assert small.shape == (20, 40, 3) and by == 2
    pages = on_one_size([large, small])
    assert pages.shape == (2, 50, 40, 3) and (pages[1, 20:] == 1).all() and torch.equal(pages[0, :, :25], large)
