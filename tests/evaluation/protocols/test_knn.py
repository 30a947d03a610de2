"""The protocol of k-NN: what it reports of each feature, few-shot draws, and the k that stands for a model."""

from functools import partial
from math import inf, nan
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_task import by_function, make_task, small_model, striped

from mae.errors import UsageError
from mae.evaluation.common.metrics import top_k_accuracy
from mae.evaluation.common.neighbours import few_shot_draws, knn_rank
from mae.evaluation.common.task import LabelledTask
from mae.evaluation.protocols.knn import Knn, headline_k

rank = partial(knn_rank, device=torch.device("cpu"))


@pytest.fixture
def task(tmp_path: Path) -> LabelledTask:
    return make_task(tmp_path, small_model(), train=striped(60, seed=1), test=striped(50, seed=2))


def test_knn_reports_every_feature(task: LabelledTask):
    result = Knn(ks=(1, 10, 60), temperature=0.2).run(task)
    assert list(result.numbers) == ["this model", "random weights", "raw pixels"]
    assert list(result.numbers["this model"]) == ["cls", "mean"] and list(result.numbers["raw pixels"]) == ["pixels"]
    train, test = task.features("train"), task.features("test")
    for name in ("cls", "mean"):
        votes = rank(train[name], task.labels("train"), test[name], ks=[1, 10, 60], num_classes=3, temperature=0.2)
        assert result.numbers["this model"][name] == {
            str(k): {"top1": top_k_accuracy(of[:, :1], task.labels("test")), "top5": None if k < 3 else 1.0}
            for k, of in votes.items()
        }
        if name == "mean":
            assert result.ranking is not None and torch.equal(result.ranking, votes[10])
    assert result.header == ("features", "k=1", "k=10", "k=60")
    assert len(result.rows) == 5 and all(len(row) == 4 for row in result.rows)
    shares = [f"{of['top1']:.1%}" for of in result.numbers["this model"]["cls"].values()]
    assert result.rows[0] == ("this model, cls", *shares)
    assert result.note == "Top-1; top-3 at k=10: cls 100.0%, mean 100.0%."
    assert list(Knn(baselines=False).run(task).numbers) == ["this model"]


def test_few_shots_are_the_mean_of_their_draws(task: LabelledTask):
    result = Knn(ks=(1, 6, 7), shots=(2, 1), draws=4, baselines=False).run(task)
    train, test = task.features("train")["mean"], task.features("test")["mean"]
    labels = task.labels("train")
    found = result.numbers["this model"]["mean"]
    for shots in (2, 1):
        shares = [
            top_k_accuracy(rank(train[rows], labels[rows], test, ks=[1], num_classes=3)[1][:, :1], task.labels("test"))
            for rows in few_shot_draws(labels, shots=shots, draws=4, seed=0, num_classes=3)
        ]
        few = found[f"{shots} shots"]
        assert few["1"] == {"mean": pytest.approx(np.mean(shares)), "std": pytest.approx(np.std(shares, ddof=1))}
        assert few["1"]["std"] > 0
    assert found["2 shots"]["6"] is not None and found["2 shots"]["7"] is None  # six images vote
    assert found["1 shots"]["6"] is None
    few = found["2 shots"]["1"]
    shown = f"{few['mean']:.1%} ± {100 * few['std']:.1f}"
    assert [row[0] for row in result.rows] == [
        f"this model, {name}{of}" for name in ("cls", "mean") for of in ("", ", 2 shots", ", 1 shots")
    ]
    assert result.rows[4][1] == shown and result.rows[4][3] == "" and {len(row) for row in result.rows} == {4}
    assert result.note.endswith("Few-shot: mean and std of 4 draws.")
    alone = Knn(ks=(1,), shots=(2,), draws=1, baselines=False).run(task)
    assert alone.numbers["this model"]["mean"]["2 shots"]["1"]["std"] == 0
    with pytest.raises(UsageError, match="a draw takes 40"):
        Knn(shots=(40,)).run(task)


def test_another_seed_draws_other_shots(tmp_path: Path):
    data = {"train": striped(60, seed=1), "test": striped(50, seed=2)}
    function = by_function(lambda images: images.flatten(1), img_size=(16, 16))
    found = [
        Knn(ks=(1,), shots=(1,)).run(make_task(tmp_path, function, seed=seed, **data)).numbers["this model"]["features"]
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


def test_k_above_the_training_size_has_no_number(task: LabelledTask):
    result = Knn(ks=(1, 60, 61, 200), temperature=0.2).run(task)
    whole = Knn(ks=(60,), temperature=0.2).run(task)
    for who, by_name in result.numbers.items():
        for name, found in by_name.items():
            assert list(found) == ["1", "60", "61", "200"] and found["61"] is found["200"] is None
            assert found["60"] == whole.numbers[who][name]["60"] != found["1"]
    assert all(row[3:] == ("", "") and row[1].endswith("%") and row[2].endswith("%") for row in result.rows)
    assert result.ranking is not None and torch.equal(result.ranking, Knn(ks=(1,), baselines=False).run(task).ranking)
    with pytest.raises(UsageError, match=r"60 training images vote; give a k up to 60"):
        Knn(ks=(61,)).run(task)


@pytest.mark.parametrize("classes", [4, 5, 7])
def test_top_five_is_reported_where_enough_classes_can_get_a_vote(tmp_path: Path, classes: int):
    generator = torch.Generator().manual_seed(0)
    parts = [
        (torch.randint(256, (40, 8, 8, 1), generator=generator, dtype=torch.uint8).numpy(), torch.arange(40) % classes)
        for _ in range(2)
    ]
    function = by_function(lambda images: images.flatten(1), img_size=(8, 8))
    task = make_task(tmp_path, function, train=parts[0], test=parts[1], num_classes=classes)
    top = min(5, classes)
    result = Knn(ks=(top - 1, top), baselines=False).run(task)
    found = result.numbers["this model"]["features"]
    assert found[str(top - 1)]["top5"] is None and found[str(top - 1)]["top1"] >= 0
    votes = rank(
        task.features("train")["features"],
        task.labels("train"),
        task.features("test")["features"],
        ks=[top],
        num_classes=classes,
        top=top,
    )
    share = found[str(top)]["top5"]
    assert share == top_k_accuracy(votes[top], task.labels("test"))
    assert result.note == f"Top-1; top-{top} at k={top}: features {share:.1%}."
    assert Knn(ks=(top - 1,), baselines=False).run(task).note == "Top-1."


def test_top_five_of_zero_is_reported(tmp_path: Path):
    pixels = np.arange(48, dtype=np.uint8).reshape(12, 2, 2, 1)
    function = by_function(lambda images: images.flatten(1), img_size=(2, 2))
    labels = torch.tensor([0, 1, 2, 3, 4, 5] * 2)
    test = pixels + 100, torch.full((12,), 6)  # a class that no training image has
    task = make_task(tmp_path, function, train=(pixels, labels), test=test, num_classes=7)
    assert Knn(ks=(5,), baselines=False).run(task).note == "Top-1; top-5 at k=5: features 0.0%."


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


def test_too_many_shots_are_refused_before_any_feature(task: LabelledTask, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(LabelledTask, "contenders", lambda self, **options: pytest.fail("features are computed"))
    with pytest.raises(UsageError, match="a draw takes 99"):
        Knn(shots=(99,)).run(task)
