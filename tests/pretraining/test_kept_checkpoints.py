"""Which checkpoints a run keeps for good when nobody says."""

import pytest

from mae.pretraining.build import kept_every


@pytest.mark.parametrize(
    ("steps", "num_bytes", "asked", "expected"),
    [
        (1000, 10**6, None, 100),
        (1005, 10**6, None, 101),  # ten at the most
        (999, 10**6, None, None),  # over too soon to be looked at
        (5000, 10**8, None, 500),
        (5000, 10**8 + 1, None, None),  # ten would take more than 1 GB
        (5000, 10**9, 7, 7),
        (10, 10**6, 3, 3),
    ],
)
def test_small_ones_are_kept_ten_times(steps: int, num_bytes: int, asked: int | None, expected: int | None):
    assert kept_every(asked, steps=steps, num_bytes=num_bytes) == expected
