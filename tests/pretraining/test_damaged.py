"""Runs whose checkpoints were damaged: nothing is lost for it, and it is told."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from light import little_measuring

import mae
from mae.cli import main
from mae.errors import MAEError
from mae.training.log import loss_rows, read_rows


@pytest.fixture
def run(finished: Path) -> Path:
    """With checkpoints of its steps 4 and 6."""
    return finished


def damage(run: Path, *steps: int) -> None:
    for step in steps:
        path = run / "checkpoints" / f"step-{step:08d}" / "optimizer.safetensors"
        path.write_bytes(path.read_bytes()[:-8])


def everything(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def steps_of(run: Path) -> list[int]:
    return [row["step"] for row in loss_rows(read_rows(run / "metrics.jsonl"))]


def test_a_run_without_a_whole_checkpoint_is_not_begun_again(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    damage(run, 4, 6)
    (run / "checkpoints" / ".writing-step-00000008").mkdir()
    before = everything(run)
    assert main(["pretrain", "--out", str(run), "--resume"]) == 1
    told = capsys.readouterr().err
    assert told.startswith(f"mae: error: every checkpoint in {run / 'checkpoints'} is damaged: ")
    assert all(f"step-0000000{step}/optimizer.safetensors is not the file that was written" in told for step in (4, 6))
    assert "restore the files from a copy, or start a new run in another folder" in told and ".writing" not in told
    assert everything(run) == before and (run / "checkpoints" / ".writing-step-00000008").is_dir()


def test_a_finished_run_without_its_checkpoints_keeps_its_records(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(run / "checkpoints")
    before = everything(run)
    assert main(["pretrain", "--out", str(run), "--resume"]) == 2
    told = capsys.readouterr().err
    assert f"{run / 'checkpoints'} holds no checkpoint, and the run finished after step 6" in told
    assert "begin anew with another --out" in told and everything(run) == before


def test_a_run_that_begins_again_says_so(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(run / "checkpoints")
    (run / "ended.json").unlink()
    assert main(["pretrain", "--out", str(run), "--resume"]) == 0
    assert f"{run} holds no checkpoint yet: the run begins again at step 0" in capsys.readouterr().out


@pytest.mark.parametrize("left", ["nothing", "no folder", "what a killed writer left"])
def test_a_run_without_a_checkpoint_yet_begins_at_its_first_step(run: Path, left: str) -> None:
    (run / "ended.json").unlink()  # it was killed
    shutil.rmtree(run / "checkpoints")
    if left != "no folder":
        (run / "checkpoints").mkdir()
    if left == "what a killed writer left":
        (run / "checkpoints" / ".writing-step-00000002").mkdir()
    assert mae.pretrain(out=run, resume=True, quiet=True).finished
    assert steps_of(run)[-1] == 6 and (run / "checkpoints" / "step-00000006" / "manifest.json").is_file()


def test_it_goes_on_from_an_older_one_and_says_so(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    damage(run, 6)
    before = steps_of(run)
    assert main(["pretrain", "--out", str(run), "--resume"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if "is not the file that was written" in line]
    (line,) = lines
    checkpoints = run / "checkpoints"
    assert line == (
        f"{checkpoints}/step-00000006/optimizer.safetensors is not the file that was written (size or checksum "
        f"differs); the older {checkpoints}/step-00000004 is used instead"
    )
    assert steps_of(run) == before
    assert main(["pretrain", "--out", str(run), "--resume"]) == 0
    assert "is not the file that was written" not in capsys.readouterr().out


def test_a_program_that_loads_it_can_notice(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    damage(run, 6)
    mae.load(run)
    (record,) = caplog.records
    assert record.name == "mae.training.checkpoint" and "step-00000004 is used instead" in record.getMessage()
    damage(run, 4)
    with pytest.raises(MAEError, match="is damaged: "):
        mae.load(run)


@pytest.mark.slow
def test_a_process_says_it_on_stderr(run: Path) -> None:
    damage(run, 6)
    code = (
        "import pathlib, sys; from mae.training.run_folder import find_weights; find_weights(pathlib.Path(sys.argv[1]))"
    )
    done = subprocess.run([sys.executable, "-c", code, run], capture_output=True, text=True, check=True)
    assert done.stderr == (
        f"{run}/checkpoints/step-00000006/optimizer.safetensors is not the file that was written (size or checksum "
        f"differs); the older {run}/checkpoints/step-00000004 is used instead\n"
    )


@pytest.mark.parametrize(
    "command", ["embed", "evaluate", "neighbours", "reconstruct", pytest.param("doctor", marks=pytest.mark.slow)]
)
def test_each_command_says_which_weights_it_took(
    run: Path,
    photos: Path,
    command: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    little_measuring(monkeypatch)
    damage(run, 6)
    out = ["--device", "cpu", "--out", str(tmp_path / "out")]
    words = {
        "embed": ["embed", str(run), "builtin:digits", *out[:-1], str(tmp_path / "f.npz")],
        "evaluate": ["evaluate", "label_free", str(run), "--data", "builtin:digits", *out],
        "neighbours": ["neighbours", str(run), "builtin:digits", *out[:-1], str(tmp_path / "n.png"), "--count", "1"],
        "reconstruct": ["reconstruct", str(run), str(photos / "01.jpg"), *out[:-1], str(tmp_path / "r.png")],
        "doctor": ["doctor", str(run), "--json"],
    }[command]
    assert main(words) == 0
    shown = capsys.readouterr().out
    (told,) = caplog.messages
    assert "step-00000006/optimizer.safetensors is not the file" in told and "step-00000004 is used instead" in told
    assert "used instead" not in shown
    if command == "doctor":
        json.loads(shown)
    else:
        assert shown.count("loaded encoder ") == 1 and "probe reproduced (largest difference" in shown
    damage(run, 4)
    for written in ("f.npz", "n.png", "r.png"):
        (tmp_path / written).unlink(missing_ok=True)
    assert main(words) == 1
    assert "is damaged: " in (told := capsys.readouterr().err) and "without a checkpoint" not in told
