"""Entropy, distance and rollout of attention, planted and against slow loops."""

from math import dist, log

import pytest
import torch
from tiny import images_for, tiny_model
from torch.testing import assert_close

from mae.errors import UsageError
from mae.evaluation.common.attention_stats import (
    attention_distance,
    attention_entropy,
    measure_attention,
    patch_distances,
    rollout,
)

GRID = (3, 4)
NUM = 12


def planted(matrix: torch.Tensor) -> torch.Tensor:
    """Two images whose one head attends so."""
    return matrix.expand(2, 1, -1, -1)


def shift(columns: int) -> torch.Tensor:
    """Each patch attends to the one so many columns to its right, counted around."""
    right = torch.arange(NUM).reshape(GRID).roll(-columns, dims=1).flatten()
    return torch.eye(NUM)[right]


def test_attention_to_one_token_has_no_entropy_and_to_all_alike_that_of_their_number():
    assert_close(attention_entropy(planted(shift(1))), torch.zeros(2, 1, NUM), rtol=0, atol=0)
    uniform = attention_entropy(planted(torch.full((NUM, NUM), 1 / NUM)))
    assert_close(uniform, torch.full((2, 1, NUM), log(NUM)))


def test_the_distance_of_a_shift_is_known():
    distances = patch_distances(GRID)
    assert_close(attention_distance(planted(torch.eye(NUM)), distances), torch.zeros(2, 1))
    # Of each row of four three patches look one to the right, and the last three to the left.
    assert_close(attention_distance(planted(shift(1)), distances), torch.full((2, 1), (3 * 1 + 3) / 4))
    in_pixels = patch_distances(GRID, (2, 16))
    assert_close(attention_distance(planted(shift(1)), in_pixels), torch.full((2, 1), 16 * (3 * 1 + 3) / 4))
    down = torch.eye(NUM)[torch.arange(NUM).reshape(GRID).roll(-1, dims=0).flatten()]
    assert_close(attention_distance(planted(down), in_pixels), torch.full((2, 1), 2 * (1 + 1 + 2) / 3))


def test_distances_are_those_of_a_slow_loop():
    found = patch_distances(GRID, (3, 5))
    places = [(3 * row, 5 * column) for row in range(GRID[0]) for column in range(GRID[1])]
    assert_close(found, torch.tensor([[dist(a, b) for b in places] for a in places]))


def test_what_goes_to_class_tokens_has_no_distance_but_has_entropy():
    weights = torch.zeros(1, 1, NUM + 1, NUM + 1)
    weights[..., 0] = 0.5  # half of what all ask for is the class token's
    weights[..., 1:, 1:] = 0.5 * shift(1)
    weights[..., 0, 1] = 0.5
    found = measure_attention([[weights]], grid=GRID, patch=(2, 16), num_prefix=1)
    assert_close(found.distance, torch.tensor([[1.5]]))
    assert_close(found.pixels, torch.tensor([[24.0]]))
    assert_close(found.entropy, torch.tensor([[log(2)]]))
    assert found.cls_entropy is not None and found.cls_self is not None
    assert_close(found.cls_entropy, torch.tensor([[log(2)]]))
    assert_close(found.cls_self, torch.tensor([[0.5]]))
    assert found.uniform_entropy == pytest.approx(log(NUM + 1))
    assert found.uniform_distance == pytest.approx(float(patch_distances(GRID).mean()))


def test_without_class_tokens_there_are_no_numbers_of_them_and_batches_add_up():
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(5, 3, NUM, NUM, generator=generator).softmax(dim=-1)
    blocks = [weights, weights.flip(0) ** 2]
    whole = measure_attention([blocks], grid=GRID, patch=(4, 4), num_prefix=0)
    parts = measure_attention(
        ([each[rows] for each in blocks] for rows in (slice(2), slice(2, 5))), grid=GRID, patch=(4, 4), num_prefix=0
    )
    assert whole.cls_entropy is None and whole.cls_self is None
    assert whole.entropy.shape == (2, 3)
    assert_close(whole.entropy, parts.entropy)
    assert_close(whole.pixels, parts.pixels)
    assert_close(whole.pixels, 4 * whole.distance)
    with pytest.raises(UsageError, match="at least one batch"):
        measure_attention([], grid=GRID, patch=(4, 4), num_prefix=0)


def test_rollout_is_the_product_of_halved_matrices():
    generator = torch.Generator().manual_seed(0)
    blocks = [torch.randn(2, 3, 5, 5, generator=generator).softmax(dim=-1) for _ in range(3)]
    found = rollout(blocks)
    for image in range(2):
        product = torch.eye(5).double()
        for weights in blocks:
            mean = sum(weights[image, head].double() for head in range(3)) / 3
            product = (0.5 * mean + 0.5 * torch.eye(5).double()) @ product
        assert_close(found[image].double(), product, rtol=1e-5, atol=1e-7)
    assert_close(found.sum(dim=-1), torch.ones(2, 5))
    # Two steps to the right by half each: a quarter stays, a half went one on, a quarter two.
    twice = rollout([planted(shift(1))[:1]] * 2)[0]
    assert_close(twice[0, :4], torch.tensor([0.25, 0.5, 0.25, 0.0]))
    with pytest.raises(UsageError, match="at least one block"):
        rollout([])


def test_a_model_s_attention_is_measured_block_after_block():
    model = tiny_model()
    found = measure_attention(
        [model.encoder.attention(images_for(model))], grid=(4, 6), patch=(4, 4), num_prefix=model.encoder.num_prefix
    )
    assert found.entropy.shape == (2, 3) and found.cls_entropy is not None
    assert bool((found.entropy > 0).all()) and bool((found.entropy < found.uniform_entropy).all())
    assert bool((found.distance > 0).all())
