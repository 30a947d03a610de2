"""Runs whose teacher is an earlier run: begun, gone on with, checked, replayed and used."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
import torch
from light import little_measuring

import mae
from mae.cli import main
from mae.data.dataset.images import ImageSet
from mae.errors import MAEError, UsageError
from mae.pretraining.teacher import absolute_path
from mae.pretraining.watch.replay_step import replay
from mae.training.log import loss_rows, read_rows
from mae.training.settings import PeriodicTask

Run = Callable[..., mae.PretrainResult]


@pytest.fixture
def second(pretrain: Run, finished: Path, tmp_path: Path) -> Path:
    """The folder of a run whose teacher is the finished one."""
    first = finished.rename(tmp_path / "first")
    return pretrain("second", recipe="second_stage", teacher_source=first).folder


def weights(run: Path) -> dict[str, torch.Tensor]:
    return mae.load(run).state_dict()


def losses(run: Path) -> list[float]:
    return [row["loss"] for row in loss_rows(read_rows(run / "metrics.jsonl"))]


def cut(second: Path, to: Path) -> Path:
    """The run as it was after step 4."""
    shutil.copytree(second, to)
    shutil.rmtree(to / "checkpoints" / "step-00000006")
    return to


def test_a_run_that_was_cut_ends_where_a_whole_one_does(second: Path, tmp_path: Path) -> None:
    again = mae.pretrain(out=cut(second, tmp_path / "cut"), resume=True, quiet=True).folder
    whole, resumed = weights(second), weights(again)
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    assert losses(second) == losses(again)
    assert not list(second.rglob("teacher.safetensors"))


def test_what_was_measured_is_in_its_configuration(second: Path, tmp_path: Path) -> None:
    teacher = json.loads((second / "config.json").read_text())["method"]["teacher"]
    measured = (teacher["width"], teacher["size"], teacher["grid"], len(teacher["fingerprint"]))
    assert measured == (256, [8, 8], [4, 4], 16)
    shutil.rmtree(tmp_path / "first")
    model = mae.load(second)
    assert model.config is not None and model.config.teacher.fingerprint == teacher["fingerprint"]
    assert (model.config.teacher.source, teacher["source"]) == ("first", str(tmp_path / "first"))


def test_a_source_that_changed_or_went_is_refused(second: Path, pretrain: Run, tmp_path: Path) -> None:
    begun = cut(second, tmp_path / "cut")
    shutil.rmtree(tmp_path / "first")
    with pytest.raises(UsageError, match="first, the teacher that the run learns from, is gone; put it back there, or"):
        mae.pretrain(out=begun, resume=True, quiet=True)
    pretrain("first", seed=1)
    with pytest.raises(UsageError, match="first is another network than when the run was begun; put the old one back"):
        mae.pretrain(out=begun, resume=True, quiet=True)
    assert losses(begun) == losses(second)


def test_it_goes_on_from_another_folder(
    pretrain: Run, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finished.rename(tmp_path / "first")
    monkeypatch.chdir(tmp_path)
    begun = pretrain("second", recipe="second_stage", teacher_source="first").folder
    told = mae.pretrain(out=cut(begun, tmp_path / "told"), teacher_source="first", resume=True, quiet=True).folder
    monkeypatch.chdir("/")
    again = mae.pretrain(out=cut(begun, tmp_path / "cut"), resume=True, quiet=True).folder
    assert losses(told) == losses(again) == losses(begun)


def test_a_folder_behind_a_prefix_holds_everywhere_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "vit").mkdir()
    for prefix in ("timm:local-dir:", "hf:", ""):
        assert absolute_path(f"{prefix}vit") == f"{prefix}{tmp_path / 'vit'}"
        assert absolute_path(f"{prefix}elsewhere") == f"{prefix}elsewhere"


def test_eva_predicts_a_teacher_at_mask_tokens(pretrain: Run, finished: Path, tmp_path: Path) -> None:
    run = pretrain("eva", recipe="eva", teacher_source=finished.rename(tmp_path / "first"))
    model: Any = run.load_model()
    images = torch.rand(3, 1, 8, 8)
    seen: list[int] = []
    model.encoder.blocks[0].register_forward_pre_hook(lambda block, inputs: seen.append(inputs[0].shape[1]))
    plan = model.plan(images)
    assert model.predict(images, plan).shape == (3, 16, 256)
    assert seen == [1 + 16]  # the class token and every patch, some as mask tokens
    assert plan.hidden.sum(dim=1).tolist() == [16 - int(0.6 * 16)] * 3
    assert 0 < min(losses(run.folder)) < 2  # 1 minus a cosine


def test_the_teacher_stands_in_the_header(finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = (
        "pretrain builtin:digits --recipe second_stage --model mae_vit_lesson_patch4 --img-size 8 --patch-size 4 "
        f"--steps 2 --batch-size 8 --device cpu --teacher-source {finished} --teacher-resample "
        f"--out {tmp_path / 'header'}"
    )
    assert main(command.split()) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "teacher frozen (source" in shown and "resample True, width 256, size 8x8, grid 4x4" in shown
    assert "in a grid of 2x2 patches" in shown


def test_the_student_begins_anew(second: Path, finished: Path, tmp_path: Path) -> None:
    teacher = mae.load(tmp_path / "first").state_dict()
    student = mae.load(second).state_dict()
    names = [name for name in teacher if name.startswith("encoder.blocks.") and name.endswith("weight")]
    assert names and not any(
        torch.allclose(teacher[name], student[name], atol=1e-3) for name in names if "norm" not in name
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"teacher_source": ""}, "--teacher-source names none; give a run, a file, timm:NAME or hf:NAME"),
        ({"teacher_source": "nowhere"}, "nowhere"),
        ({"patch_size": 4}, "has 4x4 tokens of 8x8 pixels, and the run 2x2 of 8x8; give the same"),
        ({"in_chans": 3}, r"sees 1 channel\(s\), and the run's images have 3"),
    ],
)
def test_what_cannot_be_the_teacher_is_refused_before_anything_is_written(
    pretrain: Run, finished: Path, tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        pretrain("second", **{"recipe": "second_stage", "teacher_source": str(finished), **options})
    assert not (tmp_path / "second").exists()


@pytest.fixture
def floats(tmp_path: Path) -> Path:
    """64 images of values in the thousands."""
    (tmp_path / "images").mkdir()
    rng = np.random.default_rng(0)
    for number in range(64):
        pixels = rng.normal(5000, 900, size=(8, 8)).astype(np.float32)
        tifffile.imwrite(tmp_path / "images" / f"{number:02d}.tif", pixels)
    return tmp_path / "images"


def test_images_in_another_unit_than_the_teachers_are_refused(pretrain: Run, finished: Path, floats: Path) -> None:
    with pytest.raises(UsageError, match=r"the values \(float32\) .* they are on another scale"):
        pretrain("second", source=str(floats), recipe="second_stage", teacher_source=finished)


def test_a_broken_step_is_replayed_with_the_teacher(
    pretrain: Run, floats: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretrain("first", source=str(floats), batch_size=16)
    sound = ImageSet.get
    monkeypatch.setattr(ImageSet, "statistics", lambda self, limit=0: ((5000.0,), (900.0,)))
    monkeypatch.setattr(ImageSet, "get", lambda self, index: sound(self, index) * (torch.inf if index == 7 else 1))
    monkeypatch.setattr("mae.training.engine.MAX_CONSECUTIVE", 1)
    monkeypatch.setattr("mae.pretraining.run.make_monitor", lambda *given: PeriodicTask(every=1, run=lambda step: None))
    monkeypatch.setattr("mae.pretraining.resolve.check_seen", lambda network, images: None)
    options = {"source": str(floats), "batch_size": 16, "target": "features", "teacher": "frozen"}
    with pytest.raises(MAEError, match="not finite.* replay it"):
        pretrain("second", **options, teacher_source=tmp_path / "first", steps=20)
    assert replay(tmp_path / "second", device="cpu").reproduced


@pytest.mark.doctor
def test_doctor_plan_and_watch_take_such_a_run(
    second: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    little_measuring(monkeypatch)
    for command in ("doctor", "plan"):
        options = f"--recipe second_stage --teacher-source {tmp_path / 'first'} --img-size 8 --patch-size 2 --steps 600"
        assert main(f"{command} builtin:digits --model mae_vit_lesson_patch4 {options} --device cpu".split()) == 0
    shown = capsys.readouterr().out
    assert "--recipe second_stage" in shown and f"--teacher-source {tmp_path / 'first'}" in shown
    assert "--teacher-width" not in shown and "fingerprint" not in shown.split("mae pretrain")[-1]
    main(["doctor", str(second), "--device", "cpu"])  # six steps are too few for it, and it says so
    assert "weights" in capsys.readouterr().out
    assert main(["watch", str(second), "--once"]) == 0


def test_its_encoder_is_evaluated_and_exported_without_the_teacher(second: Path, tmp_path: Path) -> None:
    shutil.rmtree(tmp_path / "first")
    knn = f"evaluate knn {second} --data builtin:digits --device cpu --no-baselines"
    assert main(knn.split()) == 0
    assert main(f"export {second} --to safetensors --out {tmp_path / 'export'}".split()) == 0
