"""Training with labels: whose label an image gets, the size of a batch, and when it is refused."""

import json
from collections import namedtuple
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from filelock import FileLock
from light import forget_images
from rich.console import Console
from tiny_task import by_function, make_task, small_model, striped

from mae.data.decode.limits import UnreadableImage
from mae.data.sources.memory import ArraySource, whole_array
from mae.errors import MAEError, UsageError
from mae.evaluation.common import supervised
from mae.evaluation.common.classified_images import ClassifiedImages
from mae.evaluation.common.supervised import SupervisedPlan, SupervisedTraining, largest_batch
from mae.evaluation.common.task import LabelledTask
from mae.evaluation.extractors.extractor import model_extractor
from mae.evaluation.protocols.finetune import Finetune
from mae.evaluation.protocols.linear_probe import LinearProbe
from mae.modalities.images.crop import Augmentation
from mae.training.lock import LOCK
from mae.training.log import read_rows

BROKEN = frozenset({0, 3, 4, 11, 19})


class Damaged(ArraySource):
    """Some images cannot be loaded, and no header tells."""

    def read(self, index: int) -> np.ndarray:
        if index in BROKEN:
            raise UnreadableImage(f"{index} is broken for this test")
        return super().read(index)


@pytest.mark.parametrize("in_memory", [True, False])
def test_labels_are_those_of_the_images_that_are_shown(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, in_memory: bool
):
    if not in_memory:
        forget_images(monkeypatch)
    values = np.arange(24, dtype=np.uint8)
    pixels = np.tile(values[:, None, None, None] * 10, (1, 8, 8, 1))  # an image is its number, whatever is cropped
    whole = whole_array(pixels, name="damaged", note="")
    labels = torch.arange(24).flip(0)
    function = by_function(lambda images: images.flatten(1), img_size=(8, 8))
    task = make_task(tmp_path, function, train=(Damaged(**vars(whole)), labels), test=(pixels, labels), num_classes=24)
    seen = [batch for batch, _ in zip(batches(replace(task, max_unreadable=1.0)), range(6), strict=False)]
    shown = torch.cat([(255 * batch["images"][:, 0, 0, 0] / 10).round().long() for batch in seen])
    found = torch.cat([batch["labels"] for batch in seen])
    assert torch.equal(found, labels[shown]) and len(found) == 6 * 6
    # Each image was tried once before; what is broken is not tried again, so an epoch shows nothing twice.
    assert len(set(shown[:18].tolist())) == 18
    assert not set(shown.tolist()) & BROKEN and len(set(shown.tolist())) == 24 - len(BROKEN)


def batches(task: LabelledTask) -> Generator[Any, None, None]:
    return ClassifiedImages(
        task=task,
        batch_size=6,
        accumulate=1,
        augmentation=Augmentation(),
        prepare=lambda batch: {"images": batch.images, "labels": batch.labels},
    ).batches(0)


@pytest.mark.parametrize(
    ("asked", "usual", "images", "expected"),
    [
        (None, 1024, 1_281_167, 1024),
        (None, 1024, 1024 * 32, 1024),
        (None, 1024, 1024 * 32 - 1, 512),
        (None, 1024, 40, 1),
        (None, 1024, 3, 1),
        (7, 1024, 7, 7),
        (4096, 1024, 5000, 4096),
    ],
)
def test_a_small_set_gets_a_small_batch(asked: int | None, usual: int, images: int, expected: int):
    assert largest_batch(asked, usual, images=images, steps_per_epoch=32) == expected


def test_what_decides_a_training_names_its_folder(tmp_path: Path):
    train, test = striped(32, seed=1), striped(12, seed=2)
    asked = partial(Finetune, epochs=1.0, batch_size=16)

    def folders(**changes: int) -> int:
        given = {"seed": 0, "weights": 0, "images": 1} | changes
        part = striped(32, seed=given["images"])
        model = small_model(seed=given["weights"])
        asked().run(make_task(tmp_path, model, train=part, test=test, seed=given["seed"]))
        return len(list((tmp_path / "evaluation" / "finetune").iterdir()))

    assert [folders(), folders(), folders(seed=1), folders(weights=1), folders(images=5)] == [1, 1, 2, 3, 4]
    asked(min_lr=1e-5).run(make_task(tmp_path, small_model(), train=train, test=test))
    assert folders() == 5


def test_why_a_training_begins_anew_on_other_images_is_told(tmp_path: Path):
    def told(*, train: int = 1, test: int = 2, count: int = 12, **changes: Any) -> str:
        task = make_task(
            tmp_path, small_model(), train=striped(32, seed=train), test=striped(count, seed=test), **changes
        )
        console = Console(record=True, file=StringIO(), width=500)
        Finetune(epochs=1.0, batch_size=16).run(replace(task, console=console))
        [line] = [line for line in console.export_text().splitlines() if "begun anew" in line] or [""]
        return line

    assert told() == "" == told()
    (first,) = (tmp_path / "evaluation" / "finetune").iterdir()
    (first.parent / "0").mkdir()
    (first.parent / "0" / "training.json").write_text("damaged")
    assert told(test=3) == f"{first} holds this training with other test images, or moved ones: begun anew"
    assert told(test=3) == ""
    assert "other test images" in told(count=13)
    assert "as many images that moved or changed, or whose labels did: begun anew" in told(train=4)
    assert told(seed=1) == "" == told(train=5, count=14)  # another training, another set


def test_the_preprocessing_names_the_folder_too(tmp_path: Path):
    train, test = striped(32, seed=1), striped(12, seed=2)
    extractor = model_extractor(small_model(), name="tiny")
    for number, changes in enumerate(({}, {"mean": (0.4,)}, {}, {"std": (0.5,)}, {"crop_share": 0.8})):
        changed = replace(extractor, preprocessing=replace(extractor.preprocessing, **changes))
        Finetune(epochs=1.0, batch_size=16).run(make_task(tmp_path, changed, train=train, test=test))
        assert len(list((tmp_path / "evaluation" / "finetune").iterdir())) == (1, 2, 2, 3, 4)[number]


def test_functions_of_one_name_train_a_head_each(tmp_path: Path):
    """Nothing tells them apart: to go on with the other's training would judge the wrong features."""
    train, test = striped(200, seed=1), striped(60, seed=2)

    def telling(images: torch.Tensor) -> torch.Tensor:
        return torch.cat([images.diff(dim=axis).abs().mean(dim=axis).flatten(1) for axis in (2, 3)], dim=1)

    def blind(images: torch.Tensor) -> torch.Tensor:
        return 0 * telling(images) + 1

    probe = LinearProbe(official=True, epochs=5.0, batch_size=20, base_lr=600.0)
    found = [
        probe.run(make_task(tmp_path, by_function(encode, img_size=(16, 16), identity=None), train=train, test=test))
        for encode in (telling, blind, telling)
    ]
    places = [Path(result.numbers["training"]["folder"]) for result in found]
    assert len(set(places)) == 3 and all((place / "training.json").is_file() for place in places)
    shares = [result.numbers["this model"]["features"]["top1"] for result in found]
    assert shares[0] == shares[2] > shares[1] + 0.1


def test_training_reports_folder_seconds_and_curve(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    task = make_task(tmp_path, small_model(), train=striped(32, seed=1), test=striped(12, seed=2))
    found: list[SupervisedTraining] = []
    train = supervised.train_with_labels

    def noted(*args: Any, **options: Any) -> SupervisedTraining:
        found.append(train(*args, **options))
        return found[-1]

    monkeypatch.setattr(supervised, "train_with_labels", noted)
    for _ in range(2):
        Finetune(epochs=2.0, batch_size=16).run(task)
    assert found[0] == found[1]  # the time is that of the training, not of finding it done
    assert found[0].folder.parent == tmp_path / "evaluation" / "finetune" and found[0].seconds > 0
    state = json.loads(max((found[0].folder / "checkpoints").glob("*/manifest.json")).read_text())
    assert state["step"] == 4
    rows = [row for row in read_rows(found[0].folder / "metrics.jsonl") if "evaluation" in row]
    assert found[0].curve == tuple({"epoch": row["step"] / 2, **row["evaluation"]} for row in rows)
    assert [row["epoch"] for row in found[0].curve] == [0, 1, 2]


def test_micro_batches_that_do_not_divide_the_batch_are_refused(tmp_path: Path):
    task = make_task(tmp_path, small_model(), train=striped(32, seed=1), test=striped(12, seed=2))
    with pytest.raises(UsageError, match="cannot be divided into 3"):
        Finetune(epochs=1, batch_size=16, accumulate=3).run(task)


def test_a_training_that_could_not_be_saved_does_not_begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    train, test = striped(32, seed=1), striped(12, seed=2)
    usage, wanted = namedtuple("usage", "total used free"), Finetune(epochs=1.0, batch_size=16)
    monkeypatch.setattr("mae.training.checkpoint.shutil.disk_usage", lambda path: usage(10, 9, 1))
    with pytest.raises(MAEError, match=r"with 0.0 MB free; 2 checkpoints of this model need .* MB; free space there$"):
        wanted.run(make_task(tmp_path, small_model(), train=train, test=test))
    (folder,) = (tmp_path / "evaluation" / "finetune").iterdir()
    assert not (folder / "metrics.jsonl").exists()
    monkeypatch.undo()
    wanted.run(make_task(tmp_path, small_model(), train=train, test=test))
    monkeypatch.setattr("mae.training.checkpoint.shutil.disk_usage", lambda path: usage(10, 9, 1))
    wanted.run(make_task(tmp_path, small_model(), train=train, test=test))  # it is over, and writes none


def test_two_processes_do_not_train_in_one_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """What the other one writes aside would be taken for a killed one's leftovers."""
    monkeypatch.setattr("mae.training.lock._PATIENCE", 0.2)
    train, test = striped(32, seed=1), striped(12, seed=2)

    def run() -> None:
        Finetune(epochs=1.0, batch_size=16).run(make_task(tmp_path, small_model(), train=train, test=test))

    run()
    (folder,) = (tmp_path / "evaluation" / "finetune").iterdir()
    aside = folder / "checkpoints" / ".writing-step-00000009"
    aside.mkdir()
    with FileLock(folder / LOCK), ThreadPoolExecutor() as pool:
        with pytest.raises(UsageError, match=f"{folder.name} is being written by another process"):
            pool.submit(run).result()
        assert aside.exists()
    run()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"min_rate": 0.2}, "min_lr is 0.2, above the peak rate of 0.1"),
        ({"warmup_epochs": 2.0}, "the warm-up .* is 2 epochs, but the whole training has 2"),
    ],
)
def test_a_rate_that_never_falls_from_its_peak_is_refused(changes: dict[str, float], message: str):
    plan = SupervisedPlan(
        name="x", epochs=2.0, batch_size=4, accumulate=1, rate=0.1, min_rate=0.1, warmup_epochs=1.9, precision="fp32",
        identity={},
    )  # fmt: skip
    with pytest.raises(UsageError, match=message):
        replace(plan, **changes)
