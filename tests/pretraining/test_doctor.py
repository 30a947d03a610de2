"""The checks before a run as a user meets them: as a command, at a run's beginning, and of a run that is there."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from data.flaky import serving
from data.packs import jpeg
from light import forget_images, little_measuring
from PIL import Image

import mae
from mae.cli import main
from mae.errors import MAEError, UsageError
from mae.findings import Finding
from mae.pretraining.checks import doctor
from mae.report.terminal.diagnosis import Diagnosis, refuse

pytestmark = [pytest.mark.doctor, pytest.mark.slow]
MODEL = "--model mae_vit_lesson_patch4 --img-size 8 --patch-size 2 --batch-size 16 --steps 4 --device cpu".split()


@pytest.fixture(autouse=True)
def _hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    little_measuring(monkeypatch)


@pytest.fixture
def white(tmp_path: Path) -> Path:
    """Images that are white all over but for a speck."""
    folder = tmp_path / "white"
    folder.mkdir()
    for number in range(24):
        pixels = np.full((16, 16, 3), 255, np.uint8)
        pixels[0, 0] = number
        Image.fromarray(pixels).save(folder / f"{number}.png")
    return folder


def test_a_source_is_checked_line_by_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "builtin:digits", *MODEL]) == 0
    told = capsys.readouterr().out
    for name in (
        "positions",
        "masks",
        "loss",
        "every tensor learns",
        "channel statistics",
        "rate and schedule",
        "memory",
    ):
        assert f"ok   {name}" in told
    assert "STOP" not in told and "batch_size 16 (4096)" in told


def test_a_rate_that_must_diverge_is_warned_of(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "builtin:digits", *MODEL, "--lr", "1"]) == 0
    assert "warn rate and schedule" in capsys.readouterr().out


def test_it_is_told_to_programs_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "builtin:digits", *MODEL, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["seconds"] > 0 and {"name", "level", "value", "advice"} == found["findings"][0].keys()


def test_a_run_that_would_be_worthless_is_not_begun(
    white: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    assert main(["doctor", str(white), *MODEL]) == 1
    assert "STOP saturation" in capsys.readouterr().out
    assert main(["pretrain", str(white), *MODEL, "--out", str(out)]) == 1
    error = capsys.readouterr().err
    assert "would be worthless: " in error and "saturation" in error and "--no-doctor" in error
    assert not out.exists()
    assert main(["pretrain", str(white), *MODEL, "--out", str(out), "--no-doctor"]) == 0


def test_what_is_in_order_is_only_counted_at_the_beginning_of_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["pretrain", "builtin:digits", *MODEL, "--out", str(tmp_path / "run")]) == 0
    told = capsys.readouterr().out
    assert "checks in" in told and "ok   positions" not in told and "note decoder" in told


def test_a_checked_run_is_the_run_without_the_checks(tmp_path: Path, tiny: dict[str, Any]) -> None:
    weights = []
    for checked in (False, True):
        result = mae.pretrain("builtin:digits", **tiny, out=tmp_path / str(checked), doctor=checked)
        weights.append(result.load_model().state_dict())
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())


def test_a_run_is_checked_as_it_stands(
    tmp_path: Path, tiny: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = mae.pretrain("builtin:digits", **tiny, out=tmp_path / "run", doctor=False).folder
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert main(["doctor", str(folder)]) == 0
    assert "weights" in (told := capsys.readouterr().out) and "probe reproduced" in told
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    assert main(["doctor", str(folder), "--lr", "1"]) == 2
    assert "leave out lr" in capsys.readouterr().err


def test_nothing_to_check_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 2
    assert "nothing to check" in capsys.readouterr().err


@pytest.mark.parametrize("which", ["imagenet", "model"])
def test_statistics_that_were_chosen_only_warn(
    tmp_path: Path, tiny: dict[str, Any], capsys: pytest.CaptureFixture[str], which: str
) -> None:
    """Those of ImageNet or of weights to go on from do not fit every set, and are wanted all the same."""
    rng = np.random.default_rng(0)
    for name, largest in (("dark", 60), ("bright", 255)):
        (tmp_path / name).mkdir()
        for number in range(40):
            image = Image.fromarray(rng.integers(0, largest, (16, 16, 3), dtype=np.uint8))
            image.save(tmp_path / name / f"{number}.png")
    options = [*MODEL, "--statistics", "imagenet"]
    if which == "model":
        run = mae.pretrain(tmp_path / "bright", **tiny, out=tmp_path / "run", doctor=False)
        options = ["--init-from", str(run.folder), "--device", "cpu"]
    assert main(["doctor", str(tmp_path / "dark"), *options]) == 0
    assert "warn channel statistics" in capsys.readouterr().out


def test_only_what_stops_is_refused() -> None:
    ok, warned, fatal = (
        Finding(name=level, level=level, value="1", advice="do it") for level in ("ok", "warn", "stop")
    )  # fmt: skip
    refuse(Diagnosis(findings=(ok, warned), seconds=1))
    with pytest.raises(MAEError, match=r"worthless: stop: 1 \(do it\)"):
        refuse(Diagnosis(findings=(ok, fatal), seconds=1))


def test_a_shallow_decoder_is_noted(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "builtin:digits", *MODEL, "--decoder-depth", "4"]) == 0
    assert "note decoder" not in capsys.readouterr().out


def test_too_little_memory_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(doctor, "available_memory", lambda device: 1000)
    assert main(["doctor", "builtin:digits", *MODEL]) == 0
    assert "warn memory" in (told := capsys.readouterr().out) and "--accumulate 2" in told


def test_a_slow_loader_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(doctor, "measure_loading", lambda prepared, seconds: 0.5)
    assert main(["doctor", "builtin:digits", *MODEL]) == 0
    assert "note speed" in (told := capsys.readouterr().out) and "--workers" in told


@pytest.mark.parametrize(("room", "level"), [(2, "warn"), (100, "ok  ")])
def test_a_cache_without_room_for_the_shards_in_use_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], room: int, level: str
) -> None:
    photos = tmp_path / "photos"
    photos.mkdir()
    for number in range(48):
        (photos / f"{number}.jpg").write_bytes(jpeg(20, 20, seed=number))
    assert main(["pack", str(photos), str(tmp_path / "served" / "pack"), "--workers", "1", "--per-shard", "6"]) == 0
    shard = max(path.stat().st_size for path in (tmp_path / "served" / "pack").glob("*.tar"))
    monkeypatch.setenv("OPENMAE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("OPENMAE_CACHE_GB", str(room * shard / 1e9))
    forget_images(monkeypatch)
    with serving(tmp_path / "served") as server:
        assert main(["doctor", f"{server.url}/pack", *MODEL]) == 0
    told = capsys.readouterr().out
    assert f"{level} cache " in told and ("OPENMAE_CACHE_GB=1" in told) is (level == "warn")


def test_a_folder_that_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="holds no run"):
        doctor.examine_run(tmp_path, device="cpu")


def test_the_doctor_changes_no_random_number(pretrain: Callable[..., mae.PretrainResult]) -> None:
    torch.manual_seed(3)
    expected = torch.get_rng_state()
    pretrain("run", doctor=True)
    assert torch.equal(torch.get_rng_state(), expected)
