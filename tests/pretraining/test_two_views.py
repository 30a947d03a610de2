"""Runs that compare views of an image: what is refused, what is told, how they go on."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import mae
from mae.cli import main
from mae.core.kinds import find, kinds
from mae.training.log import loss_rows, read_rows

Run = Callable[..., mae.PretrainResult]
KINDS = [kind for kind in kinds("terms") if find("terms", kind).reads_views]
ALL: dict[str, Any] = {"repeated_aug": 2, **dict.fromkeys(KINDS, 0.05)}
MODEL = "--model mae_vit_lesson_patch4 --img-size 8 --patch-size 2 --device cpu --workers 0 --steps 200"


def rows(folder: Path) -> list[dict[str, Any]]:
    return loss_rows(read_rows(folder / "metrics.jsonl"))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("args", "says"),
    [
        ("", "--{} compares views of an image, and --repeated-aug is 1; make two crops of each image or more"),
        ("--repeated-aug 2 --batch-size 4 --accumulate 2", "--{} compares the images of a batch, and --batch-size 4 in "
         "--accumulate 2 micro-batches in --repeated-aug 2 views of each image leaves 1; expected 2 at least"),
        ("--repeated-aug 2 --{}-pool cls --no-cls-token", "{} is to read the class token, and the encoder has none"),
    ],
)  # fmt: skip
def test_wrong_requests(kind: str, args: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "run"
    words = ["pretrain", "builtin:digits", *MODEL.split(), f"--{kind}", "0.1", *args.format(kind).split()]
    assert main([*words, "--out", str(out)]) == 2 and not out.exists()
    assert re.search(says.format(kind), " ".join(capsys.readouterr().err.split()))


def test_terms_are_logged_told_and_stored(pretrain: Run, capsys: pytest.CaptureFixture[str]):
    result = pretrain(**ALL, quiet=False)
    told = " ".join(capsys.readouterr().out.split())
    assert "0.05 x visreg over 16 images in 2 views" in told
    for row in rows(result.folder):
        assert set(KINDS) < row["terms"].keys()
        expected = row["terms"]["reconstruction"] + 0.05 * sum(row["terms"][kind] for kind in KINDS)
        assert row["loss"] == pytest.approx(expected, rel=1e-5)
    model = result.load_model()
    assert set(model.term_heads) == set(KINDS)
    assert json.loads((result.folder / "summary.json").read_text())["terms"].keys() >= set(KINDS)


def test_a_run_goes_on_to_the_same_end_bit_for_bit(pretrain: Run):
    whole = pretrain("whole", **ALL, accumulate=2)
    cut = pretrain("cut", **ALL, accumulate=2, checkpoint_keep_every=2)
    (cut.folder / "summary.json").unlink()
    for step in ("step-00000004", "step-00000006"):
        shutil.rmtree(cut.folder / "checkpoints" / step)
    assert mae.pretrain(out=cut.folder, resume=True, quiet=True).finished
    one, other = whole.load_model().state_dict(), mae.load(cut.folder).state_dict()
    assert any(name.startswith("term_heads.") for name in one)
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert [row["terms"] for row in rows(cut.folder)][-1] == [row["terms"] for row in rows(whole.folder)][-1]


def test_a_resumed_run_refuses_other_micro_batches(pretrain: Run):
    folder = pretrain(visreg=0.1, repeated_aug=2, accumulate=2).folder
    with pytest.raises(mae.UsageError, match="--accumulate was 2, is now 4: --visreg compares the images of a micro-b"):
        mae.pretrain(out=folder, resume=True, quiet=True, accumulate=4)


@pytest.mark.parametrize("kind", ["sigreg", "visreg"])
def test_images_become_more_normally_distributed(pretrain: Run, kind: str):
    options = {"repeated_aug": 2, "steps": 24, "lr": 1e-3, "batch_size": 64, "checkpoint_every": None}
    found = [row["terms"][kind] for row in rows(pretrain(**{kind: 1.0}, **options).folder)]
    assert found[-1] < 0.75 * found[0]


def test_colours_of_crops_change_and_the_run_goes_on(pretrain: Run, photos: Path, capsys: pytest.CaptureFixture[str]):
    for name in ("deep.tif", "dot.png"):
        (photos / name).unlink()
    options = {"source": photos, "img_size": 32, "patch_size": 4, "batch_size": 8, "in_chans": 3}
    colours = {"color_jitter": 0.5, "grayscale": 0.2}
    plain = pretrain("plain", **options)
    result = pretrain("run", **options, **colours, quiet=False)
    assert "colour jitter 0.5, 0.2 of them grey" in " ".join(capsys.readouterr().out.split())
    assert rows(plain.folder)[0]["loss"] != rows(result.folder)[0]["loss"]
    cut = pretrain("cut", **options, **colours, checkpoint_keep_every=2)
    (cut.folder / "summary.json").unlink()
    for step in ("step-00000004", "step-00000006"):
        shutil.rmtree(cut.folder / "checkpoints" / step)
    assert mae.pretrain(out=cut.folder, resume=True, quiet=True).finished
    one, other = result.load_model().state_dict(), mae.load(cut.folder).state_dict()
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("option", ["--color-jitter 1", "--grayscale 0.2"])
def test_colours_of_grey_images_are_refused_before_a_run_begins(
    option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    out = tmp_path / "run"
    assert main(["pretrain", "builtin:digits", *MODEL.split(), *option.split(), "--out", str(out)]) == 2
    told = " ".join(capsys.readouterr().err.split())
    assert "change the colours of 8-bit images in red, green and blue; those of" in told and not out.exists()


@pytest.mark.doctor
def test_the_doctor_finds_such_a_run_sound(pretrain: Run):
    assert pretrain(visreg=0.1, repeated_aug=3, batch_size=24).finished


@pytest.mark.doctor
@pytest.mark.parametrize(
    ("words", "few"), [("--batch-size 60", "30"), ("--batch-size 128 --accumulate 4", "16"), ("", "")]
)
def test_few_images_to_compare_are_told(words: str, few: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    args = ["doctor", "builtin:digits", *MODEL.split(), "--visreg", "0.1", "--repeated-aug", "2", *words.split()]
    assert main(args) == 0
    told = " ".join(capsys.readouterr().out.split())
    if few:
        assert (
            f"images compared visreg: {few} at once; of so few a distribution says little: raise --batch-size" in told
        )
    else:
        assert "of so few" not in told
