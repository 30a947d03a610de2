"""Nearest patches of other images against a slow loop, and on tokens whose neighbours are known."""

import numpy as np
import pytest
import torch
from torch import Tensor

from mae.evaluation.common import patch_neighbours as module
from mae.evaluation.common.patch_neighbours import (
    drawn_images,
    drawn_places,
    nearest_in_other_images,
    same_place,
    share_in_common,
    standard_images,
)

CPU = torch.device("cpu")


def some_tokens(images: int = 9, places: int = 6, width: int = 5, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(images, places, width, generator=generator) * torch.arange(1, width + 1) + 3).half()


def found_by_loop(tokens: Tensor, image: int, place: int, k: int, *, by_place: bool) -> list[tuple[int, int]]:
    """Image and place of the nearest, each patch standardised and compared by itself."""
    values = tokens.double().numpy()
    axes = (0,) if by_place else (0, 1)
    values = (values - values.mean(axis=axes)) / values.std(axis=axes)
    query = values[image, place]
    best = []
    for other in range(len(values)):
        cosines = [float(v @ query / np.linalg.norm(v) / np.linalg.norm(query)) for v in values[other]]
        if other != image:
            best.append((-max(cosines), other, int(np.argmax(cosines))))
    return [(other, at) for _, other, at in sorted(best)[:k]]


@pytest.mark.parametrize("by_place", [False, True])
@pytest.mark.parametrize("values", [1, 100, 1 << 23])
def test_equals_a_slow_loop_however_the_work_is_cut(by_place: bool, values: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "_VALUES", values)
    tokens = some_tokens()
    images, places = torch.tensor([4, 0, 8]), torch.tensor([5, 0, 2])
    bank = standard_images(tokens, by_place=by_place)
    cosines, numbers = nearest_in_other_images(bank, images, places, k=4, device=CPU)
    for image, place, row in zip(images.tolist(), places.tolist(), numbers.tolist(), strict=True):
        expected = found_by_loop(tokens, image, place, 4, by_place=by_place)
        assert [divmod(number, 6) for number in row] == expected
    assert (cosines.diff(dim=1) <= 0).all() and cosines.abs().max() <= 1


def test_no_neighbour_is_on_the_querys_image_and_no_two_are_on_one():
    tokens = some_tokens(images=5)
    tokens[:, 1:] = tokens[:, :1] + 0.01 * tokens[:, 1:]  # the nearest patches by far are on the same image
    images = torch.arange(5)
    bank = standard_images(tokens, by_place=False)
    _, numbers = nearest_in_other_images(bank, images, torch.zeros(5, dtype=torch.int64), k=4, device=CPU)
    for image, row in zip(images.tolist(), (numbers // 6).tolist(), strict=True):
        assert sorted([image, *row]) == list(range(5))


def test_of_equally_near_ones_the_lowest_number_comes_first(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "_VALUES", 150)  # two images at a time
    tokens = some_tokens(images=8, width=33)
    tokens[[6, 2, 5], 3] = tokens[0, 0]
    tokens[[6, 2, 5], 1] = tokens[0, 0]
    bank = standard_images(tokens, by_place=False)
    cosines, numbers = nearest_in_other_images(bank, torch.tensor([0]), torch.tensor([0]), k=3, device=CPU)
    assert numbers.tolist() == [[2 * 6 + 1, 5 * 6 + 1, 6 * 6 + 1]] and cosines.tolist() == [[1.0] * 3]


def test_what_all_images_have_at_a_place_hides_what_is_there_until_it_is_removed():
    """Each image has a mark at one place; a strong code of the place lies over it."""
    generator = torch.Generator().manual_seed(1)
    where = torch.arange(60) % 6
    tokens = 20 * torch.randn(1, 6, 16, generator=generator) + torch.randn(60, 6, 16, generator=generator)
    tokens[range(60), where] += 8 * torch.randn(16, generator=generator)
    images, places = torch.arange(60), where
    shares = {}
    for by_place in (False, True):
        bank = standard_images(tokens, by_place=by_place)
        _, numbers = nearest_in_other_images(bank, images, places, k=5, device=CPU)
        marked = (where[numbers // 6] == numbers % 6).float().mean()
        at_place = (numbers % 6 == places.unsqueeze(1)).float().mean()
        shares[by_place] = float(marked), float(at_place)
    assert shares[False][1] == 1.0
    assert shares[True][0] > 0.95 and shares[True][1] < 0.4


def test_a_dimension_that_never_changes_counts_nothing():
    tokens = some_tokens()
    wider = torch.cat([tokens, torch.full((9, 6, 1), 7.0).half()], dim=2)
    for by_place in (False, True):
        alone, beside = (standard_images(of, by_place=by_place)[2:4] for of in (tokens, wider))
        assert torch.equal(beside[..., :-1], alone) and not beside[..., -1].any()


def test_queries_are_drawn_from_the_half_of_patches_with_the_most_contrast():
    """Contrast within channels: a flat patch of a strong colour has none."""
    pixels = torch.zeros(300, 5, 3, 4)
    pixels[:, 0] = torch.tensor([9.0, -9.0, 0.0]).unsqueeze(1)
    pixels[:, [1, 3, 4]] = torch.tensor([1.0, -1.0, 1.0, -1.0])
    numbers = torch.arange(300)
    drawn = drawn_places(pixels.half(), numbers, seed=3)
    assert set(drawn.tolist()) == {1, 3, 4} and drawn.bincount().max() < 130
    assert torch.equal(drawn_places(pixels[100:].half(), numbers[100:], seed=3), drawn[100:])
    assert not torch.equal(drawn_places(pixels.half(), numbers, seed=4), drawn)


def test_images_are_drawn_by_the_seed_and_are_different_ones():
    assert sorted(drawn_images(0, 7, 20).tolist()) == list(range(7))
    assert drawn_images(5, 100, 10).tolist() == drawn_images(5, 100, 20)[:10].tolist()
    assert drawn_images(5, 100, 10).tolist() != drawn_images(6, 100, 10).tolist()


def test_share_in_common_counts_numbers_wherever_they_stand():
    one = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])
    other = torch.tensor([[4, 9, 1, 0], [1, 2, 3, 4]])
    assert share_in_common(one, one) == 1.0 and share_in_common(one, other) == share_in_common(other, one) == 0.25


def test_same_place_is_at_most_one_step_in_every_direction():
    places = torch.arange(12)
    found = same_place(places.unsqueeze(1), places.unsqueeze(0), (3, 4))
    for one in range(12):
        for other in range(12):
            (row, column), (other_row, other_column) = divmod(one, 4), divmod(other, 4)
            assert found[one, other] == (abs(row - other_row) <= 1 and abs(column - other_column) <= 1)
