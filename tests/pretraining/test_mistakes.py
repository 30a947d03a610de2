"""Every mistake a user can make ends in one clear line, an exit code, and nothing half-written."""

import json
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import numpy as np
import pytest
import tifffile
import torch
from PIL import Image
from safetensors.torch import save_file

import mae
from mae.cli import main
from mae.errors import MAEError
from mae.models.file import FORMAT, load_model, model_metadata
from mae.pretraining import run
from mae.training import checkpoint

QUICK = "--model mae_vit_lesson_patch4 --img-size 32 --steps 2 --batch-size 4 --device cpu --workers 0".split()


def complain(capsys: pytest.CaptureFixture[str], *args: object) -> tuple[int, str]:
    code = main([str(arg) for arg in args])
    error = capsys.readouterr().err
    assert error.startswith("mae: error: ") and "Traceback" not in error
    return code, error


@pytest.mark.digits
@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["builtin:photo"], "builtin:photos"),
        ([], "no images are named"),
        (["builtin:digits", "--model", "mae_vit_smal"], "unknown model 'mae_vit_smal'; nearest: mae_vit_small"),
        (
            ["builtin:digits", "--model", "mae_vit_small", "--img-size", "100"],
            "nearest sizes that are: 96x96 or 112x112",
        ),
        (["builtin:digits", "--mask-ratio", "0"], "mask_ratio is 0.0; expected greater than 0"),
        (["builtin:digits", "--mask-ratio", "1"], "mask_ratio is 1.0; expected less than 1"),
        (["builtin:digits", "--mask-ratio", "0.99"], "leaves 0 visible and 16 masked"),
        (["builtin:digits", "--batch-size", "5000"], "give at most --batch-size 1410; 28 makes more steps"),
        (["builtin:digits", "--batch-size", "30", "--accumulate", "4"], "multiple of 4"),
        (["builtin:digits", "--lr", "1", "--base-lr", "1"], "both --lr and --base-lr"),
        (["builtin:digits", "--epochs", "1", "--steps", "1"], "both --epochs and --steps"),
        (["builtin:digits", "--epochs", "2", "--warmup-epochs", "40"], "the whole run has 2 epochs"),
        (["builtin:digits", "--epochs", "inf"], "--epochs is inf"),
        (["builtin:digits", "--teacher", "ema"], "nor a term reads it; give one that does, such as --target features"),
        (["builtin:digits", "--teacher", "codebook"], "such as --target codes, or leave it out"),
        (
            ["builtin:digits", "--mask", "attention", "--teacher", "ema", "--teacher-layers", "2"],
            "--teacher-layers says what the teacher gives to a target or a term, and --mask attention alone reads",
        ),
        (["builtin:digits", "--visreg-dim", "8"], "--visreg-dim is an option of --visreg, which counts 0; give its"),
        (["builtin:digits", "--mask-start", "0.4"], "--mask-start is for a mask ratio that changes, and --mask-sch"),
        (
            ["builtin:digits", "--mask-schedule", "random", "--mask-warmup", "2", "--steps", "1"],
            "--mask-schedule random draws one for each batch; leave it out",
        ),
        (
            ["builtin:digits", "--difficulty", "1", "--mask-predicted", "0.05", "--steps", "1"],
            "--difficulty compares the predicted patches of an image with each other, and the mask has only",
        ),
        (["builtin:digits", "--seed", str(1 << 63)], "--seed is"),
        (["builtin:digits", "--betas", "2", "3"], "--betas is"),
        (["builtin:digits", "--mlp-ratio", "0.0001"], "leaves nothing of the MLPs"),
        (["builtin:digits", "--statistics", "imagenet"], "for 3 channels, these images have 1"),
        (["builtin:digits", "--recipe", "cifra10"], "unknown recipe 'cifra10'; nearest: cifar10"),
        (["builtin:digits", "--precision", "fp16", "--device", "cpu"], "fp16 needs a GPU"),
        (["builtin:digits", "--gpus", "0", "--device", "cpu"], "--gpus is 0"),
        (["builtin:digits", "--gpus", "100000", "--device", "cpu"], "processes at most on this machine's CPU"),
        (["builtin:digits", "--workers", "100000"], "each is a process with its own memory"),
        (["builtin:digits", "--patch-size", "1"], "one value"),
    ],
)
def test_wrong_requests(args: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "run"
    code, error = complain(capsys, "pretrain", *args, "--out", out)
    assert code == 2
    assert says in error
    assert not out.exists()


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--batch-size", "8", "--accumulate", "3"], "--batch-size 8 cannot be divided into 3 micro-batches"),
        (["--monitor", "nothing"], "nothing does not exist"),
    ],
)
def test_what_needs_no_images_is_refused_before_they_are_looked_at(
    args: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr("mae.pretraining.resolve._found_data", lambda *args, **options: pytest.fail("looked at"))
    code, error = complain(capsys, "pretrain", "builtin:digits", *args, "--out", tmp_path / "run")
    assert code == 2 and says in error


_PYTHON = """
import numpy, pathlib, torch, mae
for call in {calls!r}:
    try:
        print("taken:", eval(call))
    except mae.UsageError as error:
        print(error)
"""


def test_wrong_types_in_python():
    """In a process of its own, since the tests check the types of what is called."""
    lesson = "mae.create_model('mae_vit_lesson_patch4', "
    small = f"{lesson}img_size=16)"
    says = {
        "mae.pretrain(numpy.zeros((4, 8, 8, 3)))": "the source is of type ndarray; expected the path or name of images",
        "mae.pretrain('x', callbacks=[print])": "callbacks is [<built-in function print>]; expected a list",
        "mae.pretrain('x', callbacks=3)": "callbacks is 3; expected a list",
        "mae.pretrain(None)": "the source is of type NoneType",
        "mae.pretrain(['a.png'])": "the source is of type list",
        "mae.pretrain(b'photos')": "the source is of type bytes",
        "mae.pretrain('builtin:digits', recipe=None)": "the recipe is None",
        "mae.pretrain('builtin:digits', recipe=3)": "the recipe is 3",
        "mae.pretrain('builtin:digits', steps=numpy.float64(1.5))": "--steps is np.float64(1.5); expected a valid",
        "mae.create_model(None)": "create_model takes the name of a model, such as 'mae_vit_",
        "mae.create_model(3)": "unknown model 3; nearest: mae_vit_",
        "mae.create_model(pathlib.Path('mae_vit_small'))": "unknown model PosixPath('mae_vit_small'); nearest: ",
        f"{lesson}img_size=True)": "img_size is True; expected a valid integer",
        f"{lesson}depth=numpy.float64(2.5))": "depth is np.float64(2.5); expected a valid integer",
        f"{lesson}img_size=numpy.int64(16), depth=torch.tensor(2)).encoder.grid": "taken: (4, 4)",
        f"{small}(torch.zeros(2, 3, 16, 16).double())": "images of type torch.float64; the model's weights",
        f"{small}.bfloat16().encode(torch.zeros(2, 3, 16, 16))": "images of type torch.float32; the model's",
        f"{small}(torch.zeros(2, 3, 16, 16), mask=numpy.zeros(16))": "the mask is of type ndarray; expected",
        "mae.save(torch.nn.Linear(2, 2), 'model.safetensors')": "the model is of type Linear",
    }
    script = _PYTHON.format(calls=list(says))
    lines = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=100
    ).stdout.splitlines()
    assert len(lines) == len(says)
    for line, (call, start) in zip(lines, says.items(), strict=True):
        assert line.startswith(start), call


def test_no_images(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "read.txt").write_text("nothing to see")
    code, error = complain(capsys, "pretrain", tmp_path / "notes", "--out", tmp_path / "run")
    assert code == 2 and "notes" in error and ".txt" in error


def test_the_folder_of_another_run(photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "run"
    assert main(["pretrain", str(photos), *QUICK, "--out", str(out)]) == 0
    before = sorted(out.rglob("*"))
    capsys.readouterr()
    code, error = complain(capsys, "pretrain", photos, *QUICK, "--out", out)
    assert code == 2 and "holds another run" in error and "--resume" in error
    assert sorted(out.rglob("*")) == before


@pytest.mark.parametrize("named", [True, False])
def test_a_run_among_the_images(
    named: bool, photos: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """Its pictures would be images of the next run, and of its own when it goes on."""
    monkeypatch.chdir(photos)
    before = sorted(photos.rglob("*"))
    words = ["--out", "sub/run"] if named else []
    code, error = complain(capsys, "pretrain", photos, *QUICK, *words)
    assert code == 2 and "would be taken for images" in error and "--out" in error
    assert sorted(photos.rglob("*")) == before


def test_a_rate_that_would_rise_to_its_end(photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    code, error = complain(capsys, "pretrain", photos, *QUICK, "--min-lr", "1", "--out", tmp_path / "run")
    assert code == 2 and "--min-lr is 1, above the peak rate of" in error and not (tmp_path / "run").exists()


def test_a_run_beside_the_part_that_is_trained_on(photos: Path, tmp_path: Path):
    photos.rename(tmp_path / "train")
    assert main(["pretrain", str(tmp_path), *QUICK, "--out", str(tmp_path / "run")]) == 0


@pytest.mark.digits
@pytest.mark.parametrize(("out", "says"), [("file/run", "is not a folder"), ("loop/run", "is not a folder")])
def test_a_folder_that_cannot_be_made(out: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "file").write_text("")
    (tmp_path / "loop").symlink_to("loop")
    code, error = complain(capsys, "pretrain", "builtin:digits", *QUICK, "--out", tmp_path / out)
    assert code == 2 and says in error and "choose another --out" in error


def test_a_link_that_leads_nowhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "photos").symlink_to("moved")
    code, error = complain(capsys, "pretrain", tmp_path / "photos", *QUICK, "--out", tmp_path / "run")
    assert code == 2 and "photos is a broken symbolic link" in error


def test_two_runs_begun_at_once_have_folders_of_their_own(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The second chose its name before the first had written anything."""
    monkeypatch.chdir(tmp_path)
    words = ["pretrain", str(photos), *QUICK]
    carry_out, codes = run._carry_out, list[int]()

    def during(*args: object) -> object:
        if not codes:
            codes.append(99)
            codes[:] = [main(words)]
        return carry_out(*args)

    monkeypatch.setattr(run, "_carry_out", during)
    assert main(words) == 0 and codes == [0]
    names = sorted(path.name for path in Path("runs").iterdir())
    assert names == ["photos-lesson_patch4", "photos-lesson_patch4-2"]
    assert all(Path("runs", name, "summary.json").is_file() for name in names)


def test_a_run_that_does_not_begin_leaves_no_folder(photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run, "_carry_out", lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        mae.pretrain(
            photos, model="mae_vit_lesson_patch4", img_size=32, batch_size=4, steps=2, device="cpu", quiet=True
        )
    assert not Path("runs").exists()


def test_a_source_of_a_long_name(photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    photos.rename(tmp_path / ("漢" * 80))  # 240 bytes, of 255 at most
    assert main(["pretrain", "漢" * 80, *QUICK]) == 0
    (made,) = Path("runs").iterdir()
    assert made.name == "漢" * 33 + "-lesson_patch4"


@pytest.mark.parametrize("kind", ["truncated", "forged", "bands", "text"])
def test_unreadable_files_stop_the_run_and_are_named(
    kind: str, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    bad = photos / {"bands": "bad.tif"}.get(kind, "bad.jpg")
    Image.new("RGB", (64, 64), (200, 10, 10)).save(photos / "bad.jpg")
    whole = (photos / "bad.jpg").read_bytes()
    if kind == "truncated":
        bad.write_bytes(whole[: len(whole) // 2])
    elif kind == "forged":  # a small file whose header claims 30000 x 30000 pixels
        at = whole.index(b"\xff\xc0") + 5
        bad.write_bytes(whole[:at] + (30000).to_bytes(2, "big") * 2 + whole[at + 4 :])
    elif kind == "bands":
        (photos / "bad.jpg").unlink()
        tifffile.imwrite(bad, np.zeros((16, 16, 13), np.uint16), photometric="minisblack", planarconfig="contig")
    else:
        bad.write_text("this is no image")
    code, error = complain(capsys, "pretrain", photos, *QUICK, "--out", tmp_path / "run")
    assert code == 1
    assert bad.name in error and "--max-unreadable" in error
    assert not (tmp_path / "run").exists()
    assert main(["pretrain", str(photos), *QUICK, "--out", str(tmp_path / "run"), "--max-unreadable", "0.2"]) == 0
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert len(summary["unreadable"]) == 1 and bad.name in summary["unreadable"][0]
    assert bad.name in " ".join(capsys.readouterr().out.split())


def test_a_loss_that_explodes(photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    args = [*QUICK, "--steps", "60", "--lr", "1e30", "--clip-grad", "None", "--checkpoint-every", "1"]
    code, error = complain(capsys, "pretrain", photos, *args, "--out", tmp_path / "run")
    assert code == 1
    assert "not finite" in error and "--lr" in error
    assert not (tmp_path / "run" / "summary.json").exists()
    kept = checkpoint.find_checkpoint(tmp_path / "run" / "checkpoints")
    assert kept is not None and load_model(kept / "model.safetensors") is not None


def test_too_little_room_on_the_disk(
    photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr("mae.training.checkpoint.shutil.disk_usage", lambda path: usage(10, 9, 1))
    code, error = complain(capsys, "pretrain", photos, *QUICK, "--out", tmp_path / "run")
    assert code == 1 and "0.0 MB free" in error and "--out" in error
    assert not (tmp_path / "run").exists()


def test_a_disk_that_fills_while_training(
    photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    real, written = checkpoint.save_file, []

    def fills(tensors: object, path: Path, metadata: object = None) -> None:
        written.append(path)
        if len(written) > 2:
            Path(path).write_bytes(b"half")
            raise OSError(28, "No space left on device")
        real(tensors, path, metadata=metadata)

    monkeypatch.setattr(checkpoint, "save_file", fills)
    args = [*QUICK, "--checkpoint-every", "1"]
    code, error = complain(capsys, "pretrain", photos, *args, "--out", tmp_path / "run")
    assert code == 1
    assert "No space left on device" in error and "step-00000001, is untouched" in error
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-00000001"]


def test_a_folder_that_may_not_be_written(
    photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    asked: list[Path] = []
    monkeypatch.setattr("mae.records.os.access", lambda path, mode: asked.append(path))
    code, error = complain(capsys, "pretrain", photos, *QUICK, "--out", tmp_path / "there" / "run")
    assert code == 2 and f"{tmp_path} may not be written to" in error and asked == [tmp_path]
    assert not (tmp_path / "there").exists()


def test_models_that_are_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "text.safetensors").write_text("no tensors here")
    save_file({"a": torch.zeros(1)}, tmp_path / "other.safetensors")
    for name, says in (
        ("nowhere", "is not there"),
        ("text.safetensors", "cannot be read"),
        ("other.safetensors", "header"),
    ):
        code, error = complain(capsys, "evaluate", "knn", tmp_path / name, "--data", "builtin:digits")
        assert code == (2 if name == "nowhere" else 1) and says in error and name in error


@pytest.mark.parametrize(
    ("tamper", "says"),
    [
        (lambda tensors, meta: tensors.pop("decoder.mask_token"), "1 missing"),
        (lambda tensors, meta: tensors.update(extra=torch.zeros(1)), "1 extra"),
        (lambda tensors, meta: tensors.update({"encoder.norm.bias": torch.zeros(3)}), "encoder.norm.bias"),
        (lambda tensors, meta: tensors.update({"encoder.norm.bias": torch.full((256,), torch.nan)}), "not finite"),
        (lambda tensors, meta: tensors.update({"encoder.norm.bias": torch.zeros(256).half()}), "F16"),
        (lambda tensors, meta: meta.update(mae=meta["mae"].replace('"depth": 4', '"depth": 100000')), "depth"),
        (lambda tensors, meta: meta.update(mae=meta["mae"].replace('"depth": 4', '"depth": "4"')), "depth"),
        (
            lambda tensors, meta: meta.update(mae=meta["mae"].replace(f'"format": {FORMAT}', '"format": 99')),
            "format 99",
        ),
        (lambda tensors, meta: meta.update(mae="[" * 100000), "header"),
        (lambda tensors, meta: meta.pop("mae"), "header"),
    ],
)
def test_a_tampered_model_file_is_refused(tamper: object, says: str, tmp_path: Path):
    model = mae.create_model("mae_vit_lesson_patch4")
    tensors, metadata = dict(model.state_dict()), {**model_metadata(model), "other": "kept"}
    tamper(tensors, metadata)  # type: ignore[operator]
    save_file(tensors, tmp_path / "model.safetensors", metadata=metadata)
    with pytest.raises(MAEError, match=says):
        mae.load(tmp_path / "model.safetensors")
