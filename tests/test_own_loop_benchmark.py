"""The loops of benchmarks/own_loop.py compute the same; how fast they are is no test."""

import pytest
import torch
from own_loop import make_step

OPTIONS = {"model": "mae_vit_lesson_patch4", "batch_size": 2, "precision": "fp32"}


def test_the_documented_loop_computes_what_the_plain_one_does() -> None:
    losses = {}
    for way in ("plain", "as documented"):
        step = make_step(way, **OPTIONS)
        losses[way] = [float(step()) for _ in range(3)]
    assert losses["as documented"] == pytest.approx(losses["plain"], rel=1e-5)
    assert len(set(losses["plain"])) == 3


def test_the_engine_takes_steps_too() -> None:
    step = make_step("engine", **OPTIONS)
    before = torch.get_rng_state()
    step()
    assert not torch.equal(torch.get_rng_state(), before)  # new masks
