"""Places on a plane: principal components, and UMAP where it is installed."""

import pytest
import torch
from sklearn.decomposition import PCA

from mae.errors import UsageError
from mae.exploration import projection
from mae.exploration.projection import check_projection, project


def two_groups(num: int = 60) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(num, 16, generator=generator)
    features[: num // 2, 3] += 12
    return features - features.mean(dim=0)


def gap(places: torch.Tensor) -> float:
    """Distance of the two halves' centres over their mean spread."""
    halves = places.chunk(2)
    centres = [half.mean(dim=0) for half in halves]
    spread = sum(float((half - centre).norm(dim=1).mean()) for half, centre in zip(halves, centres, strict=True)) / 2
    return float((centres[0] - centres[1]).norm()) / spread


def test_components_are_those_of_scikit_learn_up_to_their_sign():
    features = two_groups()
    places, meaning = project(features, "pca", seed=0)
    oracle = PCA(2).fit(features.double().numpy())
    wanted = torch.from_numpy(oracle.transform(features.double().numpy())).float()
    torch.testing.assert_close(places.abs(), wanted.abs(), rtol=1e-4, atol=1e-4)
    across, up = oracle.explained_variance_ratio_
    assert f"across {across:.0%}" in meaning and f"up {up:.0%}" in meaning


def test_signs_do_not_hang_on_the_order_of_images():
    features = two_groups()
    places, turned = (project(part, "pca", seed=0)[0] for part in (features, features.flip(0)))
    torch.testing.assert_close(places, turned.flip(0), rtol=1e-4, atol=1e-4)


def test_features_of_one_number_and_constant_ones_have_places():
    line = torch.linspace(-1, 1, 5).unsqueeze(1)
    places, _ = project(line, "pca", seed=0)
    torch.testing.assert_close(places, torch.cat([line, 0 * line], dim=1))
    assert bool((project(torch.zeros(5, 4), "pca", seed=0)[0] == 0).all())


def test_planted_groups_are_apart():
    features = two_groups()
    assert gap(project(features, "pca", seed=0)[0]) > 4
    shuffled = features[torch.randperm(len(features), generator=torch.Generator().manual_seed(1))]
    assert gap(project(shuffled, "pca", seed=0)[0]) < 1


@pytest.mark.slow
def test_umap_sets_planted_groups_apart_and_is_the_same_each_time():
    pytest.importorskip("umap", reason="umap-learn is not installed")
    features = two_groups()
    places, meaning = project(features, "umap", seed=0)
    assert gap(places) > 4 and "UMAP" in meaning
    torch.testing.assert_close(project(features, "umap", seed=0)[0], places, rtol=0, atol=0)


def test_what_cannot_be_made_is_refused(monkeypatch: pytest.MonkeyPatch):
    check_projection("pca")
    with pytest.raises(UsageError, match="unknown map 'umpa'; did you mean umap"):
        check_projection("umpa")
    monkeypatch.setattr(projection, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"pip install 'openmae\[umap\]'"):
        check_projection("umap")
