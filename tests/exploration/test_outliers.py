"""Odd images and near duplicates, planted among features."""

import torch
from torch.nn.functional import normalize

from mae.evaluation.common.neighbours import nearest_others
from mae.exploration.outliers import find_near_duplicates, find_odd

CPU = torch.device("cpu")
NUM = 200
DIFFERENT = torch.arange(NUM)  # digests of images of which no two have the same pixels


def neighbours_of(features: torch.Tensor, k: int = 12) -> tuple[torch.Tensor, torch.Tensor]:
    return nearest_others(features - features.mean(dim=0), torch.arange(len(features)), k=k, device=CPU)


def groups(seed: int = 0) -> torch.Tensor:
    """Five groups of features about directions of their own."""
    generator = torch.Generator().manual_seed(seed)
    centres = torch.eye(8)[:5] * 4
    return centres[torch.arange(NUM) % 5] + 0.5 * torch.randn(NUM, 8, generator=generator)


def test_a_planted_odd_image_is_found_and_no_other():
    features = groups()
    assert len(find_odd(neighbours_of(features)[0]).far_out) == 0
    features[17] = 5 * torch.eye(8)[7] - 5 * torch.eye(8)[6]
    odd = find_odd(neighbours_of(features)[0])
    assert odd.far_out.tolist() == [17] and int(odd.order[0]) == 17


def test_copies_of_an_odd_image_do_not_hide_it():
    features = groups()
    features[[17, 40]] = 5 * torch.eye(8)[7] - 5 * torch.eye(8)[6]
    assert set(find_odd(neighbours_of(features)[0]).far_out.tolist()) == {17, 40}


def test_scores_are_those_of_a_slow_loop():
    features = groups()
    centred = (features - features.mean(dim=0)).double()
    scores = find_odd(neighbours_of(features)[0]).scores
    for row in (0, 33, NUM - 1):
        distances = [
            float((normalize(centred[row], dim=0) - normalize(centred[other], dim=0)).norm())
            for other in range(NUM)
            if other != row
        ]
        assert abs(float(scores[row]) - sum(sorted(distances)[:10]) / 10) < 1e-5


def test_planted_copies_are_found_once_a_pair_and_no_others():
    features = groups()
    assert len(find_near_duplicates(*neighbours_of(features), DIFFERENT).pairs) == 0
    features[90] = features[5]
    features[120] = features[5] + 1e-3
    found = find_near_duplicates(*neighbours_of(features), DIFFERENT)
    assert sorted(found.pairs.tolist()) == [[5, 90], [5, 120], [90, 120]]
    assert found.pairs[0].tolist() == [5, 90] and abs(float(found.cosines[0]) - 1) < 1e-6
    assert bool((found.cosines.diff() <= 0).all()) and bool((found.cosines >= found.threshold).all())


def test_more_copies_than_neighbours_are_still_copies():
    features = groups()
    features[:20] = features[0].clone()
    pairs = find_near_duplicates(*neighbours_of(features), DIFFERENT).pairs
    assert set(pairs.flatten().tolist()) == set(range(20))
    assert bool((pairs[:, 0] < pairs[:, 1]).all())


def test_images_with_the_same_pixels_are_pairs_though_their_features_have_no_direction():
    features, digests = torch.full((5, 8), 0.3), torch.tensor([7, 7, 7, 9, 7])
    found = find_near_duplicates(*neighbours_of(features, k=4), digests)
    assert sorted(found.pairs.tolist()) == [[0, 1], [0, 2], [0, 4], [1, 2], [1, 4], [2, 4]]
