"""`mae doctor labels` as it is typed."""

import json
from pathlib import Path

import pytest
from drawn_boxes import drawn_boxes
from drawn_masks import drawn_masks
from PIL import Image

from mae.cli import main


def test_good_labels_are_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.chdir(tmp_path)
    assert main(["doctor", "labels", str(drawn_boxes(Path("boxes")))]) == 0
    shown = capsys.readouterr().out
    assert "COCO: 12 training images and 6 test images" in shown and "outlined objects of 2 classes" in shown
    assert "warn" not in shown and "Look at labels.png" in shown
    assert main(["doctor", "labels", "boxes"]) == 2
    assert "labels.png exists and is not overwritten" in capsys.readouterr().err


def test_a_fault_that_spoils_training_is_told_by_the_exit_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    folder, out = drawn_masks(tmp_path / "masks"), tmp_path / "labels.png"
    (folder / "classes.txt").write_text("lying\nstanding\n")
    assert main(["doctor", "labels", str(folder), "--out", str(out)]) == 1
    shown = capsys.readouterr().out
    assert "STOP values" in shown and "train/masks/0.png (the number 2)" in shown and not out.exists()
    assert main(["doctor", "labels", str(folder), "--out", str(out), "--ignore", "2", "--json"]) == 0
    findings = json.loads(capsys.readouterr().out)["findings"]
    assert {each["level"] for each in findings} == {"ok"}
    with Image.open(out) as picture:
        assert picture.width > 1000


def test_folders_that_hold_no_labels_are_a_users_mistake(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["doctor", "labels", str(tmp_path / "absent")]) == 2
    assert "is no folder" in capsys.readouterr().err


def test_help_tells_what_it_is_for(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        main(["doctor", "labels", "--help"])
    assert "Look for silent faults in labels" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["doctor", "--help"])
    assert "mae doctor labels FOLDER" in capsys.readouterr().out
