"""The vote against scikit-learn's, against a loop, where neighbours or classes tie, and however the work is cut."""

from functools import partial
from math import exp, nan

import numpy as np
import pytest
import torch
from sklearn.neighbors import KNeighborsClassifier

from mae.errors import MAEError, UsageError
from mae.evaluation.common import neighbours
from mae.evaluation.common.metrics import top_k_accuracy
from mae.evaluation.common.neighbours import few_shot_draws, knn_rank

rank = partial(knn_rank, device=torch.device("cpu"))


def clusters(num: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Five overlapping classes in 8 dimensions, of different lengths."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(5, (num,), generator=generator)
    centres = torch.randn(5, 8, generator=torch.Generator().manual_seed(99))
    features = centres[labels] + 1.2 * torch.randn(num, 8, generator=generator)
    return features * (0.1 + 5 * torch.rand(num, 1, generator=generator)), labels


@pytest.mark.parametrize("temperature", [0.07, 0.5])
def test_knn_matches_sklearn(temperature):
    (train, train_labels), (test, test_labels) = clusters(200, 1), clusters(90, 2)
    ks = [1, 5, 20, 200]
    found = rank(train, train_labels, test, ks=ks, num_classes=5, temperature=temperature, chunk=17, bank_chunk=31)
    shares = {k: top_k_accuracy(found[k][:, :1], test_labels) for k in ks}
    for k in ks:
        oracle = KNeighborsClassifier(
            n_neighbors=k,
            metric="cosine",
            algorithm="brute",
            weights=lambda distance: np.exp((1 - distance) / temperature),
        ).fit(train.double().numpy(), train_labels.numpy())
        assert np.array_equal(found[k][:, 0].numpy(), oracle.predict(test.double().numpy()))
        assert shares[k] == pytest.approx(oracle.score(test.double().numpy(), test_labels.numpy()))
        order = np.argsort(-oracle.predict_proba(test.double().numpy()), axis=1, kind="stable")
        assert np.array_equal(found[k].numpy(), order)
    assert len(set(shares.values())) > 1 and 0.3 < shares[20] < 1


def test_knn_matches_brute_force_in_float64():
    generator = torch.Generator().manual_seed(3)
    train, test = (torch.randn(num, 64, generator=generator) for num in (2000, 300))
    labels = torch.randint(10, (2000,), generator=generator)
    found = rank(train, labels, test, ks=[1, 20, 200], num_classes=10, top=3, bank_chunk=300)
    bank, queries = (x.double() / x.double().square().sum(1, keepdim=True).sqrt() for x in (train, test))
    values, order = (queries @ bank.T).sort(dim=1, descending=True)
    for k in found:
        votes = torch.zeros(300, 10, dtype=torch.float64)
        for column in range(k):
            votes[range(300), labels[order[:, column]]] += (values[:, column] / 0.07).exp()
        assert torch.equal(found[k], votes.argsort(dim=1, descending=True, stable=True)[:, :3])


def test_chunk_sizes_change_nothing(monkeypatch):
    # Copies of samples under other classes: their order must not hang on rounding, which differs with the cut.
    generator = torch.Generator().manual_seed(4)
    originals = torch.randn(100, 37, generator=generator)
    train = originals.repeat(9, 1)[torch.randperm(900, generator=generator)]
    labels = torch.randint(6, (900,), generator=generator)
    test = torch.cat([originals, torch.randn(33, 37, generator=generator)])
    vote = partial(rank, train, labels, test, ks=[1, 3, 12, 900], num_classes=6)
    whole = vote(chunk=1000, bank_chunk=1000)
    monkeypatch.setattr(neighbours, "_QUERY_BLOCK", 50)
    for chunk, bank_chunk in ((1, 900), (7, 13), (64, 1), (50, 100)):
        cut = vote(chunk=chunk, bank_chunk=bank_chunk)
        assert all(torch.equal(cut[k], whole[k]) for k in whole)


def test_features_in_a_file_and_in_half_precision(tmp_path):
    (train, labels), (test, _) = clusters(300, 1), clusters(40, 2)
    np.save(tmp_path / "bank.npy", train.half().numpy())
    mapped = torch.from_numpy(np.load(tmp_path / "bank.npy", mmap_mode="c"))
    found = rank(mapped, labels, test, ks=[20], num_classes=5, bank_chunk=100)
    assert torch.equal(found[20], rank(train.half().float(), labels, test, ks=[20], num_classes=5)[20])


def test_nearest_neighbour_of_a_copy_is_its_original():
    train, labels = clusters(100, 1)
    assert torch.equal(rank(train, labels, 3 * train, ks=[1], num_classes=5)[1][:, 0], labels)


def slow_classes(train: list[list[float]], labels: list[int], query: list[float], k: int) -> list[int]:
    def cosine(a: list[float], b: list[float]) -> float:
        lengths = (sum(x * x for x in a) * sum(x * x for x in b)) ** 0.5
        return round(sum(x * y for x, y in zip(a, b, strict=True)) / lengths, 9) if lengths else 0.0

    similarity = [cosine(query, row) for row in train]
    nearest = sorted(range(len(train)), key=lambda number: (-similarity[number], number))[:k]
    votes = [0.0] * 3
    for number in nearest:
        votes[labels[number]] += exp(similarity[number] / 0.07)
    return sorted(range(3), key=lambda label: (-float(f"{votes[label]:.9e}"), label))


def test_ties_go_to_the_lowest_number_and_the_lowest_class():
    # Few directions, each many times: nearly every boundary and many votes tie.
    generator = torch.Generator().manual_seed(0)
    directions = torch.tensor([[1.0, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1], [-1, 0, 0, 0], [0, 0, 0, 0]])
    train = directions[torch.randint(6, (40,), generator=generator)]
    labels = torch.randint(3, (40,), generator=generator)
    test = torch.cat([directions, 2 * directions])
    found = rank(train, labels, test, ks=range(1, 41), num_classes=3, chunk=5, bank_chunk=7)
    for k in range(1, 41):
        expected = [slow_classes(train.tolist(), labels.tolist(), query, k)[0] for query in test.tolist()]
        assert found[k][:, 0].tolist() == expected
        assert torch.equal(rank(train, labels, test, ks=[k], num_classes=3)[k], found[k])


def test_large_ties_are_decided_by_number():
    train, labels = torch.ones(5000, 4), torch.ones(5000, dtype=torch.long)
    labels[:3] = 0
    found = rank(train, labels, torch.ones(2, 4), ks=[3, 5, 7], num_classes=2, bank_chunk=999)
    assert [found[k][:, 0].tolist() for k in (3, 5, 7)] == [[0, 0], [0, 0], [1, 1]]


def test_classes_without_a_vote_follow_by_number():
    found = rank(torch.ones(1, 2), torch.tensor([2]), torch.ones(1, 2), ks=[1], num_classes=4)
    assert found[1].tolist() == [[2, 0, 1, 3]]


def test_more_neighbours_than_samples_are_all_of_them():
    (train, labels), (test, _) = clusters(30, 1), clusters(10, 2)
    found = rank(train, labels, test, ks=[1000, 30], num_classes=5)
    assert torch.equal(found[1000], found[30])


def test_a_tiny_temperature_is_the_nearest_neighbour_and_overflows_nothing():
    (train, labels), (test, _) = clusters(50, 1), clusters(20, 2)
    found = rank(train, labels, test, ks=[20], num_classes=5, temperature=1e-4, top=1)
    assert torch.equal(found[20], rank(train, labels, test, ks=[1], num_classes=5, top=1)[1])


def test_knn_refuses_wrong_input():
    (train, labels), (test, _) = clusters(30, 1), clusters(10, 2)
    with pytest.raises(UsageError, match="expected 0 to 2"):
        rank(train, labels, test, ks=[1], num_classes=3)
    with pytest.raises(UsageError, match="k is"):
        rank(train, labels, test, ks=[0], num_classes=5)
    with pytest.raises(UsageError, match="k is"):
        rank(train, labels, test, ks=[], num_classes=5)
    with pytest.raises(UsageError, match="no training samples"):
        rank(train[:0], labels[:0], test, ks=[1], num_classes=5)
    for spoiled in ((train, test * nan), (train * nan, test)):
        with pytest.raises(MAEError, match="not finite"):
            rank(spoiled[0], labels, spoiled[1], ks=[1], num_classes=5)


def test_few_shot_draws_take_each_class_alike():
    labels = torch.tensor([2, 0, 1, 1, 0, 2, 1, 0, 2, 2, 1, 1])
    draws = few_shot_draws(labels, shots=3, draws=200, seed=5, num_classes=3)
    assert draws.shape == (200, 9)
    for draw in draws:
        assert labels[draw].tolist() == [0] * 3 + [1] * 3 + [2] * 3
        assert len(set(draw.tolist())) == 9
    times = torch.bincount(draws.flatten(), minlength=12) / 200
    expected = torch.tensor([0.75, 1, 0.6, 0.6, 1, 0.75, 0.6, 1, 0.75, 0.75, 0.6, 0.6])
    assert (times - expected).abs().max() < 0.15  # four standard errors
    assert torch.equal(few_shot_draws(labels, shots=3, draws=3, seed=5, num_classes=3), draws[:3])
    assert not torch.equal(few_shot_draws(labels, shots=3, draws=3, seed=6, num_classes=3), draws[:3])
    assert draws[0].tolist() == [1, 7, 4, 2, 6, 11, 9, 8, 5]  # on every machine


def test_a_class_too_small_for_a_draw_is_refused():
    with pytest.raises(UsageError, match="class 1 has 2 samples"):
        few_shot_draws(torch.tensor([0, 0, 0, 1, 1]), shots=3, draws=1, seed=0, num_classes=2)
    with pytest.raises(UsageError, match="class 2 has 0 samples"):
        few_shot_draws(torch.tensor([0, 1]), shots=1, draws=1, seed=0, num_classes=3)


def test_repeated_k_is_evaluated_once():
    (train, labels), (test, _) = clusters(30, 1), clusters(10, 2)
    found = rank(train, labels, test, ks=[5, 5], num_classes=5)
    assert list(found) == [5] and torch.equal(found[5], rank(train, labels, test, ks=[5], num_classes=5)[5])
