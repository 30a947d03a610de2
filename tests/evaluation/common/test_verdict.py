"""What an evaluation says of a model: better, worse or unclear, with intervals by bootstrap over test images."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats
from scipy.stats import bootstrap
from tiny_task import by_function, make_task, small_model, striped

from mae.data.decode.limits import UnreadableImage
from mae.data.sources.memory import ArraySource, whole_array
from mae.evaluation.common.verdict import COMMONEST, Verdict, compare, compare_seeds, overall, verdict_of
from mae.evaluation.protocol import THIS_MODEL
from mae.evaluation.protocols.knn import Knn

IMAGES = 200
LABELS = torch.arange(IMAGES) % 4


def predicted(correct: int, *, seed: int = 0) -> torch.Tensor:
    """Classes of which so many, at random places, are right."""
    wrong = torch.randperm(IMAGES, generator=torch.Generator().manual_seed(seed))[correct:]
    classes = LABELS.clone()
    classes[wrong] = (classes[wrong] + 1) % 4
    return classes


def compared(ours: int, **theirs: int) -> Verdict:
    """Of a model and baselines that get so many images right."""
    others = {name: predicted(correct, seed=number) for number, (name, correct) in enumerate(theirs.items(), 1)}
    verdict = compare({THIS_MODEL: predicted(ours), **others}, LABELS, counted=torch.ones(IMAGES, dtype=torch.bool))
    assert verdict is not None
    return verdict


def test_intervals_are_those_of_scipys_paired_bootstrap():
    verdict = compared(150, pixels=120)
    ours, theirs = (predicted(150) == LABELS).double(), (predicted(120, seed=1) == LABELS).double()
    for found, values in ((verdict, ours), (verdict.differences[0], ours - theirs)):
        expected = bootstrap((values.numpy(),), lambda x, axis: x.mean(axis), method="percentile", rng=0)
        # 10,000 resamples each: the ends differ by about a hundredth of the interval.
        assert found.low == pytest.approx(expected.confidence_interval.low, abs=0.006)
        assert found.high == pytest.approx(expected.confidence_interval.high, abs=0.006)
    assert verdict.differences[0].share == pytest.approx(30 / IMAGES)
    assert verdict.accuracy == pytest.approx(0.75)


@pytest.mark.parametrize("images", [1, 5, 6, 50])
def test_images_that_all_say_the_same_leave_an_interval(images: int):
    labels, counted = torch.zeros(images, dtype=torch.long), torch.ones(images, dtype=torch.bool)
    verdict = compare({THIS_MODEL: labels, "pixels": labels + 1, "scratch": labels}, labels, counted=counted)
    assert verdict is not None
    exact = stats.binomtest(images, images).proportion_ci(method="exact")
    assert (verdict.low, verdict.high) == pytest.approx((exact.low, 1.0))
    pixels, scratch = verdict.differences
    # As the sign test at 5 %, which needs six images.
    assert (pixels.answer == "better") == (stats.binomtest(images, images).pvalue < 0.05) == (images >= 6)
    assert pixels.high == 1 and (scratch.low, scratch.high) == pytest.approx((exact.low - 1, 1 - exact.low))


def test_classes_that_are_told_apart_without_learning_get_another_advice():
    verdict = compared(200, pixels=200)
    assert "evaluate on classes that are harder to tell apart" in str(verdict) and "Train longer" not in str(verdict)


def test_better_than_all():
    verdict = compared(180, pixels=120, random=100)
    assert verdict.answer == "better"
    assert str(verdict).startswith("Verdict: of use here: 90.0% (")
    assert "better than pixels by 30.0 points (95 % interval " in str(verdict)
    assert "and random by 40.0 points" in str(verdict)


def test_worse_than_one_learned_nothing_useful():
    verdict = compared(120, pixels=180, random=50)
    assert verdict.answer == "worse"
    assert "nothing useful" in str(verdict) and "worse than pixels by 30.0 points" in str(verdict)
    assert "better than random by 35.0" in str(verdict) and "Train longer" in str(verdict)
    assert "-" not in str(verdict).split("points", 1)[1].split(")")[0], "ends of `worse by` have no sign"


def test_a_small_difference_is_not_shown():
    verdict = compared(151, pixels=150)
    assert verdict.answer == "unclear"
    assert "not shown to be of use" in str(verdict) and "no difference shown from pixels" in str(verdict)
    assert "more test images" in str(verdict)


def test_json_holds_the_sentence_and_its_numbers():
    verdict = compared(180, pixels=120)
    told = json.loads(json.dumps(verdict.to_json()))
    assert told["answer"] == "better" and told["text"] == str(verdict)
    assert told["differences"][0]["low"] <= told["differences"][0]["share"] <= told["differences"][0]["high"]


def test_images_that_do_not_count_are_left_out():
    counted = torch.arange(IMAGES) < 100
    half = torch.where(counted, LABELS, (LABELS + 1) % 4)
    verdict = compare({THIS_MODEL: half, "pixels": predicted(100)}, LABELS, counted=counted)
    assert verdict is not None and verdict.test_images == 100 and verdict.accuracy == 1
    assert compare({THIS_MODEL: half}, LABELS, counted=torch.zeros(IMAGES, dtype=torch.bool)) is None


def test_knn_is_compared_with_its_baselines_or_the_commonest_class(tmp_path: Path):
    parts = {"train": striped(60, seed=0), "test": striped(40, seed=1)}
    task = make_task(tmp_path, small_model(), **parts)
    verdict = verdict_of(task, Knn(ks=(5,)).run(task))
    assert verdict is not None
    assert [difference.baseline for difference in verdict.differences] == ["random weights", "raw pixels"]
    verdict = verdict_of(task, Knn(ks=(5,), baselines=False).run(task))
    assert verdict is not None
    (difference,) = verdict.differences
    majority = float((parts["test"][1] == 0).float().mean())
    assert difference.baseline == COMMONEST
    assert verdict.accuracy - difference.share == pytest.approx(majority)


class Damaged(ArraySource):
    """The first image cannot be read."""

    def read(self, index: int) -> np.ndarray:
        if index == 0:
            raise UnreadableImage("broken for this test")
        return super().read(index)


def test_the_commonest_class_is_counted_on_the_images_that_the_model_is(tmp_path: Path):
    images, labels = (
        np.random.default_rng(0).integers(0, 255, (4, 16, 16, 1), dtype=np.uint8),
        torch.tensor([0, 0, 1, 1]),
    )
    whole = Damaged(**vars(whole_array(images, name="damaged", note="")))
    task = make_task(tmp_path, small_model(), train=striped(20, seed=0), test=(whole, labels))
    assert replace(task, max_unreadable=0.5).majority() == pytest.approx(1 / 3)


def test_features_that_know_the_classes_are_of_use_and_noise_is_not(tmp_path: Path):
    parts = {"train": striped(150, seed=0), "test": striped(150, seed=1)}

    def ways(images: torch.Tensor) -> torch.Tensor:
        """How much grey changes along each axis: what tells the stripes apart."""
        return torch.stack([images.diff(dim=axis).abs().mean(dim=(1, 2, 3)) for axis in (2, 3)], dim=1)

    def noise(images: torch.Tensor) -> torch.Tensor:
        return torch.randn(len(images), 8, generator=torch.Generator().manual_seed(int(images.sum()) % 1000))

    answers = {}
    for encode in (ways, noise):
        task = make_task(tmp_path / encode.__name__, by_function(encode, img_size=(16, 16), identity=None), **parts)
        verdict = verdict_of(task, Knn(ks=(5,), baselines=False).run(task))
        assert verdict is not None
        answers[encode.__name__] = verdict.answer
    assert answers["ways"] == "better" and answers["noise"] != "better"


@pytest.mark.parametrize(
    ("answers", "text"),
    [
        (["better", "better"], "Of use here"),
        (["worse", "unclear"], "Nothing useful"),
        (["unclear", "unclear"], "Not shown"),
        (["better", "worse"], "Of use in part: better than what learned nothing by k-NN on frozen"),
    ],
)
def test_several_protocols_are_answered_in_one_line(answers, text):
    of = {"better": compared(180, pixels=100), "worse": compared(100, pixels=180), "unclear": compared(150, pixels=150)}
    titles = ["k-NN on frozen features", "Linear probe"]
    assert text in overall({title: of[answer] for title, answer in zip(titles, answers, strict=True)})
    assert overall({}) == ""


@pytest.mark.parametrize(
    ("theirs", "answer", "told"),
    [
        ([0.1, 0.12, 0.11], "better", "of use here: AP, mean of 3 seeds, 30.0%"),
        ([0.3, 0.28, 0.33], "unclear", "no difference shown from scratch"),
        ([0.5, 0.52, 0.51], "worse", "worse than scratch by"),
    ],
)
def test_numbers_of_seeds_are_compared_in_pairs(theirs: list[float], answer: str, told: str):
    ours = [0.3, 0.31, 0.29]
    verdict = compare_seeds({"this model": ours, "scratch": theirs}, baseline="scratch", measure="AP", test_images=9)
    assert verdict is not None and verdict.answer == answer and told in str(verdict) and "on 9 images" in str(verdict)
    gaps = np.subtract(ours, theirs)
    half = stats.t.ppf(0.975, 2) * gaps.std(ddof=1) / np.sqrt(3)
    (difference,) = verdict.differences
    assert [difference.low, difference.high] == pytest.approx([gaps.mean() - half, gaps.mean() + half])
    assert ("train with more --seeds" in str(verdict)) is (answer == "unclear")


def test_equal_seeds_show_nothing_and_one_seed_or_seeds_that_differ_alike_say_nothing():
    same = compare_seeds({"this model": [0, 0], "scratch": [0, 0]}, baseline="scratch", measure="AP", test_images=9)
    assert same is not None and same.answer == "unclear"
    alone = ({"this model": [0.1], "scratch": [0.0]}, {"this model": [0.1, 0.2]})
    alike = ({"this model": [0.5, 0.5], "scratch": [0.25, 0.25]}, {"this model": [0.3, 0.6], "scratch": [0.2, 0.5]})
    for scores in (*alone, *alike):
        assert compare_seeds(scores, baseline="scratch", measure="AP", test_images=9) is None
