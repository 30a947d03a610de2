"""The vote against scikit-learn's, against a loop, where neighbours or classes tie, and however the work is cut."""

from functools import partial
from math import exp, inf, nan
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.neighbors import KNeighborsClassifier
from tiny_bench import by_function, make_bench, small_model, striped

from mae.errors import MAEError, UsageError
from mae.evaluation import knn
from mae.evaluation.bench import Bench
from mae.evaluation.knn import Knn, few_shot_draws, headline_k, knn_rank
from mae.evaluation.scores import top_k_accuracy

rank = partial(knn_rank, device=torch.device("cpu"))


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


def test_brute_force_in_float64_agrees():
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


def test_how_the_work_is_cut_changes_nothing(monkeypatch):
    # Copies of samples under other classes: their order must not hang on rounding, which differs with the cut.
    generator = torch.Generator().manual_seed(4)
    originals = torch.randn(100, 37, generator=generator)
    train = originals.repeat(9, 1)[torch.randperm(900, generator=generator)]
    labels = torch.randint(6, (900,), generator=generator)
    test = torch.cat([originals, torch.randn(33, 37, generator=generator)])
    vote = partial(rank, train, labels, test, ks=[1, 3, 12, 900], num_classes=6)
    whole = vote(chunk=1000, bank_chunk=1000)
    monkeypatch.setattr(knn, "_QUERY_BLOCK", 50)
    for chunk, bank_chunk in ((1, 900), (7, 13), (64, 1), (50, 100)):
        cut = vote(chunk=chunk, bank_chunk=bank_chunk)
        assert all(torch.equal(cut[k], whole[k]) for k in whole)


def test_features_in_a_file_and_in_half_precision(tmp_path):
    (train, labels), (test, _) = clusters(300, 1), clusters(40, 2)
    np.save(tmp_path / "bank.npy", train.half().numpy())
    mapped = torch.from_numpy(np.load(tmp_path / "bank.npy", mmap_mode="c"))
    found = rank(mapped, labels, test, ks=[20], num_classes=5, bank_chunk=100)
    assert torch.equal(found[20], rank(train.half().float(), labels, test, ks=[20], num_classes=5)[20])


def test_a_copy_of_a_sample_finds_it():
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


def test_large_ties_are_settled_by_number():
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


def test_what_cannot_vote_is_refused():
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


def test_a_k_given_twice_is_judged_once():
    (train, labels), (test, _) = clusters(30, 1), clusters(10, 2)
    found = rank(train, labels, test, ks=[5, 5], num_classes=5)
    assert list(found) == [5] and torch.equal(found[5], rank(train, labels, test, ks=[5], num_classes=5)[5])


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return make_bench(tmp_path, small_model(), train=striped(60, seed=1), test=striped(50, seed=2))


def test_the_protocol_tells_the_votes_of_every_feature(bench: Bench):
    outcome = Knn(ks=(1, 10, 60), temperature=0.2).run(bench)
    assert list(outcome.result) == ["this model", "random weights", "raw pixels"]
    assert list(outcome.result["this model"]) == ["cls", "mean"] and list(outcome.result["raw pixels"]) == ["pixels"]
    train, test = bench.features("train"), bench.features("test")
    for name in ("cls", "mean"):
        votes = rank(train[name], bench.labels("train"), test[name], ks=[1, 10, 60], num_classes=3, temperature=0.2)
        assert outcome.result["this model"][name] == {
            str(k): {"top1": top_k_accuracy(of[:, :1], bench.labels("test")), "top5": None if k < 3 else 1.0}
            for k, of in votes.items()
        }
        if name == "mean":
            assert outcome.ranking is not None and torch.equal(outcome.ranking, votes[10])
    assert outcome.header == ("features", "k=1", "k=10", "k=60")
    assert len(outcome.rows) == 5 and all(len(row) == 4 for row in outcome.rows)
    shares = [f"{of['top1']:.1%}" for of in outcome.result["this model"]["cls"].values()]
    assert outcome.rows[0] == ("this model, cls", *shares)
    assert outcome.note == "Top-1; top-3 at k=10: cls 100.0%, mean 100.0%."
    assert list(Knn(comparators=False).run(bench).result) == ["this model"]


def test_few_shots_are_the_mean_of_their_draws(bench: Bench):
    outcome = Knn(ks=(1, 6, 7), shots=(2, 1), draws=4, comparators=False).run(bench)
    train, test = bench.features("train")["mean"], bench.features("test")["mean"]
    labels = bench.labels("train")
    found = outcome.result["this model"]["mean"]
    for shots in (2, 1):
        shares = [
            top_k_accuracy(rank(train[rows], labels[rows], test, ks=[1], num_classes=3)[1][:, :1], bench.labels("test"))
            for rows in few_shot_draws(labels, shots=shots, draws=4, seed=0, num_classes=3)
        ]
        few = found[f"{shots} shots"]
        assert few["1"] == {"mean": pytest.approx(np.mean(shares)), "std": pytest.approx(np.std(shares, ddof=1))}
        assert few["1"]["std"] > 0
    assert found["2 shots"]["6"] is not None and found["2 shots"]["7"] is None  # six images vote
    assert found["1 shots"]["6"] is None
    few = found["2 shots"]["1"]
    shown = f"{few['mean']:.1%} ± {100 * few['std']:.1f}"
    assert [row[0] for row in outcome.rows] == [
        f"this model, {name}{of}" for name in ("cls", "mean") for of in ("", ", 2 a class", ", 1 a class")
    ]
    assert outcome.rows[4][1] == shown and outcome.rows[4][3] == "" and {len(row) for row in outcome.rows} == {4}
    assert outcome.note.endswith("Few-shot: mean and deviation of 4 draws.")
    alone = Knn(ks=(1,), shots=(2,), draws=1, comparators=False).run(bench)
    assert alone.result["this model"]["mean"]["2 shots"]["1"]["std"] == 0
    with pytest.raises(UsageError, match="a draw takes 40"):
        Knn(shots=(40,)).run(bench)


def test_another_seed_draws_other_shots(tmp_path: Path):
    data = {"train": striped(60, seed=1), "test": striped(50, seed=2)}
    function = by_function(lambda images: images.flatten(1), img_size=(16, 16))
    found = [
        Knn(ks=(1,), shots=(1,)).run(make_bench(tmp_path, function, seed=seed, **data)).result["this model"]["features"]
        for seed in (0, 1)
    ]
    assert found[0]["1"] == found[1]["1"] and found[0]["1 shots"] != found[1]["1 shots"]


@pytest.mark.parametrize(("ks", "expected"), [((1, 10, 20, 100), 20), ((1, 5), 5), ((200, 25, 15), 15), ((100,), 100)])
def test_the_headline_is_the_k_nearest_to_twenty(ks: tuple[int, ...], expected: int):
    assert headline_k(ks, voters=200) == expected


def test_the_headline_is_a_k_for_which_enough_images_vote():
    assert headline_k((1, 10, 20, 100), voters=19) == 10
    assert headline_k((1, 20), voters=20) == 20
    with pytest.raises(UsageError, match=r"ks is \[20, 100\], but 19 training images vote; give a k up to 19"):
        headline_k((20, 100), voters=19)


def test_a_k_above_the_number_of_training_images_has_no_number(bench: Bench):
    outcome = Knn(ks=(1, 60, 61, 200), temperature=0.2).run(bench)
    whole = Knn(ks=(60,), temperature=0.2).run(bench)
    for who, by_name in outcome.result.items():
        for name, found in by_name.items():
            assert list(found) == ["1", "60", "61", "200"] and found["61"] is found["200"] is None
            assert found["60"] == whole.result[who][name]["60"] != found["1"]
    assert all(row[3:] == ("", "") and row[1].endswith("%") and row[2].endswith("%") for row in outcome.rows)
    assert outcome.ranking is not None and torch.equal(
        outcome.ranking, Knn(ks=(1,), comparators=False).run(bench).ranking
    )
    with pytest.raises(UsageError, match=r"60 training images vote; give a k up to 60"):
        Knn(ks=(61,)).run(bench)


@pytest.mark.parametrize("classes", [4, 5, 7])
def test_top_five_is_told_where_so_many_can_have_a_vote(tmp_path: Path, classes: int):
    generator = torch.Generator().manual_seed(0)
    parts = [
        (torch.randint(256, (40, 8, 8, 1), generator=generator, dtype=torch.uint8).numpy(), torch.arange(40) % classes)
        for _ in range(2)
    ]
    function = by_function(lambda images: images.flatten(1), img_size=(8, 8))
    bench = make_bench(tmp_path, function, train=parts[0], test=parts[1], num_classes=classes)
    top = min(5, classes)
    outcome = Knn(ks=(top - 1, top), comparators=False).run(bench)
    found = outcome.result["this model"]["features"]
    assert found[str(top - 1)]["top5"] is None and found[str(top - 1)]["top1"] >= 0
    votes = rank(
        bench.features("train")["features"],
        bench.labels("train"),
        bench.features("test")["features"],
        ks=[top],
        num_classes=classes,
        top=top,
    )
    share = found[str(top)]["top5"]
    assert share == top_k_accuracy(votes[top], bench.labels("test"))
    assert outcome.note == f"Top-1; top-{top} at k={top}: features {share:.1%}."
    assert Knn(ks=(top - 1,), comparators=False).run(bench).note == "Top-1."


def test_a_top_five_of_nothing_is_told_too(tmp_path: Path):
    pixels = np.arange(48, dtype=np.uint8).reshape(12, 2, 2, 1)
    function = by_function(lambda images: images.flatten(1), img_size=(2, 2))
    labels = torch.tensor([0, 1, 2, 3, 4, 5] * 2)
    test = pixels + 100, torch.full((12,), 6)  # a class that no training image has
    bench = make_bench(tmp_path, function, train=(pixels, labels), test=test, num_classes=7)
    assert Knn(ks=(5,), comparators=False).run(bench).note == "Top-1; top-5 at k=5: features 0.0%."


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ks": (1, 0)}, r"ks is \[1, 0\]; expected different numbers of 1 or more"),
        ({"ks": (5, 1, 5)}, r"ks is \[5, 1, 5\]"),
        ({"shots": (-1,)}, r"shots is \[-1\]"),
        ({"ks": ()}, r"ks \[\]"),
        ({"draws": 0}, "draws 0"),
        ({"temperature": inf}, "temperature inf"),
        ({"temperature": nan}, "temperature nan"),
    ],
)
def test_values_out_of_range_are_refused(options: dict[str, Any], message: str):
    with pytest.raises(UsageError, match=message):
        Knn(**options)
