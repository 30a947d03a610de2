"""Verdicts: the interval against the t formula, the false-positive rate, words and signs."""

import numpy as np
import pytest
from fake_study import EPOCH, LOSS, PROBE, fake_study
from scipy.stats import t as student
from scipy.stats import ttest_rel

from mae.experiments.core.metrics import Metric
from mae.experiments.core.stats import Difference, SampleSummary, caveat, compare, differences, sentence, summarise

A = {0: 0.44, 1: 0.45, 2: 0.45}
MIRROR = {"better": "worse", "worse": "better", "not distinguishable": "not distinguishable"}


def judged(other: dict[int, float], metric: Metric = PROBE) -> Difference:
    return compare(A, other, metric)


def said(other: dict[int, float], metric: Metric = PROBE) -> str:
    return sentence(metric, judged(other, metric), variant="improved", reference="original")


def test_summarise():
    found = summarise([1.0, 2.0, 4.0])
    assert (found.mean, found.std, found.count) == pytest.approx((7 / 3, np.sqrt(7 / 3), 3))
    assert summarise([5.0]) == SampleSummary(mean=5.0, std=None, count=1)
    assert summarise([]) == SampleSummary(mean=None, std=None, count=0)


@pytest.mark.parametrize("pairs", [2, 3, 5, 20])
def test_interval_matches_the_t_formula(pairs):
    draw = np.random.default_rng(pairs)
    for _ in range(20):
        first, second = draw.normal(0.4, 0.01, pairs), draw.normal(0.41, 0.02, pairs)
        found = compare(
            {seed: float(value) for seed, value in enumerate(first)},
            # In another order, with a seed the reference has not.
            {99: 7.0, **{seed: float(second[seed]) for seed in reversed(range(pairs))}},
            PROBE,
        )
        gaps = second - first
        reach = student.ppf(0.975, pairs - 1) * gaps.std(ddof=1) / np.sqrt(pairs)
        assert found.mean == pytest.approx(gaps.mean(), abs=1e-12)
        assert (found.low, found.high) == pytest.approx((gaps.mean() - reach, gaps.mean() + reach), abs=1e-12)
        assert found.pairs == pairs
        assert (found.verdict == "not distinguishable") == (ttest_rel(second, first).pvalue > 0.05)


def test_false_positive_rate_is_five_percent():
    draw = np.random.default_rng(0).normal(0.4, 0.01, (2000, 2, 3)).tolist()
    found = [compare(dict(enumerate(first)), dict(enumerate(second)), PROBE).verdict for first, second in draw]
    assert 0.03 < 1 - found.count("not distinguishable") / 2000 < 0.07
    assert found.count("better") > 20 and found.count("worse") > 20


def test_pairing_finds_a_shift_smaller_than_the_spread_of_seeds():
    draw = np.random.default_rng(1)
    levels = draw.normal(0.4, 0.05, (500, 3))
    noise = draw.normal(0, 0.001, (2, 500, 3))
    pairs = zip((levels + noise[0]).tolist(), (levels + 0.01 + noise[1]).tolist(), strict=True)
    found = [compare(dict(enumerate(first)), dict(enumerate(second)), PROBE).verdict for first, second in pairs]
    assert found.count("better") > 450 and "worse" not in found


def test_swapped_variants_mirror():
    draw = np.random.default_rng(2)
    for shift in (0.0, 0.01, 0.03):
        first, second = (dict(enumerate(draw.normal(at, 0.005, 4).tolist())) for at in (0.4, 0.4 + shift))
        there, back = compare(first, second, PROBE), compare(second, first, PROBE)
        assert there.mean is not None and back.mean == pytest.approx(-there.mean, abs=1e-15)
        assert (back.low, back.high) == pytest.approx((-(there.high or 0), -(there.low or 0)), abs=1e-15)
        assert back.verdict == MIRROR[there.verdict]


def test_lower_is_better_for_times():
    fast, slow = {0: 60.0, 1: 61.0, 2: 60.5}, {0: 70.0, 1: 71.5, 2: 70.2}
    assert compare(slow, fast, EPOCH).verdict == "better"
    assert compare(fast, slow, EPOCH).verdict == "worse"
    text = sentence(EPOCH, compare(slow, fast, EPOCH), variant="improved", reference="original")
    assert text == "time per epoch: improved is better by 10 s (95 % interval 9.1 to 11, 3 seeds)"


def test_no_verdict():
    one, none = judged({0: 0.5}), judged({7: 0.5})
    assert (one.verdict, one.low, one.high, one.pairs) == ("no verdict: one seed", None, None, 1)
    assert one.mean == pytest.approx(0.06)
    assert none == Difference(mean=None, low=None, high=None, pairs=0, verdict="no verdict: no seed in common")
    shifted = {seed: value + 0.1 + 0.001 * seed for seed, value in A.items()}
    assert judged(shifted).verdict == "better" and judged(shifted, LOSS).verdict == "not compared"
    assert judged({0: 0.5}, LOSS).verdict == "not compared"


def test_equal_differences_give_no_verdict():
    """As scores on few test images may be: two that agree are no evidence."""
    found = compare({0: 1.0, 1: 2.0}, {0: 1.5, 1: 2.5}, PROBE)
    assert (found.mean, found.low, found.high) == (0.5, 0.5, 0.5)
    assert found.verdict == "no verdict: all seeds differ alike"
    rounded = compare({0: 0.1, 1: 0.7, 2: 0.3}, {0: 0.4, 1: 1.0, 2: 0.6}, PROBE)
    assert rounded.low != rounded.high and rounded.verdict == found.verdict
    assert "no verdict: all seeds differ alike" in sentence(PROBE, found, variant="a", reference="b")
    same = judged(dict(A))
    assert (same.mean, same.low, same.high) == (0, 0, 0)
    assert same.verdict == "not distinguishable" and same.identical and not found.identical


def test_no_verdict_without_a_finite_interval():
    found = compare({0: 0.0, 1: 0.0, 2: 0.0}, {0: 5e307, 1: 5.5e307, 2: 5e307}, PROBE)
    assert found.verdict == "no verdict: interval not finite"


@pytest.mark.parametrize(("other", "metric", "text"), [
    ({0: 0.46, 1: 0.47, 2: 0.465}, PROBE,
     "linear probe, top-1: improved is better by 1.8 points (95 % interval 1.1 to 2.6, 3 seeds)"),
    ({0: 0.42, 1: 0.43, 2: 0.435}, PROBE,
     "linear probe, top-1: improved is worse by 1.8 points (95 % interval 1.1 to 2.6, 3 seeds)"),
    ({0: 0.44, 1: 0.46, 2: 0.445}, PROBE,
     "linear probe, top-1: improved is not distinguishable: +0.2 points (95 % interval -1.7 to 2.1, 3 seeds)"),
    (A, PROBE, "linear probe, top-1: improved and original are identical (3 seeds)"),
    ({0: 0.43}, PROBE, "linear probe, top-1: no verdict: one seed; improved differs by -1.0 points"),
    ({}, PROBE, "linear probe, top-1: no verdict: not measured with the same seed in improved and original"),
    ({0: 0.45, 1: 0.47, 2: 0.47}, LOSS,
     "loss at 50 %: not compared; improved differs by +0.017 (95 % interval 0.0023 to 0.031, 3 seeds)"),
    ({0: 0.45}, LOSS, "loss at 50 %: not compared; improved differs by +0.010"),
])  # fmt: skip
def test_sentence(other, metric, text):
    assert said(other, metric) == text


def test_differences_and_caveat(tmp_path):
    study = fake_study(tmp_path, effects={"a": 0.0, "b": 0.02, "c": -0.02})
    found = differences(study)
    assert sorted(found) == sorted((metric.name, variant) for metric in study.metrics for variant in "bc")
    assert (found["probe", "b"].verdict, found["probe", "c"].verdict) == ("better", "worse")
    # Three metrics with a better direction, two variants.
    assert "about one in twenty" in caveat(study).lower() and "times variants: 6;" in caveat(study)
    assert "held-out" not in caveat(study)  # where there is no test part images that were trained on are reconstructed
