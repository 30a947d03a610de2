"""The random map against NumPy, down to the numbers it is drawn from."""

import numpy as np
import pytest
import torch
from pieces import batch_of
from torch.testing import assert_close

from mae.core.types import Layout
from mae.errors import UsageError
from mae.targets.random_projection import RandomProjectionTarget

GOLDEN, MASK = 0x9E3779B97F4A7C15, (1 << 64) - 1


def mixed(x: int) -> int:
    """SplitMix64's finalizer in whole numbers."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def by_numpy(values: int, dim: int, seed: int) -> np.ndarray:
    """The map `[P, dim]`: one key a row, of the seed and the fixed epoch -1, and numbers of stream 8 from it."""
    run = mixed((seed + GOLDEN) & MASK)
    epoch = mixed((run - 1) & MASK)
    found = np.zeros((values, dim))
    for row in range(values):
        start = mixed((mixed((epoch + row) & MASK) + 9) & MASK)
        for column in range(dim):
            found[row, column] = (mixed((start + (column + 1) * GOLDEN) & MASK) >> 40) / 2**24
    return (2 * found - 1) * np.sqrt(3 / values)


@pytest.mark.parametrize(("dim", "seed"), [(16, 0), (5, 4294967295)])
def test_it_is_that_of_numpy(dim: int, seed: int) -> None:
    images = torch.randn(2, 3, 8, 12, generator=torch.Generator().manual_seed(0))
    found = RandomProjectionTarget(dim=dim, seed=seed)(batch_of(images, 4))
    matrix = by_numpy(48, dim, seed)
    for image, values in zip(images.double().numpy(), found, strict=True):
        for number in range(6):
            row, column = divmod(number, 3)
            patch = image[:, 4 * row : 4 * row + 4, 4 * column : 4 * column + 4].transpose(1, 2, 0).ravel()
            mapped = (patch - patch.mean()) / np.sqrt(patch.var(ddof=1) + 1e-6) @ matrix
            expected = (mapped - mapped.mean()) / np.sqrt(mapped.var() + 1e-5)
            assert_close(values[number].double(), torch.from_numpy(expected), rtol=1e-4, atol=1e-5)


def test_contrast_and_brightness_of_a_patch_do_not_count_and_its_pattern_does() -> None:
    target, images = RandomProjectionTarget(dim=32), torch.randn(1, 3, 8, 8)
    values = target(batch_of(images, 4))
    assert_close(target(batch_of(3 * images + 2, 4)), values, rtol=1e-3, atol=1e-3)
    assert (target(batch_of(images.flip(3), 4)) - values).abs().mean() > 0.5


def test_the_map_keeps_lengths_on_average_and_another_seed_is_another_map() -> None:
    one, other = (
        RandomProjectionTarget(dim=512, seed=seed).projection(192, device=torch.device("cpu")) for seed in (0, 1)
    )
    assert one.square().sum(dim=0).mean() == pytest.approx(1.0, abs=0.02)
    assert (one * other).sum().abs() / one.square().sum() < 0.02


@pytest.mark.parametrize(("patch", "channels", "dim"), [((1, 1), 1, 8), ((4, 4), 3, 1)])
def test_what_normalisation_leaves_nothing_of_is_refused(patch: tuple[int, int], channels: int, dim: int) -> None:
    with pytest.raises(UsageError, match=r"normalises the \d+ value\(s\) of a patch and the \d+ of its map; expected"):
        RandomProjectionTarget(dim=dim).width(Layout(size=(8, 8), patch=patch, channels=channels))
