"""A run that was cut ends where an uninterrupted one does."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

import mae
from mae.cli import main
from mae.config import as_flags
from mae.core.component import Count, Weight
from mae.core.contracts import Term
from mae.core.kinds import _registered
from mae.errors import UsageError
from mae.training.log import loss_rows, read_rows

Run = Callable[..., mae.PretrainResult]
OPTIONS: dict[str, Any] = {
    "model": "mae_vit_lesson_patch4", "img_size": 8, "patch_size": 2, "mlp_ratio": 0.5, "batch_size": 64, "steps": 42,
    "device": "cpu", "checkpoint_every": 5, "doctor": False,
}  # fmt: skip


def weights(path: Path) -> dict[str, torch.Tensor]:
    return mae.load(path).state_dict()


def assert_same_end(one: Path, other: Path) -> None:
    first, second = weights(one), weights(other)
    assert all(torch.equal(first[name], second[name]) for name in first)
    measured = [
        [(row["step"], row.get("loss"), row.get("evaluation")) for row in read_rows(run / "metrics.jsonl")]
        for run in (one, other)
    ]
    assert measured[0] == measured[1]


def test_resuming_where_no_checkpoint_was_yet_starts_over(finished: Path, tmp_path: Path):
    cut = shutil.copytree(finished, tmp_path / "cut")
    shutil.rmtree(cut / "checkpoints")
    (cut / "ended.json").unlink()  # a killed run has none
    mae.pretrain(out=cut, resume=True, quiet=True)
    assert_same_end(finished, cut)


def test_resuming_falls_back_to_the_checkpoint_before_a_damaged_one(finished: Path, tmp_path: Path):
    cut = shutil.copytree(finished, tmp_path / "cut")
    damaged = cut / "checkpoints" / "step-00000006" / "model.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-8])
    mae.pretrain(out=cut, resume=True, quiet=True)
    assert_same_end(finished, cut)


def test_resuming_a_finished_run_changes_nothing(finished: Path):
    before = weights(finished)
    assert mae.pretrain(out=finished, resume=True, quiet=True).finished
    after = weights(finished)
    assert all(torch.equal(before[name], after[name]) for name in before)


@dataclass(frozen=True, kw_only=True)
class Other(Term):
    """A term of another package."""

    kind: ClassVar[str] = "other"

    weight: Weight = 0.1
    """How much it counts."""
    width: Count = 3
    """An option."""


def test_a_package_with_another_term_may_come_between(finished: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(_registered, "terms", {"other": Other})
    assert mae.pretrain(out=finished, resume=True, quiet=True).finished


def test_a_resumed_run_refuses_other_options(finished: Path):
    with pytest.raises(
        UsageError, match="begun with other options: lr was .*, is now 0.5; mask_ratio was 0.75, is now 0.5"
    ):
        mae.pretrain(out=finished, resume=True, quiet=True, lr=0.5, mask_ratio=0.5)
    with pytest.raises(UsageError, match="builtin:photos holds other images than when the run in .* was begun"):
        mae.pretrain("builtin:photos", out=finished, resume=True, quiet=True)
    with pytest.raises(UsageError, match="recipe was 'default', is now 'cifar10'"):
        mae.pretrain(recipe="cifar10", out=finished, resume=True, quiet=True)
    changed = {"workers": 1, "accumulate": 2}
    assert mae.pretrain("builtin:digits", out=finished, resume=True, quiet=True, **changed).finished


def test_a_resumed_run_with_uniformity_refuses_other_parts(pretrain: Run):
    folder = pretrain(uniformity=0.01, accumulate=2).folder
    with pytest.raises(
        UsageError, match="--accumulate was 2, is now 4: --uniformity compares the images of a micro-batch"
    ):
        mae.pretrain(out=folder, resume=True, quiet=True, accumulate=4)
    assert mae.pretrain(out=folder, resume=True, quiet=True, accumulate=2).finished


def test_a_resumed_run_refuses_other_images(pretrain: Run, tmp_path: Path, photos: Path):
    pretrain(source=photos, img_size=32, patch_size=4, batch_size=8)
    (photos / "00.png").unlink()
    with pytest.raises(UsageError, match="holds other images than when the run .* was begun"):
        mae.pretrain(out=tmp_path / "run", resume=True, quiet=True)


def test_images_may_have_moved(pretrain: Run, tmp_path: Path, photos: Path):
    run = pretrain(source=photos, img_size=32, patch_size=4, batch_size=8).folder
    moved = photos.rename(tmp_path / "moved")
    with pytest.raises(UsageError, match=f"{photos.name}.* did you mean .*moved"):
        mae.pretrain(out=run, resume=True, quiet=True)
    assert mae.pretrain(moved, out=run, resume=True, quiet=True).finished


def test_resume_needs_a_run(tmp_path: Path):
    with pytest.raises(UsageError, match="--resume needs --out"):
        mae.pretrain("builtin:digits", resume=True, quiet=True)
    with pytest.raises(UsageError, match="holds no run to go on with"):
        mae.pretrain(out=tmp_path / "nowhere", resume=True, quiet=True)


def test_resume_begins_a_run_that_is_none_yet_where_a_source_says_of_what(
    pretrain: Run, finished: Path, tmp_path: Path
):
    """The same command then serves every start of a job that is stopped and started again."""
    for _ in range(2):
        assert pretrain("job", resume=True).finished
    assert_same_end(finished, tmp_path / "job")


@pytest.mark.parametrize("left", [["panels"], ["panels", "data.json"], ["panels", "data.json", ".config.json.writing"]])
def test_a_start_killed_before_the_run_was_begun_leaves_the_folder_free(
    pretrain: Run, finished: Path, tmp_path: Path, left: list[str]
):
    (tmp_path / "job" / "panels").mkdir(parents=True)
    for name in left[1:]:
        (tmp_path / "job" / name).write_text("{")
    assert pretrain("job").finished
    assert_same_end(finished, tmp_path / "job")


@pytest.mark.parametrize("left", ["panels/mine.png", "notes.txt", "data.json.txt"])
def test_a_folder_with_anything_else_is_refused(pretrain: Run, tmp_path: Path, left: str):
    (tmp_path / "job" / "panels").mkdir(parents=True)
    (tmp_path / "job" / left).write_text("")
    with pytest.raises(UsageError, match="is there already and is not an empty folder"):
        pretrain("job")


@pytest.mark.slow
def test_gpus_starts_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Really; what they compute together is in test_together.py."""
    for name in ("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "TORCHELASTIC_SIGNALS_TO_HANDLE"):
        monkeypatch.setenv(name, {"TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT"}.get(name, "30"))
    changed = {"steps": 2, "workers": 0, "out": str(tmp_path / "run")}
    flags = [flag for name, value in {**OPTIONS, **changed}.items() for flag in as_flags(name, value)]
    assert main(["pretrain", "builtin:digits", "--gpus", "2", *flags]) == 0
    assert len(loss_rows(read_rows(tmp_path / "run" / "metrics.jsonl"))) == 2


def test_a_run_that_torchrun_may_start_anew_needs_a_folder(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "1")
    with pytest.raises(UsageError, match="give --out, so that it finds what it did"):
        mae.pretrain("builtin:digits", quiet=True)
