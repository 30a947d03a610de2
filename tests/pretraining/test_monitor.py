"""Watching the features of a run: what is written, and that the run does not feel it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import mae
from mae.data.dataset.images import load_images
from mae.data.loading.loader import evaluation_batches, normalise
from mae.data.loading.worker import CropDataset
from mae.data.sources.open import open_labelled, open_source
from mae.errors import MAEError, UsageError
from mae.evaluation.common.feature_stats import alignment, measure_spread
from mae.evaluation.common.neighbours import knn_rank
from mae.modalities.images.crop import Augmentation, central_crop
from mae.pretraining.build import pictured
from mae.pretraining.resolve import prepare_run
from mae.pretraining.watch import online_eval as monitor
from mae.pretraining.watch.online_eval import steps_between_looks, summarise_monitoring
from mae.pretraining.watch.status import read_state
from mae.training.distributed import World
from mae.training.log import loss_rows, read_rows
from mae.training.run_folder import RunFolder

Run = Callable[..., mae.PretrainResult]
LABEL_FREE = {"effective_rank", "feature_std", "mean_cosine", "uniformity", "alignment"}
LENT = {"knn", "probe", "commonest_class", "chance"}
EVERY_STEP = 1 / 44  # digits: 44 steps of 32 images an epoch


@pytest.fixture
def labelled(tmp_path: Path) -> Path:
    """Two classes of grey pictures in sizes of their own, ten of each: dark ones, and bright ones."""
    rng = np.random.default_rng(0)
    for number in range(20):
        folder = tmp_path / "labelled" / ("dark", "bright")[number % 2]
        folder.mkdir(parents=True, exist_ok=True)
        pixels = rng.integers(0, 100, (20 + number, 30)) + 150 * (number % 2)
        Image.fromarray(np.uint8(pixels)).save(folder / f"{number}.png")
    return tmp_path / "labelled"


def looks(folder: Path) -> dict[int, dict[str, float]]:
    rows = [row for row in read_rows(folder / "metrics.jsonl") if "evaluation" in row]
    assert all(row.keys() == {"step", "samples", "evaluation"} for row in rows)
    assert len({row["step"] for row in rows}) == len(rows)
    return {row["step"]: row["evaluation"] for row in rows}


def weights(folder: Path) -> torch.Tensor:
    return torch.cat([tensor.flatten() for tensor in mae.load(folder).state_dict().values()])


@pytest.mark.digits
def test_label_free_numbers_always_at_both_ends_and_between(pretrain: Run, tmp_path: Path):
    result = pretrain(monitor_every=2 * EVERY_STEP)
    assert list(looks(tmp_path / "run")) == [0, 2, 4, 6]
    assert all(numbers.keys() == LABEL_FREE for numbers in looks(tmp_path / "run").values())
    assert result.summary["evaluation"].keys() == LABEL_FREE
    first, last = (looks(tmp_path / "run")[step]["feature_std"] for step in (0, 6))
    assert result.summary["evaluation"]["feature_std"] == {"first": first, "last": last}
    assert first != last


@pytest.mark.digits
def test_a_lent_set_adds_accuracies_and_their_best_step(pretrain: Run, tmp_path: Path):
    result = pretrain(monitor="builtin:digits", monitor_every=3 * EVERY_STEP)
    seen = looks(tmp_path / "run")
    assert list(seen) == [0, 3, 6] and all(numbers.keys() == LABEL_FREE | LENT for numbers in seen.values())
    for name in ("knn", "probe"):
        course = {step: numbers[name] for step, numbers in seen.items()}
        best = max(course.values())
        step = min(step for step, value in course.items() if value == best)
        expected = {"first": course[0], "last": course[6], "best": best, "best_step": step}
        assert result.summary["evaluation"][name] == expected
        assert all(0 <= value <= 1 for value in course.values())
    assert json.loads((tmp_path / "run" / "summary.json").read_text()) == result.summary


def test_tensorboard_has_every_look(pretrain: Run, tmp_path: Path):
    pretrain(monitor="builtin:digits", monitor_every=3 * EVERY_STEP)
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    for name in (*LABEL_FREE, *LENT):
        shown = {event.step: event.value for event in events.Scalars(f"evaluation/{name}")}
        expected = {step * 32: numbers[name] for step, numbers in looks(tmp_path / "run").items()}
        assert shown == pytest.approx(expected, rel=1e-6)


def test_the_numbers_are_those_of_the_features(pretrain: Run, tmp_path: Path, few_watched: pytest.MonkeyPatch):
    """Against the evaluators on features made here, of all images, so that which ones were chosen does not matter."""
    for name in ("LABEL_FREE", "VIEWED", "TRAIN", "TEST"):
        few_watched.setattr(monitor, f"_{name}_IMAGES", 2000)
    pretrain(monitor="builtin:digits", steps=1)
    data, model = open_labelled("builtin:digits", data_root=tmp_path), mae.load(tmp_path / "run")
    mean, std = torch.tensor([model.config.tokenizer.mean, model.config.tokenizer.std])
    features = []
    for part in (data.train, data.test):
        images = load_images(part.source, in_chans=1)
        batch = torch.cat(list(evaluation_batches(images, img_size=(8, 8), batch_size=500)))
        with torch.no_grad():
            features.append(model.encode(normalise(batch, mean, std)).mean)
    images = load_images(data.train.source, in_chans=1)
    crops = CropDataset(images=images, numbers=images.readable, img_size=(8, 8), augmentation=Augmentation())
    with torch.no_grad():
        views = [
            model.encode(normalise(crops[images.readable.tolist(), keys].images, mean, std)).mean
            for keys in (list(range(len(images))), list(range(len(images), 2 * len(images))))
        ]
    last = looks(tmp_path / "run")[1]
    commonest = data.train.labels.bincount().argmax()
    assert last["chance"] == 0.1
    assert last["commonest_class"] == pytest.approx((data.test.labels == commonest).double().mean().item())
    spread = measure_spread(features[0]).as_dict()
    for name in LABEL_FREE - {"alignment"}:
        assert last[name] == pytest.approx(spread[name], rel=1e-4)
    # Other crops of the same images: near, not the same.
    assert last["alignment"] == pytest.approx(alignment(*views), rel=0.1)
    ranked = knn_rank(features[0], data.train.labels, features[1], ks=[20], num_classes=10, device=torch.device("cpu"))[
        20
    ]
    assert last["knn"] == pytest.approx((ranked[:, 0] == data.test.labels).double().mean().item(), abs=0.006)


def test_images_larger_than_224_pixels_are_cut_as_evaluations_cut_them(
    pretrain: Run, labelled: Path, tmp_path: Path
) -> None:
    """All pixels of a square's shorter side, where smaller sizes keep 0.875 of it."""
    pretrain(source=labelled, img_size=232, patch_size=58, batch_size=16, steps=1)
    model = mae.load(tmp_path / "run")
    with torch.no_grad():
        features = model.encode(model.preprocess(sorted(labelled.rglob("*.png")))).mean
    seen, spread = looks(tmp_path / "run")[1], measure_spread(features).as_dict()
    assert [seen[name] for name in sorted(LABEL_FREE - {"alignment"})] == pytest.approx(
        [spread[name] for name in sorted(LABEL_FREE - {"alignment"})], rel=1e-4
    )
    images = load_images(open_source(str(labelled), data_root=tmp_path), in_chans=1)
    crops, _ = pictured(images, (232, 232), seed=0)
    whole = {central_crop(images.get(number), (232, 232), 1.0).numpy().tobytes() for number in range(20)}
    assert {crop.numpy().tobytes() for crop in crops} <= whole


def test_watching_changes_nothing(pretrain: Run, tmp_path: Path):
    pretrain("plain", workers=1)
    pretrain("often", workers=1, monitor_every=EVERY_STEP)
    pretrain("lent", workers=1, monitor="builtin:digits", monitor_every=2 * EVERY_STEP)
    for name in ("often", "lent"):
        assert torch.equal(weights(tmp_path / name), weights(tmp_path / "plain"))
        losses = [
            [row["loss"] for row in loss_rows(read_rows(tmp_path / of / "metrics.jsonl"))] for of in (name, "plain")
        ]
        assert losses[0] == losses[1]


def test_a_resumed_run_misses_and_doubles_no_look(pretrain: Run, tmp_path: Path):
    options = {"monitor": "builtin:digits", "monitor_every": EVERY_STEP, "steps": 4}
    pretrain("through", **options)
    pretrain("cut", **options)
    (tmp_path / "cut" / "checkpoints" / "step-00000004" / "manifest.json").unlink()
    mae.pretrain(out=tmp_path / "cut", resume=True, quiet=True)
    assert list(looks(tmp_path / "cut")) == [0, 1, 2, 3, 4]
    assert looks(tmp_path / "cut") == looks(tmp_path / "through")


def test_what_is_watched_may_change_on_resume(pretrain: Run, tmp_path: Path):
    pretrain("run")
    (tmp_path / "run" / "checkpoints" / "step-00000006" / "manifest.json").unlink()
    changed = {"monitor": "builtin:digits", "monitor_every": EVERY_STEP}
    result = mae.pretrain(out=tmp_path / "run", resume=True, quiet=True, **changed)
    seen = looks(tmp_path / "run")
    assert list(seen) == [0, 5, 6] and "knn" not in seen[0] and "knn" in seen[5]
    assert result.summary["evaluation"]["knn"]["first"] == seen[5]["knn"]
    pretrain("plain")
    assert torch.equal(weights(tmp_path / "run"), weights(tmp_path / "plain"))


def test_accuracies_on_other_images_are_not_compared(pretrain: Run, labelled: Path, tmp_path: Path):
    def resumed(**options: Any) -> mae.PretrainResult:
        (tmp_path / "run" / "checkpoints" / "step-00000006" / "manifest.json").unlink()
        return mae.pretrain(out=tmp_path / "run", resume=True, quiet=True, **options)

    def sets() -> list[str]:
        return [row["monitor"] for row in read_rows(tmp_path / "run" / "metrics.jsonl") if "monitor" in row]

    same = pretrain(monitor="builtin:digits", monitor_every=EVERY_STEP)
    assert "k-NN accuracy is" in read_state(same.folder, now=0.0).verdict and len(set(sets())) == 1
    other = resumed(monitor=str(labelled))
    seen = looks(tmp_path / "run")
    assert "knn" in seen[0] and list(seen)[-2:] == [5, 6] and len(set(sets())) == 2
    numbers = other.summary["evaluation"]
    assert numbers["knn"]["first"] == seen[5]["knn"] and numbers["probe"]["best_step"] >= 5
    assert numbers["chance"] == {"first": 0.5, "last": 0.5}
    assert numbers["effective_rank"]["first"] == seen[0]["effective_rank"]
    state = read_state(other.folder, now=0.0)
    assert "k-NN accuracy" not in state.verdict
    assert [look.step for look in state.looks if "knn" in look.numbers] == [5, 6]
    known = sets()[-1]
    moved = labelled.rename(tmp_path / "moved")
    again = resumed(monitor=str(moved))
    assert sets()[-1] == known and again.summary["evaluation"] == numbers
    back = resumed(monitor="builtin:digits")
    assert back.summary["evaluation"]["knn"]["first"] == seen[0]["knn"]


def test_the_lent_set_is_found_from_any_folder(
    pretrain: Run, labelled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    pretrain(monitor="labelled")
    monkeypatch.chdir("/")
    (tmp_path / "run" / "checkpoints" / "step-00000006" / "manifest.json").unlink()
    mae.pretrain(out=tmp_path / "run", resume=True, quiet=True)
    assert "knn" in looks(tmp_path / "run")[6]


def test_grey_pictures_of_other_sizes_watch_a_run_in_colour(pretrain: Run, photos: Path, labelled: Path):
    result = pretrain(source=photos, monitor=labelled, img_size=32, patch_size=8, batch_size=8, steps=2)
    assert result.summary["evaluation"]["knn"]["last"] == 1.0  # dark and bright is easily told


@pytest.mark.parametrize("count", [1, 2])
def test_tiny_sets(count: int, pretrain: Run, photos: Path, tmp_path: Path):
    for path in sorted(photos.iterdir())[count:]:
        path.unlink()
    result = pretrain(source=photos, img_size=32, patch_size=8, batch_size=1, steps=2)
    assert result.summary["evaluation"].keys() == (LABEL_FREE if count == 2 else set())


@pytest.mark.parametrize("kind", ["absent", "unlabelled", "broken"])
def test_a_set_that_cannot_be_used_leaves_no_run_behind(
    kind: str, pretrain: Run, photos: Path, labelled: Path, tmp_path: Path
):
    if kind == "broken":
        (labelled / "dark" / "2.png").write_bytes(b"nothing")
    lent = {"absent": tmp_path / "nowhere", "unlabelled": photos, "broken": labelled}[kind]
    says = {"absent": "nowhere does not exist", "unlabelled": "no class folders", "broken": "dark/2.png"}[kind]
    with pytest.raises(MAEError if kind == "broken" else UsageError, match=says):
        pretrain(monitor=lent)
    assert not (tmp_path / "run").exists()
    assert pretrain(steps=1).finished


def test_near_copies_in_the_lent_set_are_told_and_recorded(
    pretrain: Run, labelled: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """Noise saved anew as JPEG is nearest to its original by any weights."""
    parts = tmp_path / "parts"
    for number, path in enumerate(sorted(labelled.glob("*/*.png"))):
        folder = parts / ("test" if number % 5 == 0 else "train") / path.parent.name
        folder.mkdir(parents=True, exist_ok=True)
        path.rename(folder / path.name)
    clean = pretrain(monitor=parts, steps=1, quiet=False)
    assert "near cop" not in capsys.readouterr().out and "near_copies" not in clean.summary["evaluation"]
    for original in sorted((parts / "train" / "dark").iterdir())[:2]:
        Image.open(original).save(parts / "test" / "dark" / f"again-{original.stem}.jpg", quality=97)
    copied = pretrain("copied", monitor=parts, steps=1, quiet=False)
    assert "parts: 2 of 6 test images have a near copy among the training images" in capsys.readouterr().out
    assert copied.summary["evaluation"]["near_copies"] == {"first": 1 / 3, "last": 1 / 3}


@pytest.mark.parametrize("where", ["dark", "bright"])
def test_a_test_image_that_is_a_training_image_is_refused_before_the_run(
    where: str, pretrain: Run, labelled: Path, tmp_path: Path
):
    """As the model sees them: under another name, in another format, whatever the class it is put in."""
    parts = tmp_path / "parts"
    for number, path in enumerate(sorted(labelled.glob("*/*.png"))):
        folder = parts / ("test" if number % 5 == 0 else "train") / path.parent.name
        folder.mkdir(parents=True, exist_ok=True)
        path.rename(folder / path.name)
    assert pretrain(monitor=parts, steps=1).finished
    Image.open(min((parts / "train" / "dark").iterdir())).save(parts / "test" / where / "again.bmp")
    with pytest.raises(UsageError, match=r"--monitor .*parts: 1 of 5 test images are among the training images too"):
        pretrain("second", monitor=parts, steps=1)
    assert not (tmp_path / "second").exists()


@pytest.mark.digits
def test_a_run_that_is_watched_with_labels_is_looked_at_less_often(tmp_path: Path):
    def spacing(**options: Any) -> int:
        given = {
            "model": "mae_vit_lesson_patch4",
            "img_size": (8, 8),
            "patch_size": (2, 2),
            "batch_size": 4,
            "steps": 60,
            "held_out": 0.0,
        }
        config = mae.RunConfig.of(source="builtin:digits", **{**given, **options})
        return steps_between_looks(prepare_run(config, RunFolder(tmp_path), torch.device("cpu"), World(), resume=False))

    watched = 24 + 2 * 8  # as few images as these tests watch; lent are 20 + 10 more
    assert spacing() == 10 * watched / 4
    assert spacing(monitor="builtin:digits") == 10 * (watched + 30) / 4
    assert spacing(monitor="builtin:digits", batch_size=16) == 44  # rounded up
    assert spacing(monitor="builtin:digits", steps=8000) == 1000
    assert spacing(monitor="builtin:digits", monitor_every=0.25) == 90  # of 359 steps an epoch


def test_an_unreadable_image_that_is_allowed_is_passed_over(pretrain: Run, labelled: Path, tmp_path: Path):
    (labelled / "dark" / "2.png").write_bytes(b"nothing")
    result = pretrain(monitor=labelled, max_unreadable=0.2, steps=1)
    assert result.summary["evaluation"]["knn"]["last"] > 0.5
    assert result.summary["unreadable"] == []  # of the images trained on


def test_the_lent_images_are_read_before_the_run_alone(pretrain: Run, labelled: Path, monkeypatch: pytest.MonkeyPatch):
    """A set that is deleted meanwhile does not end the run."""
    import shutil

    from mae.training.engine import Trainer

    run = Trainer.run

    def deleting(self: Trainer, **options: Any) -> bool:
        shutil.rmtree(labelled)
        return run(self, **options)

    monkeypatch.setattr(Trainer, "run", deleting)
    assert "knn" in pretrain(monitor=labelled).summary["evaluation"]


@pytest.mark.parametrize("error", [MAEError("a feature vector is all zeros"), torch.OutOfMemoryError("full")])
def test_a_look_that_fails_does_not_end_the_run(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    asked: list[int] = []

    def failing(features: torch.Tensor, **options: Any) -> Any:
        asked.append(len(features))
        if len(asked) > 1:
            raise error
        return measure_spread(features, **options)

    monkeypatch.setattr(monitor, "measure_spread", failing)
    from mae.cli import main

    args = (
        "--model mae_vit_lesson_patch4 --img-size 8 --patch-size 2 --batch-size 32 --steps 2 --device cpu --workers 0"
    )
    lent = ["--monitor", "builtin:digits", "--out", str(tmp_path / "run"), "--held-out", "0"]
    assert main(["pretrain", "builtin:digits", *args.split(), *lent]) == 0
    assert looks(tmp_path / "run")[2].keys() == LENT
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())["evaluation"]
    assert summary["effective_rank"]["last"] is None and summary["effective_rank"]["first"] > 1
    shown = " ".join(capsys.readouterr().out.split())
    assert f"step 2: label-free numbers could not be measured, the run goes on: {error}" in shown
    assert "not measured at the end" in shown and "at the first look (best" in shown
    assert "k-NN and probe on builtin:digits" in shown


def test_large_crops_are_fewer(pretrain: Run, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(monitor, "_CROP_BYTES", 15 * 64)  # half of 20 + 10 crops of 8 x 8
    kept: list[int] = []
    real = monitor._Labelled.measure

    def spy(self: Any) -> dict[str, float]:
        kept.extend([len(self._train[0]), len(self._test[0])])
        return real(self)

    monkeypatch.setattr(monitor._Labelled, "measure", spy)
    pretrain(monitor="builtin:digits", steps=1)
    assert kept[:2] == [10, 5]


def test_without_a_look_there_is_no_summary():
    assert summarise_monitoring([{"step": 1, "samples": 1, "loss": 1.0}]) == {}


def test_of_equally_good_steps_the_earliest_is_best():
    rows = [
        {"step": step, "samples": step, "evaluation": {"knn": knn}} for step, knn in enumerate([0.1, 0.5, 0.5, 0.2])
    ]
    assert summarise_monitoring(rows) == {"knn": {"first": 0.1, "last": 0.2, "best": 0.5, "best_step": 1}}
