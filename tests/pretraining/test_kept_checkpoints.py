"""Which checkpoints a run keeps for good when nobody says."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from mae.config import RunConfig
from mae.pretraining.build import _keep_every


def model(values: int, *, teacher: int = 0) -> nn.Module:
    """Of so many values, which take no memory."""
    with torch.device("meta"):
        made = nn.ParameterList([torch.empty(values)])
        taught = nn.ParameterList([torch.empty(teacher)]) if teacher else None
    made.teacher = taught
    return made


@pytest.mark.parametrize(
    ("steps", "values", "teacher", "asked", "expected"),
    [
        (1000, 1000, 0, None, 100),
        (1005, 1000, 0, None, 101),  # ten at the most
        (999, 1000, 0, None, None),  # over too soon to be looked at
        (5000, 8_000_000, 0, None, 500),  # 12 bytes a value, ten of them: 0.96 GB
        (5000, 9_000_000, 0, None, None),
        (5000, 8_000_000, 8_000_000, None, None),  # a teacher's 4 bytes a value too
        (5000, 9_000_000, 0, 7, 7),
        (10, 1000, 0, 3, 3),
    ],
)
def test_small_ones_are_kept_ten_times(steps, values, teacher, asked, expected):
    run = SimpleNamespace(config=RunConfig.of(checkpoint_keep_every=asked), total_steps=steps)
    assert _keep_every(run, model(values, teacher=teacher)) == expected
