"""The vote against scikit-learn's, against a loop, and where neighbours or classes tie."""

from math import exp, nan

import numpy as np
import pytest
import torch
from sklearn.neighbors import KNeighborsClassifier

from mae.errors import MAEError, UsageError
from mae.evaluation.knn import knn_accuracy, knn_predict


def clusters(num: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Five overlapping classes in 8 dimensions, of different lengths."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(5, (num,), generator=generator)
    centres = torch.randn(5, 8, generator=torch.Generator().manual_seed(99))
    features = centres[labels] + 1.2 * torch.randn(num, 8, generator=generator)
    return features * (0.1 + 5 * torch.rand(num, 1, generator=generator)), labels


@pytest.mark.parametrize("temperature", [0.07, 0.5])
def test_scikit_learn_agrees(temperature):
    (train, train_labels), (test, test_labels) = clusters(200, 1), clusters(90, 2)
    ks = [1, 5, 20, 200]
    found = knn_predict(train, train_labels, test, ks=ks, num_classes=5, temperature=temperature, chunk=17)
    shares = knn_accuracy(train, train_labels, test, test_labels, ks=ks, num_classes=5, temperature=temperature)
    for k in ks:
        oracle = KNeighborsClassifier(
            n_neighbors=k,
            metric="cosine",
            algorithm="brute",
            weights=lambda distance: np.exp((1 - distance) / temperature),
        ).fit(train.double().numpy(), train_labels.numpy())
        assert np.array_equal(found[k].numpy(), oracle.predict(test.double().numpy()))
        assert shares[k] == pytest.approx(oracle.score(test.double().numpy(), test_labels.numpy()))
    assert len(set(shares.values())) > 1 and 0.3 < shares[20] < 1


def slow_class(train: list[list[float]], labels: list[int], query: list[float], k: int) -> int:
    def cosine(a: list[float], b: list[float]) -> float:
        lengths = (sum(x * x for x in a) * sum(x * x for x in b)) ** 0.5
        return round(sum(x * y for x, y in zip(a, b, strict=True)) / lengths, 9) if lengths else 0.0

    similarity = [cosine(query, row) for row in train]
    nearest = sorted(range(len(train)), key=lambda number: (-similarity[number], number))[:k]
    votes = [0.0] * 3
    for number in nearest:
        votes[labels[number]] += exp(similarity[number] / 0.07)
    return next(label for label in range(3) if votes[label] >= max(votes) * (1 - 1e-9))


def test_ties_go_to_the_lowest_number_and_the_lowest_class():
    # Few directions, each many times: nearly every boundary and many votes tie.
    generator = torch.Generator().manual_seed(0)
    directions = torch.tensor([[1.0, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1], [-1, 0, 0, 0], [0, 0, 0, 0]])
    train = directions[torch.randint(6, (40,), generator=generator)]
    labels = torch.randint(3, (40,), generator=generator)
    test = torch.cat([directions, 2 * directions])
    found = knn_predict(train, labels, test, ks=range(1, 41), num_classes=3, chunk=5)
    for k in range(1, 41):
        expected = [slow_class(train.tolist(), labels.tolist(), query, k) for query in test.tolist()]
        assert found[k].tolist() == expected
        assert knn_predict(train, labels, test, ks=[k], num_classes=3)[k].tolist() == expected


def test_large_ties_are_settled_by_number():
    train, labels = torch.ones(5000, 4), torch.ones(5000, dtype=torch.long)
    labels[:3] = 0
    found = knn_predict(train, labels, torch.ones(2, 4), ks=[3, 5, 7], num_classes=2)
    assert [found[k].tolist() for k in (3, 5, 7)] == [[0, 0], [0, 0], [1, 1]]


def test_more_neighbours_than_samples_are_all_of_them():
    (train, labels), (test, _) = clusters(30, 1), clusters(10, 2)
    found = knn_predict(train, labels, test, ks=[1000, 30], num_classes=5)
    assert torch.equal(found[1000], found[30])


def test_a_tiny_temperature_is_the_nearest_neighbour_and_overflows_nothing():
    (train, labels), (test, _) = clusters(50, 1), clusters(20, 2)
    found = knn_predict(train, labels, test, ks=[20], num_classes=5, temperature=1e-4)
    assert torch.equal(found[20], knn_predict(train, labels, test, ks=[1], num_classes=5)[1])


def test_what_cannot_vote_is_refused():
    (train, labels), (test, _) = clusters(30, 1), clusters(10, 2)
    with pytest.raises(UsageError, match="expected 0 to 2"):
        knn_predict(train, labels, test, ks=[1], num_classes=3)
    with pytest.raises(UsageError, match="k is"):
        knn_predict(train, labels, test, ks=[0], num_classes=5)
    with pytest.raises(UsageError, match="k is"):
        knn_predict(train, labels, test, ks=[], num_classes=5)
    with pytest.raises(UsageError, match="no training samples"):
        knn_predict(train[:0], labels[:0], test, ks=[1], num_classes=5)
    with pytest.raises(UsageError, match="no test samples"):
        knn_accuracy(train, labels, test[:0], labels[:0], ks=[1], num_classes=5)
    with pytest.raises(MAEError, match="not finite"):
        knn_predict(train, labels, test * nan, ks=[1], num_classes=5)
