"""Scores of layers, on features planted with a class and a rank."""

from math import exp, log

import pytest
import torch

from mae.errors import UsageError
from mae.evaluation.common.feature_stats import effective_rank, measure_spread, singular_spectrum
from mae.evaluation.common.layer_stats import halves_of, measure_layer

CPU = torch.device("cpu")
NUM = 120


def labels() -> torch.Tensor:
    """Four classes numbered 3 to 6, and every tenth row without one."""
    of = 3 + torch.arange(NUM) % 4
    of[::10] = -1
    return of


@pytest.mark.parametrize("rank", [1, 3, 8])
def test_features_of_known_rank_have_it(rank: int):
    basis = torch.linalg.qr(torch.randn(NUM, 16, generator=torch.Generator().manual_seed(0))).Q[:, :rank]
    directions = torch.linalg.qr(torch.randn(16, 16, generator=torch.Generator().manual_seed(1))).Q[:rank]
    spectrum = singular_spectrum(basis @ directions)
    assert spectrum[:rank].tolist() == pytest.approx([1 / rank] * rank, rel=1e-4)
    assert float(spectrum[rank:].sum()) < 1e-5
    assert effective_rank(spectrum) == pytest.approx(rank, rel=1e-3)


def test_the_spectrum_is_that_of_svd_and_gives_the_same_rank_as_measure_spread():
    features = torch.randn(30, 9, generator=torch.Generator().manual_seed(0)) * torch.arange(1, 10)
    singular = torch.linalg.svdvals(features.double())
    assert singular_spectrum(features).tolist() == pytest.approx((singular / singular.sum()).tolist())
    shares = [value + 1e-7 for value in (singular / singular.sum()).tolist()]
    rank = exp(-sum(share * log(share) for share in shares))
    assert measure_layer(features, None, device=CPU).effective_rank == pytest.approx(rank)
    assert measure_spread(features).effective_rank == pytest.approx(rank)


def test_halves_hold_each_labelled_row_once():
    halves = halves_of(labels(), seed=0)
    assert halves is not None and halves.num_classes == 4
    both = torch.cat([halves.train, halves.test]).sort().values
    assert torch.equal(both, (labels() >= 0).nonzero().squeeze(1))
    assert abs(len(halves.train) - len(halves.test)) <= 1
    assert torch.equal(halves.labels[both], labels()[both] - 3)
    commonest = halves.labels[halves.train].bincount().argmax()
    assert halves.majority == pytest.approx(float((halves.labels[halves.test] == commonest).float().mean()))
    assert halves_of(torch.full((NUM,), -1), seed=0) is None
    assert halves_of(torch.full((NUM,), 2), seed=0) is None
    assert halves_of(torch.tensor([0, 1, 0]), seed=0) is None


def test_a_planted_class_is_found_and_noise_is_not():
    halves = halves_of(labels(), seed=0)
    noise = torch.randn(NUM, 16, generator=torch.Generator().manual_seed(0))
    planted = noise + 8 * torch.eye(16)[labels().clamp(min=0)]
    good, bad = (measure_layer(features, halves, device=CPU) for features in (planted, noise))
    assert good.knn == good.probe == 1
    assert bad.knn is not None and bad.knn < 0.5 and bad.probe is not None and bad.probe < 0.5
    without = measure_layer(noise, None, device=CPU)
    assert without.knn is None and without.probe is None
    with pytest.raises(UsageError, match="expected two or more"):
        measure_layer(noise[:1], None, device=CPU)
