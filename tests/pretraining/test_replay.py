"""A step that ended a run is seen again as it was."""

import json
import shlex
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tifffile
import torch

import mae
from mae.cli import main
from mae.cli.replay import _in_words
from mae.data.dataset.images import ImageSet, load_images
from mae.data.loading.loader import TrainingLoader
from mae.data.sources.open import open_source
from mae.errors import MAEError, UsageError
from mae.pretraining.capture import CAPTURE
from mae.pretraining.watch import replay_step as replay_module
from mae.pretraining.watch.replay_step import replay
from mae.training.settings import PeriodicTask

Run = Callable[..., mae.PretrainResult]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """64 images of float values, most of them harmless."""
    folder = tmp_path / "images"
    folder.mkdir()
    rng = np.random.default_rng(0)
    for number in range(64):
        tifffile.imwrite(folder / f"{number:02d}.tif", rng.normal(size=(8, 8)).astype(np.float32))
    return folder


def broken(pretrain: Run, source: Path, monkeypatch: pytest.MonkeyPatch, **options: object) -> Path:
    """The folder of a run that ended because images 7 and 9 turn out not to be finite."""
    sound = ImageSet.get

    def get(self: ImageSet, index: int) -> torch.Tensor:
        return sound(self, index) * (torch.inf if index in (7, 9) else 1)

    monkeypatch.setattr(ImageSet, "get", get)
    monkeypatch.setattr("mae.training.engine.MAX_CONSECUTIVE", 1)
    monkeypatch.setattr("mae.pretraining.run.make_monitor", lambda *given: PeriodicTask(every=1, run=lambda step: None))
    with pytest.raises(MAEError, match=r"not finite.* replay it with: mae replay .*failures/step") as ended:
        pretrain("run", source=str(source), batch_size=16, doctor=False, statistics="data", **options)
    assert (Path(shlex.split(str(ended.value))[-1]) / CAPTURE).is_file()
    return source.parent / "run"


@pytest.fixture(autouse=True)
def _statistics(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of sound images: the broken ones would end the run before it begins."""
    monkeypatch.setattr(ImageSet, "statistics", lambda self, limit=0: ((0.0,), (1.0,)))


@pytest.mark.parametrize(("accumulate", "views"), [(1, 1), (2, 1), (2, 4)])
def test_the_same_images_break_again(
    pretrain: Run,
    source: Path,
    monkeypatch: pytest.MonkeyPatch,
    accumulate: int,
    views: int,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = broken(pretrain, source, monkeypatch, accumulate=accumulate, repeated_aug=views, steps=20)
    (capture,) = (folder / "failures").iterdir()
    values = json.loads((capture / CAPTURE).read_text())
    assert len(values["ids"]) == 16 // views and {7, 9} & set(values["ids"])
    found = replay(folder, device="cpu")
    assert found.reproduced and found.step == values["step"]
    names = {Path(name).name for name in found.broken_images}
    assert len(names) == len(found.broken_images), "an image is named once, however many views of it there are"
    assert names == {f"{number:02d}.tif" for number in {7, 9} & set(values["ids"])}
    assert found.broken_at and found.broken_gradients
    capsys.readouterr()
    assert main(["replay", str(capture), "--device", "cpu"]) == 0
    told = capsys.readouterr().out
    assert f"Step {values['step'] + 1} breaks again" in told and min(names) in told


@pytest.mark.parametrize("of_the_run", [True, False])
def test_where_every_image_breaks_none_is_named(
    pretrain: Run, source: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], of_the_run: bool
) -> None:
    folder = broken(pretrain, source, monkeypatch)
    sound = ImageSet.get
    monkeypatch.setattr(ImageSet, "get", lambda self, index: sound(self, index) * torch.inf)
    (capture,) = (folder / "failures").iterdir()
    monkeypatch.chdir(folder)
    assert main(["replay", "." if of_the_run else f"failures/{capture.name}", "--device", "cpu"]) == 0
    told = capsys.readouterr().out
    assert "all 16 of the batch: the weights, not one image" in told and ".tif" not in told


@pytest.mark.parametrize(
    ("broken_images", "of", "expected"),
    [
        ([], 8, "each is finite by itself"),
        (["a"], 1, "a"),
        (["a", "b"], 3, "a\nb"),
        (["a", "b"], 2, "all 2 of the batch: the weights, not one image"),
        (list("abcde"), 8, "a\nb\nc\nd\ne"),
        (list("abcdefg"), 8, "a\nb\nc\nd\ne\nand 2 more"),
    ],
)
def test_few_images_are_named(broken_images: list[str], of: int, expected: str) -> None:
    assert _in_words(broken_images, of=of) == expected


def test_a_step_that_is_whole_now_is_told_so(
    pretrain: Run, source: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = broken(pretrain, source, monkeypatch)
    monkeypatch.undo()
    found = replay(folder, device="cpu")
    assert not found.reproduced and found.broken_images == () and found.broken_at == ""
    assert main(["replay", str(folder), "--device", "cpu"]) == 0
    assert "is finite this time" in capsys.readouterr().out


def test_the_loss_is_the_one_the_run_would_have_had(
    pretrain: Run, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CropDataset, masks and weights are those of the step: without the fault the loss is that of a run without it."""
    folder = broken(pretrain, source, monkeypatch)
    monkeypatch.undo()
    monkeypatch.setattr(ImageSet, "statistics", lambda self, limit=0: ((0.0,), (1.0,)))
    found = replay(folder, device="cpu")
    sound = pretrain("sound", source=str(source), batch_size=16, steps=4, doctor=False)
    rows = [json.loads(line) for line in (sound.folder / "metrics.jsonl").read_text().splitlines()]
    losses = {row["step"]: row["loss"] for row in rows if "loss" in row}
    if found.step == 0:  # the schedule's warm-up differs with the length of a run, so only the first step is the same
        assert found.loss == pytest.approx(losses[1], rel=1e-5)
    assert found.loss == pytest.approx(losses[found.step + 1], rel=0.1)


def test_the_views_are_those_of_the_step(pretrain: Run, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = broken(pretrain, source, monkeypatch, recipe="mae", repeated_aug=4, steps=20)
    monkeypatch.undo()
    seen: list[torch.Tensor] = []
    whole = replay_module.normalise
    monkeypatch.setattr(replay_module, "normalise", lambda crops, *told: seen.append(crops) or whole(crops, *told))
    found = replay(folder, device="cpu")
    images = load_images(open_source(str(source), data_root=folder), in_chans=None)
    loader = TrainingLoader(
        images=images, batch_size=16, accumulate=1, img_size=(8, 8), seed=0, workers=0, views=4
    )  # fmt: skip
    raw = next(loader.iterate(found.step))
    assert torch.equal(torch.cat(seen), raw.images) and len(raw.ids.unique()) == 4


def test_an_unreadable_image_is_replaced_by_the_one_that_the_run_took(
    pretrain: Run, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(0, 64, 4):
        (source / f"{number:02d}.tif").write_bytes(b"no image")
    folder = broken(pretrain, source, monkeypatch, recipe="mae", steps=20, max_unreadable=0.5)
    monkeypatch.undo()
    seen: list[torch.Tensor] = []
    whole = replay_module.normalise
    monkeypatch.setattr(replay_module, "normalise", lambda crops, *told: seen.append(crops) or whole(crops, *told))
    found = replay(folder, device="cpu")
    images = load_images(open_source(str(source), data_root=folder), in_chans=None, max_unreadable=0.5)
    loader = TrainingLoader(images=images, batch_size=16, accumulate=1, img_size=(8, 8), seed=0, workers=0)
    raw = next(loader.iterate(found.step))
    assert torch.equal(torch.cat(seen), raw.images) and not torch.equal(raw.ids, raw.shown)


def test_other_images_are_refused(pretrain: Run, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = broken(pretrain, source, monkeypatch)
    (source / "00.tif").unlink()
    with pytest.raises(UsageError, match="holds other images"):
        replay(folder, device="cpu")


def test_where_nothing_was_captured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(tmp_path)]) == 2
    assert "holds no captured step" in capsys.readouterr().err


def test_a_step_that_compared_views_is_computed_with_them(pretrain: Run, source: Path, monkeypatch: pytest.MonkeyPatch):
    folder = broken(pretrain, source, monkeypatch, accumulate=2, repeated_aug=2, steps=20, visreg=0.1)
    found = replay(folder, device="cpu")
    assert found.reproduced and found.broken_images and any("term_heads" in name for name in found.broken_gradients)
