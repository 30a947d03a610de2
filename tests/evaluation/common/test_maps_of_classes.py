"""Classes of pixels from patches, against loops and scikit-learn."""

from dataclasses import replace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from sklearn.metrics import jaccard_score
from sklearn.neighbors import NearestNeighbors
from torch import Tensor

from mae.data.annotations.pixel_classes import IGNORED
from mae.errors import UsageError
from mae.evaluation.common import dense, logistic
from mae.evaluation.common.dense import (
    class_counts,
    dense_scores,
    from_blocks,
    grid_of,
    mean_ious,
    nearest_patches,
    patch_labels,
    resized_map,
    standard_patches,
    to_blocks,
    voted,
)
from mae.evaluation.common.dense_heads import DenseSplit, by_logistic, by_neighbours
from mae.evaluation.common.segmentation_results import segmentation_result
from mae.evaluation.common.task import SegmentationTask
from mae.evaluation.common.verdict import compare_maps
from mae.evaluation.protocol import THIS_MODEL

CPU = torch.device("cpu")


def maps(count: int, size: tuple[int, int] = (4, 6), classes: int = 3, seed: int = 0) -> Tensor:
    draws = torch.Generator().manual_seed(seed)
    found = torch.randint(0, classes, (count, *size), generator=draws).to(torch.uint8)
    found[torch.rand(found.shape, generator=draws) < 0.2] = IGNORED
    return found


def tokens(count: int, patches: int = 6, width: int = 5, seed: int = 0) -> Tensor:
    draws = torch.Generator().manual_seed(seed)
    scale = torch.arange(1, width + 1)
    return (torch.randn(count, patches, width, generator=draws) * scale + 3).half()


def test_blocks_are_the_pixels_of_each_patch_and_go_back():
    whole = torch.arange(2 * 4 * 6).reshape(2, 4, 6).to(torch.uint8)
    blocks = to_blocks(whole, (2, 3))
    assert blocks.shape == (12, 4) and blocks[0].tolist() == [0, 1, 6, 7] and blocks[4].tolist() == [14, 15, 20, 21]
    assert blocks[6].tolist() == [24, 25, 30, 31]
    assert torch.equal(from_blocks(blocks, (2, 3), (4, 6)), whole)


def test_the_grid_is_that_of_square_patches():
    assert grid_of(196, (224, 224)) == (14, 14) and grid_of(6, (4, 6)) == (2, 3) and grid_of(1, (8, 8)) == (1, 1)
    for count, size in ((5, (4, 6)), (197, (224, 224)), (49, (224, 225))):
        with pytest.raises(UsageError, match=f"gives {count} patch tokens for images of {size[0]} x {size[1]}"):
            grid_of(count, size)


def test_patches_are_standardised_as_the_training_part_is(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(logistic, "_CHUNK", 7)
    train, test = tokens(4), tokens(3, seed=1)
    train[:, :, 2] = test[:, :, 2] = 1.5
    bank, queries = standard_patches(train, test)
    rows = train.flatten(0, 1).double().numpy()
    spread = rows.std(axis=0)
    for part, found in ((train, bank), (test, queries)):
        wanted = np.where(
            spread > 0, (part.flatten(0, 1).double().numpy() - rows.mean(axis=0)) / np.maximum(spread, 1e-9), 0
        )
        np.testing.assert_allclose(found[0 : len(found)].numpy(), wanted, atol=1e-5)
    assert not bank[0:24][:, 2].any() and len(bank) == 24


@pytest.mark.parametrize("metric", ["cosine", "l2"])
def test_the_nearest_are_those_of_scikit_learn(metric, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(dense, "_BANK", 11)
    monkeypatch.setattr(dense, "_COMPARED", 4)
    bank, queries = standard_patches(tokens(6), tokens(3, seed=1))
    rows = nearest_patches(bank, queries[0 : len(queries)], k=13, metric=metric, device=CPU)
    oracle = NearestNeighbors(n_neighbors=13, metric=metric, algorithm="brute").fit(bank[0 : len(bank)].numpy())
    assert torch.equal(rows, torch.from_numpy(oracle.kneighbors(queries[0 : len(queries)].numpy())[1]))


@pytest.mark.parametrize("metric", ["cosine", "l2"])
def test_votes_are_those_of_a_loop(metric, monkeypatch: pytest.MonkeyPatch):
    for name in ("_VOTED", "_SEARCHED"):
        monkeypatch.setattr(dense, name, 5)
    bank, queries = standard_patches(tokens(6), tokens(3, seed=1))
    blocks = to_blocks(maps(6), (2, 3))
    found = voted(bank, blocks, queries, ks=(1, 4), metric=metric, num_classes=3, device=CPU)
    rows = nearest_patches(bank, queries[0 : len(queries)], k=4, metric=metric, device=CPU)
    for k, votes in found.items():
        for query, near in enumerate(rows[:, :k]):
            for place in range(4):
                given = [int(blocks[row, place]) for row in near if blocks[row, place] != IGNORED]
                wanted = max(range(3), key=lambda label: (given.count(label), -label))
                assert votes[query, place] == wanted


def test_a_patch_has_the_commonest_class_of_its_pixels():
    blocks = torch.tensor([[0, 2, 2, IGNORED], [1, 1, 0, 0], [IGNORED] * 4], dtype=torch.uint8)
    labels, counted = patch_labels(blocks, 3)
    assert labels[:2].tolist() == [2, 0] and counted.tolist() == [True, True, False]


def test_a_smaller_map_has_the_classes_nearest_to_its_pixels_centres():
    whole = np.arange(16, dtype=np.uint8).reshape(4, 4)
    assert (
        resized_map(whole, (2, 2)).tolist() == [[5, 7], [13, 15]]
        and (resized_map(whole, (4, 4)).numpy() == whole).all()
    )


def test_scores_are_those_of_scikit_learn():
    truth, guess = maps(3, classes=4), maps(3, classes=4, seed=1)
    guess[guess == IGNORED] = 0
    truth[truth == 2], guess[guess == 2] = 1, 3  # a class that is nowhere
    counts = class_counts(guess, truth, num_classes=4)
    counted = truth != IGNORED
    scores = dense_scores(counts.sum(dim=0))
    right, given = truth[counted].numpy(), guess[counted].numpy()
    wanted = jaccard_score(right, given, labels=[0, 1, 3], average=None)
    assert scores.iou[2] is None and [scores.iou[label] for label in (0, 1, 3)] == pytest.approx(wanted.tolist())
    assert scores.mean_iou == pytest.approx(wanted.mean()) and scores.accuracy == pytest.approx((right == given).mean())
    recalls = [(given[right == label] == label).mean() for label in (0, 1, 3)]
    assert scores.mean_accuracy == pytest.approx(np.mean(recalls))
    assert mean_ious(counts.sum(dim=0, keepdim=True).double())[0] == pytest.approx(scores.mean_iou)
    assert counts.shape == (3, 3, 4)  # and not a number for each pair of classes
    with pytest.raises(UsageError, match="no pixel of the test masks has a class that counts"):
        dense_scores(torch.zeros(3, 2, dtype=torch.int64))


def split(informed: bool) -> tuple[DenseSplit, Tensor]:
    """Tokens that say their patch's class, or nothing; and the truth of the test images."""
    truth = maps(60, classes=3)
    blocks = to_blocks(truth, (2, 3))
    classes = torch.arange(len(blocks)) % 3
    whole = from_blocks(classes.to(torch.uint8).unsqueeze(1).expand(-1, 4), (2, 3), (4, 6)).clone()
    whole[truth == IGNORED] = IGNORED
    noise = tokens(60).float()
    said = torch.nn.functional.one_hot(classes, 5).unflatten(0, (60, 6)) * 60.0
    given = (noise + said * informed).half()
    parts = DenseSplit(
        train=given[:40], test=given[40:], labels=whole[:40], grid=(2, 3), num_classes=3, seed=0, device=CPU
    )
    return parts, whole[40:]


def score(predicted: Tensor, truth: Tensor) -> float:
    return dense_scores(class_counts(predicted, truth, num_classes=3).sum(dim=0)).mean_iou


@pytest.mark.parametrize("head", [lambda of: by_neighbours(of, ks=(1, 5, 20), metrics=("cosine", "l2")), by_logistic])
def test_heads_find_what_tokens_say_and_nothing_in_noise(head):
    told, truth = split(informed=True)
    assert score(head(told)[0], truth) > 0.9
    noise, truth = split(informed=False)
    assert score(head(noise)[0], truth) < 0.35  # always one class: 0.11; by chance: 0.2


def test_options_are_chosen_on_a_tenth_of_the_training_images():
    told, _ = split(informed=True)
    fitted, held = told.chosen_on
    assert len(held) == 4 and sorted([*fitted.tolist(), *held.tolist()]) == list(range(40))
    assert torch.equal(told.choosing.test, told.train[held]) and torch.equal(told.choosing.labels, told.labels[fitted])
    with pytest.raises(UsageError, match=r"ks is \[1, 241\], but there are 2.. training patches"):
        by_neighbours(told, ks=(1, 241), metrics=("l2",))
    one = DenseSplit(
        train=told.train[:1], test=told.test, labels=told.labels[:1], grid=(2, 3), num_classes=3, seed=0, device=CPU
    )
    with pytest.raises(UsageError, match="expected 2 or more, to choose options on"):
        by_logistic(one)


@pytest.mark.parametrize("head", [lambda of: by_neighbours(of, ks=(1, 3), metrics=("cosine", "l2")), by_logistic])
@pytest.mark.parametrize(("part", "use"), [(0, "are fitted while options are chosen"), (1, "choose the options")])
def test_training_masks_of_ignored_pixels_alone_are_told_from_test_masks(head, part, use):
    parts, _ = split(True)
    labels = parts.labels.clone()
    labels[parts.chosen_on[part]] = IGNORED
    with pytest.raises(UsageError, match=f"no pixel counts in the masks of the .* training images that {use}"):
        head(replace(parts, labels=labels))


def test_a_verdict_is_paired_over_test_images():
    truth = torch.arange(30 * 24).reshape(30, 4, 6).remainder(3).to(torch.uint8)
    worse = truth.clone()
    worse[:, 0] = 0
    counts = {THIS_MODEL: class_counts(truth, truth, num_classes=3), "other": class_counts(worse, truth, num_classes=3)}
    verdict = compare_maps(counts)
    assert verdict.accuracy == 1 and verdict.answer == "better" and verdict.test_images == 30
    assert verdict.differences[0].share == pytest.approx(1 - score(worse, truth))
    assert str(verdict).startswith("Verdict: of use here: mean IoU 100.0% (88.4 to 100.0) on 30 images, better than")
    assert compare_maps({THIS_MODEL: counts["other"], "other": counts["other"]}).answer == "unclear"


def test_an_image_without_a_pixel_that_counts_spoils_no_interval():
    ours = torch.tensor([[[5, 4], [6, 6], [7, 5]], [[3, 3], [4, 4], [4, 4]]])
    worse = torch.tensor([[[1, 2], [6, 6], [5, 7]], [[1, 1], [4, 4], [4, 4]]])
    empty = torch.zeros(1, 3, 2, dtype=torch.int64)
    found = compare_maps({THIS_MODEL: torch.cat([ours, empty]), "scratch": torch.cat([worse, empty])})
    assert found == compare_maps({THIS_MODEL: ours, "scratch": worse})
    assert found.low <= found.accuracy <= found.high


def test_other_weights_stand_in_the_table_and_make_no_verdict():
    all_right, some, few = (torch.tensor([[[right, right], [5, 5], [5, 5]]] * 4) for right in (5, 3, 2))
    counts = {THIS_MODEL: some, "scratch": few, "runs/other": all_right}
    options = {"numbers": {}, "note": "", "curve": (), "variant": ""}
    task = Mock(spec=SegmentationTask, class_names=("a", "b"))
    result = segmentation_result(task, counts, {}, others=["runs/other"], **options)
    assert [difference.baseline for difference in result.verdict.differences] == ["scratch"]
    assert [row[0] for row in result.rows[:3]] == [THIS_MODEL, "scratch", "runs/other"]
