"""What a run of a study does where an evaluation does not apply to it."""

from pathlib import Path

import numpy as np
import pytest
from jobs_here import run_jobs_here
from tiny_study import TINY

from mae.errors import UsageError
from mae.experiments.run import study
from mae.records import read_json
from mae.training.run_folder import RunFolder


@pytest.mark.slow
def test_variants_without_pixels_have_no_pictures(
    labelled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """HOG is no picture: no panels, no PSNR, no part in the comparison; all else is measured."""
    run_jobs_here(monkeypatch)
    options = {**TINY, "patch_size": 4, "finetune_epochs": 0.0, "target": "hog", "target_cell": 4}
    found = study("mask_ratio", labelled, out=tmp_path / "study", seeds=1, ratios=[0.5, 0.75], **options)
    assert found.finished and len(found.result.runs) == 2
    for run in found.result.runs:
        assert "knn" in run.numbers and "psnr" not in run.numbers
        assert read_json(RunFolder(run.folder).summary)["panel"] is None
        assert not any(RunFolder(run.folder).panels.iterdir())
    assert capsys.readouterr().out.count("predicts hog; reconstruction needs a target of pixels") == 4


@pytest.mark.slow
def test_images_that_are_not_of_8_bits_are_fine_tuned_on_without_augmentation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    run_jobs_here(monkeypatch)
    random = np.random.default_rng(0)
    for part, count in (("train", 12), ("test", 4)):
        for name in ("field", "water"):
            (folder := tmp_path / "tiles" / part / name).mkdir(parents=True)
            for number in range(count):
                np.save(folder / f"{number}.npy", random.integers(0, 4000, (8, 9, 5), dtype=np.uint16))
    found = study("mask_ratio", tmp_path / "tiles", out=tmp_path / "study", seeds=1, ratios=[0.5, 0.75], **TINY)
    assert found.finished
    for run in found.result.runs:
        assert "finetune" in run.numbers
        assert any("evaluate finetune" in command and "--no-augment" in command for command in run.commands)


def test_too_few_images_to_vote_are_refused_before_the_training(tmp_path: Path):
    for name in ("field", "water"):
        (tmp_path / "tiles" / name).mkdir(parents=True)
        for number in range(5):
            np.save(tmp_path / "tiles" / name / f"{number}.npy", np.full((8, 8, 3), number, dtype=np.uint8))
    with pytest.raises(UsageError, match="holds 8 labelled training images; expected 20 or more"):
        study("mask_ratio", tmp_path / "tiles", out=tmp_path / "study", seeds=1, ratios=[0.5, 0.75], **TINY)
    assert not (tmp_path / "study").exists()
