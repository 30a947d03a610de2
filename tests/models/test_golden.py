"""The losses of ten training steps, as they were written down."""

import json

import pytest
from golden import FILE, golden_losses

RTOL = 1e-4  # room for another processor's order of sums; a change of the arithmetic shows far above


def test_ten_steps_give_the_losses_written_down() -> None:
    expected = json.loads(FILE.read_text())["losses"]
    assert len(expected) == 10 and expected[-1] < expected[0]
    assert golden_losses() == pytest.approx(expected, rel=RTOL), "intended? then rewrite: python tests/models/golden.py"
