"""Lets these tests import their oracles: `slow_mae` beside them, `peer` and `model_table` from the benchmarks."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
for folder in (HERE, HERE.parents[1] / "benchmarks"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny models lose far more to waiting threads than they gain, most of all on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
