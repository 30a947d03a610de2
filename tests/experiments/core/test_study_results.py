"""The records of a study: how numbers are printed, which of them are there."""

import json
from math import inf, nan
from pathlib import Path

import pytest
from fake_study import EPOCH, LOSS, PROBE, PSNR, fake_study

from mae.config import RunConfig
from mae.experiments.core import collect
from mae.experiments.core.job import Job


@pytest.mark.parametrize(("metric", "value", "text"), [
    (PROBE, 0.4449, "44.5"), (PSNR, 18.234, "18.23"), (EPOCH, 71.04, "71.0"), (EPOCH, 12345.6, "12,346"),
    (EPOCH, 345.6, "346"), (LOSS, 0.55512, "0.555"), (LOSS, 0.5, "0.500"), (LOSS, nan, "nan"),
])  # fmt: skip
def test_digits(metric, value, text):
    assert metric.digits(value) == text


@pytest.mark.parametrize(("metric", "value", "text"), [
    (PROBE, 0.012, "+1.2"), (PROBE, -0.012, "-1.2"), (PROBE, -0.0001, "0.0"), (PROBE, 0.0, "0.0"),
    (PSNR, 0.5, "+0.50"), (EPOCH, 1.0, "+1.0"), (EPOCH, -24.3, "-24"), (EPOCH, 99.6, "+99.6"),
    (EPOCH, 1234.5, "+1,234"), (LOSS, -0.00412, "-0.0041"),
])  # fmt: skip
def test_gap_digits(metric, value, text):
    assert metric.gap_digits(value, sign=True) == text
    assert metric.gap_digits(value) == text.removeprefix("+")


def test_units():
    assert [(metric.unit, metric.gap_unit) for metric in (PROBE, PSNR, EPOCH, LOSS)] == [
        ("%", "points"), ("dB", "dB"), ("s", "s"), ("", ""),
    ]  # fmt: skip


def test_values_leave_out_missing_and_nonfinite_numbers(tmp_path):
    def change(variant, seed, numbers):
        if seed == 1:
            del numbers["probe"]
        if seed == 2:
            numbers["epoch"] = nan if variant == "b" else inf

    study = fake_study(tmp_path, effects={"a": 0.0, "b": 0.1}, left_out=[("b", 0)], change=change)
    assert list(study.values("probe", "a")) == [0, 2] and list(study.values("probe", "b")) == [2]
    assert study.values("epoch", "a") == {0: 70.0, 1: 70.0} and study.values("nothing", "a") == {}
    assert study.broken() == [("a", 2, "time per epoch"), ("b", 2, "time per epoch")]
    assert [variant.name for variant in study.others] == ["b"] and study.planned == 6
    assert [run.seed for run in study.runs_of("b")] == [1, 2]


@pytest.mark.parametrize(("held_out", "views", "seconds"), [(0.0, 1, 4.0), (0.0, 2, 8.0), (0.2, 1, 3.2), (0.2, 2, 6.4)])
def test_an_epoch_is_that_of_training(held_out: float, views: int, seconds: float, tmp_path: Path):
    """A run counts each crop of an image as an image a second, and trains on no image that it holds out."""
    (tmp_path / "summary.json").write_text('{"terms": {"reconstruction": 0.5}, "seconds": 9, "images_per_second": 25}')
    (tmp_path / "data.json").write_text('{"images": 100}')
    config = RunConfig.of(source="builtin:digits", repeated_aug=views)
    resolved = config.override({"batch_size": 10, "held_out": held_out})  # of whose defaults a job's has none
    (tmp_path / "config.json").write_text(json.dumps(resolved.to_json()))
    job = Job(
        variant="one",
        seed=0,
        folder=tmp_path,
        data="",
        data_root=tmp_path,
        device="cpu",
        evaluations=(),
        config=config.to_json(),
    )
    assert collect._of_training(job) == {"loss": 0.5, "seconds": 9.0, "epoch_seconds": seconds}
