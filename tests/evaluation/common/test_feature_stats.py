"""Label-free numbers against plain loops in 64 bits, and sets whose numbers are known."""

from dataclasses import FrozenInstanceError
from itertools import combinations
from math import dist, exp, log, sqrt

import numpy as np
import pytest
import torch
from torch import Tensor

from mae.errors import MAEError, UsageError
from mae.evaluation.common import feature_stats as module
from mae.evaluation.common.feature_stats import alignment, measure_spread


def random_features(n: int, width: int, *, seed: int = 0) -> Tensor:
    """Neither centred nor alike in their scales."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, width, generator=generator) * torch.linspace(0.1, 5, width) + 0.7


def unit_rows(features: Tensor) -> list[list[float]]:
    return [[value / sqrt(sum(v * v for v in row)) for value in row] for row in features.double().tolist()]


def slow_numbers(features: Tensor) -> dict[str, float]:
    rows = unit_rows(features)
    n, width = features.shape
    pairs = list(combinations(rows, 2))
    deviations = []
    for column in zip(*rows, strict=True):
        mean = sum(column) / n
        deviations.append(sqrt(sum((value - mean) ** 2 for value in column) / n))
    singular = np.linalg.svd(features.double().numpy(), compute_uv=False)
    shares = [value / singular.sum() + 1e-7 for value in singular]
    return {
        "effective_rank": exp(-sum(share * log(share) for share in shares)),
        "feature_std": sum(deviations) / width * sqrt(width),
        "mean_cosine": sum(sum(a * b for a, b in zip(x, y, strict=True)) for x, y in pairs) / len(pairs),
        "uniformity": log(sum(exp(-2 * dist(x, y) ** 2) for x, y in pairs) / len(pairs)),
    }


@pytest.mark.parametrize("shape", [(40, 7), (9, 30), (2, 3)])
def test_measure_spread_matches_plain_loops(shape):
    features = random_features(*shape)
    found = measure_spread(features).as_dict()
    assert found.pop("alignment") is None
    assert found == pytest.approx(slow_numbers(features), rel=1e-9)


def test_chunks_change_nothing(monkeypatch):
    features, views = random_features(41, 6), (random_features(10, 6, seed=1), random_features(10, 6, seed=2))
    whole = measure_spread(features, views=views)
    monkeypatch.setattr(module, "_VALUES", 20)  # pieces of 3 rows; of one row against the rest for pairs
    assert measure_spread(features, views=views).as_dict() == pytest.approx(whole.as_dict(), rel=1e-12)


def test_orthonormal_rows_have_known_numbers():
    n, width = 16, 24
    found = measure_spread(torch.linalg.qr(random_features(width, n).double()).Q.T.float())
    assert found.effective_rank == pytest.approx(n, rel=1e-4)
    assert found.mean_cosine == pytest.approx(0, abs=1e-6)
    assert found.uniformity == pytest.approx(-4, abs=1e-5)
    found = measure_spread(torch.eye(n) * torch.arange(1, n + 1).unsqueeze(1))  # scale matters to the rank alone
    assert found.feature_std == pytest.approx(sqrt((1 / n - 1 / n**2) * n), rel=1e-6)
    assert found.effective_rank < n - 1


@pytest.mark.parametrize("width", [12, 768])
def test_collapsed_features_are_seen(width):
    row = random_features(1, width)
    found = measure_spread(row * torch.rand(200, 1, generator=torch.Generator().manual_seed(1)).add(0.1))
    assert found.effective_rank == pytest.approx(1, abs=2e-3)
    assert found.feature_std == pytest.approx(0, abs=1e-6)
    assert found.mean_cosine == pytest.approx(1, abs=1e-6)
    assert found.uniformity == pytest.approx(0, abs=1e-6)
    assert measure_spread(row.expand(200, -1)).feature_std == 0


def test_isotropic_features_have_std_one_and_full_rank():
    features = torch.randn(20_000, 64, generator=torch.Generator().manual_seed(0))
    found = measure_spread(features)
    assert found.feature_std == pytest.approx(1, abs=1e-3)
    assert found.mean_cosine == pytest.approx(0, abs=1e-3)
    assert found.effective_rank == pytest.approx(64, abs=0.1)


def test_the_rank_is_not_centred():
    features = random_features(50, 5)
    shifted = measure_spread(features + 100)
    assert shifted.effective_rank == pytest.approx(slow_numbers(features + 100)["effective_rank"], rel=1e-9)
    assert shifted.effective_rank < measure_spread(features).effective_rank - 1


def test_uniformity_takes_some_rows_without_repeating_any(monkeypatch):
    monkeypatch.setattr(module, "_UNIFORMITY_ROWS", 16)
    assert measure_spread(torch.eye(64)).uniformity == pytest.approx(-4, abs=1e-9)  # a row twice would weigh 1
    features = random_features(500, 4)
    assert measure_spread(features) == measure_spread(features)
    few = measure_spread(features).uniformity
    first_rows = measure_spread(features[:16]).uniformity
    monkeypatch.undo()
    whole = measure_spread(features).uniformity
    assert few != whole and few != first_rows
    assert few == pytest.approx(whole, abs=0.5)


def test_alignment_of_two_views():
    first, second = random_features(30, 5), random_features(30, 5, seed=1)
    expected = sum(dist(x, y) ** 2 for x, y in zip(unit_rows(first), unit_rows(second), strict=True)) / 30
    assert alignment(first, second) == pytest.approx(expected, rel=1e-9)
    assert measure_spread(random_features(9, 5), views=(first, second)).alignment == alignment(first, second)
    assert alignment(first, 3 * first) == pytest.approx(0, abs=1e-9)
    assert alignment(first, -first) == pytest.approx(4, rel=1e-9)
    assert alignment(first[:1], second[:1]) > 0


def test_a_memory_mapped_matrix_gives_the_same(tmp_path):
    features = random_features(300, 8)
    np.save(tmp_path / "features.npy", features.numpy())
    mapped = torch.from_numpy(np.load(tmp_path / "features.npy", mmap_mode="r+"))
    assert measure_spread(mapped) == measure_spread(features)


@pytest.mark.parametrize("rows", [0, 1])
def test_too_few_rows_are_reported(rows):
    with pytest.raises(UsageError, match=f"{rows} feature vectors.*give more images"):
        measure_spread(torch.ones(rows, 4))


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_values_that_are_not_finite_are_reported(broken):
    features = random_features(5, 3)
    features[4, 1] = broken
    for wrong in (lambda: measure_spread(features), lambda: alignment(random_features(5, 3), features)):
        with pytest.raises(MAEError, match="not finite"):
            wrong()


def test_zero_vector_is_refused():
    features = random_features(5, 3)
    features[2] = 0
    with pytest.raises(MAEError, match="all zeros"):
        measure_spread(features)


@pytest.mark.parametrize("shapes", [((4, 3), (1, 3)), ((4, 3), (4, 2)), ((0, 3), (0, 3))])
def test_views_that_do_not_match_are_reported(shapes):
    with pytest.raises(UsageError, match="same shape"):
        alignment(*(torch.ones(shape) for shape in shapes))


def test_the_numbers_cannot_be_changed():
    with pytest.raises(FrozenInstanceError):
        measure_spread(random_features(3, 2)).uniformity = 0
