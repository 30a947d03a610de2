"""A model applied to files of another type: the same rasters give the same features, other scales are refused."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import tifffile
import torch
from conftest import TINY
from light import light_runs
from safetensors.numpy import load_file

import mae
from mae.cli import main
from mae.errors import UsageError
from mae.models.file import load_model
from mae.models.presets import create_model
from mae.training.run_folder import find_weights

pytestmark = pytest.mark.slow

CPU: dict[str, Any] = {"device": "cpu"}
GAP = -9999.0


def scenes(scale: float = 1.0) -> Iterator[np.ndarray]:
    """Waves in four bands, whole numbers from 200 to 6,000 times `scale`."""
    rng = np.random.default_rng(0)
    rows, columns = np.mgrid[:12, :12] / 12
    for _ in range(24):
        turn, phase = rng.uniform(0, 6.3, 2)
        wave = np.sin(6.3 * (rows * np.cos(turn) + columns * np.sin(turn)) + phase)
        yield np.rint(np.stack([(1000 + 200 * wave) * (band + 1) for band in range(4)], axis=2) * scale)


def rasters(folder: Path, *dtypes: str, scale: float = 1.0, divide: float = 1.0, gap: float | None = None) -> Path:
    """The scenes as TIFF in two classes, each file of the next type."""
    for number, scene in enumerate(scenes(scale)):
        values = scene / divide
        if gap is not None and number % 3 == 0:
            values[:4, :5] = gap
        path = folder / "ab"[number % 2] / f"{number:02}.tif"
        path.parent.mkdir(parents=True, exist_ok=True)
        tifffile.imwrite(
            path, values.astype(dtypes[number % len(dtypes)]), photometric="minisblack", planarconfig="contig"
        )
    return folder


def trained(folder: Path, *dtypes: str, **options: Any) -> Path:
    source = rasters(folder / "images", *dtypes, **{"gap": GAP} if "nodata" in options else {})
    with light_runs():
        return mae.pretrain(source, out=folder / "run", **{**TINY, "batch_size": 12, **options}).folder


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A run on each type of file, by its name."""
    root = tmp_path_factory.mktemp("runs")
    return {
        "float32": trained(root / "float32", "float32", nodata="-9999"),
        "uint16": trained(root / "uint16", "uint16"),
    }


def features(run: Path, source: Path) -> np.ndarray:
    with TemporaryDirectory() as aside:
        return load_file(mae.embed(run, source, out=Path(aside) / "f.safetensors", quiet=True, **CPU))["mean"]


@pytest.mark.parametrize(
    ("of", "other"), [("float32", "uint16"), ("float32", "int32"), ("uint16", "float32"), ("uint16", "int32")]
)
def test_the_same_numbers_in_files_of_another_type_give_the_same_features(runs, tmp_path, of, other):
    own, theirs = rasters(tmp_path / "own", of), rasters(tmp_path / "theirs", other)
    first, second = (features(runs[of], folder) for folder in (own, theirs))
    assert first.std(axis=0).max() > 1e-3 and np.allclose(first, second, atol=1e-5)
    pictures = [mae.reconstruct(runs[of], sorted(folder.rglob("*.tif"))[:4], **CPU) for folder in (own, theirs)]
    for mine, other_s in zip(pictures[0].numbers, pictures[1].numbers, strict=True):
        assert mine.r2 == pytest.approx(other_s.r2, abs=1e-4) and abs(mine.r2) < 10
        assert mine.psnr == pytest.approx(other_s.psnr, abs=1e-3)


def test_pixels_of_files_of_many_types_are_in_one_unit(runs, tmp_path):
    """By the file's own type, not by what most of the files hold."""
    whole, mixed = rasters(tmp_path / "whole", "float32"), rasters(tmp_path / "mixed", "uint16", "float32", "int16")
    for run in runs.values():
        assert np.allclose(features(run, whole), features(run, mixed), atol=1e-5)


def test_gaps_are_gaps_in_files_of_another_type(runs, tmp_path):
    """Signed whole numbers can hold what marks a gap."""
    run = runs["float32"]
    own, theirs = (features(run, rasters(tmp_path / kind, kind, gap=GAP)) for kind in ("float32", "int16"))
    assert np.allclose(own, theirs, atol=1e-5)
    whole = features(run, rasters(tmp_path / "whole", "uint16"))
    assert np.allclose(own[1], whole[1], atol=1e-5) and not np.allclose(own[0], whole[0], atol=1e-3)


def numbers(result: Any, name: str = "") -> Iterator[tuple[str, float]]:
    for key, value in result.items() if isinstance(result, dict) else ():
        if isinstance(value, int | float):
            yield f"{name} {key}", float(value)
        yield from numbers(value, f"{name} {key}")


@pytest.mark.parametrize("protocol", ["knn", "label_free", "reconstruction", "linear_probe"])
def test_every_protocol_judges_alike(runs, tmp_path, protocol):
    found = []
    for kind in ("float32", "uint16"):
        folder = rasters(tmp_path / kind, kind)
        asked = {"data": folder, "out": tmp_path / f"{kind}-out", "quiet": True, **CPU}
        found.append(dict(numbers(mae.evaluate(protocol, runs["float32"], **asked).result)))
    assert found[0] == pytest.approx(found[1], rel=1e-3, abs=1e-4)


def test_images_that_are_watched_may_be_of_another_type(tmp_path):
    watched = {kind: rasters(tmp_path / f"watched-{kind}", kind) for kind in ("float32", "uint16")}
    looks = []
    for kind, monitor in watched.items():
        run = trained(tmp_path / kind, "float32", nodata="-9999", monitor=monitor)
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        looks.append([row["evaluation"] for row in rows if "evaluation" in row])
    assert looks[0] and looks[0] == looks[1]
    with pytest.raises(UsageError, match="they are on another scale; save them as float32"):
        trained(tmp_path / "wrong", "float32", monitor=rasters(tmp_path / "shares", "float32", divide=1e8))


def test_a_run_goes_on_from_weights_in_their_unit(runs, tmp_path):
    def begin(name: str, source: Path, **options: Any) -> Path:
        small = {
            "steps": 6,
            "batch_size": 12,
            "workers": 0,
            "checkpoint_every": 2,
            "held_out": 0.0,
            "quiet": True,
            **CPU,
        }
        return mae.pretrain(source, out=tmp_path / name, init_from=str(runs["float32"]), **small, **options).folder

    losses, old = [], load_model(find_weights(runs["float32"])).config
    for kind in ("float32", "uint16"):
        source = rasters(tmp_path / f"on-{kind}", kind)
        run = begin(kind, source)
        new = load_model(find_weights(run)).config
        found = (new.tokenizer.pixel_dtype, new.tokenizer.mean, new.tokenizer.std)
        assert found == ("float32", old.tokenizer.mean, old.tokenizer.std)
        shutil.rmtree(max((run / "checkpoints").glob("step-*")))
        mae.pretrain(out=run, resume=True, quiet=True)  # reads the images in the same unit
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        losses.append([row["loss"] for row in rows if "loss" in row])
    assert losses[0] == losses[1] and np.isfinite(losses[0]).all()
    own = load_model(find_weights(begin("own", source, statistics="data"))).config
    assert own.tokenizer.pixel_dtype == "uint16" and max(own.tokenizer.mean) < 0.1
    with pytest.raises(UsageError, match="they are on another scale"):
        begin("no", rasters(tmp_path / "shares", "float32", divide=1e8))


WRONG = {
    "floats in [0, 1] for a model of whole numbers": ("uint16", "float32", {"divide": 65535.0}),
    "whole numbers for a model of floats in [0, 1]": ("shares", "uint16", {}),
    "whole numbers of the whole range for a model of few bits": ("uint16", "uint8", {"scale": 0.03}),
    "floats of another unit": ("float32", "float32", {"divide": 1e8}),
    "floats of another unit, larger": ("shares", "float32", {}),
}


@pytest.mark.parametrize("case", WRONG)
def test_another_scale_is_refused_by_every_command(runs, tmp_path, capsys, case):
    of, kind, options = WRONG[case]
    if of == "shares":
        sizes = {"in_chans": 4, "mean": (0.2,) * 4, "std": (0.1,) * 4, "pixel_dtype": "float32"}
        model = create_model("mae_vit_lesson_patch4", img_size=8, patch_size=2, **sizes)
        run = tmp_path / "shares.safetensors"
        mae.save(model, run)
    else:
        run = runs[of]
    folder = rasters(tmp_path / "images", kind, **options)
    files = sorted(map(str, folder.rglob("*.tif")))[:3]
    commands = [
        ["embed", str(run), str(folder), "--out", str(tmp_path / "f.npz")],
        ["neighbours", str(run), str(folder), "--out", str(tmp_path / "n.png")],
        ["evaluate", "knn", str(run), "--data", str(folder), "--out", str(tmp_path / "e")],
        ["evaluate", "reconstruction", str(run), "--data", str(folder), "--out", str(tmp_path / "e")],
        ["reconstruct", str(run), *files, "--out", str(tmp_path / "r.png")],
    ]
    for command in commands:
        assert main([*command, "--device", "cpu"]) == 2, command
        told = capsys.readouterr().err
        assert "they are on another scale; save them as " in told and told.count("\n") == 1, told
    assert not {"f.npz", "n.png", "r.png"} & {path.name for path in tmp_path.iterdir()}


def test_tensors_are_as_in_files_and_floats_in_the_unit(runs, tmp_path):
    scene = next(scenes())
    pixels = torch.from_numpy(scene).permute(2, 0, 1).unsqueeze(0)
    tifffile.imwrite(tmp_path / "a.tif", scene.astype("u2"), photometric="minisblack", planarconfig="contig")
    for kind, top in (("float32", 1), ("uint16", 65535)):
        found = [
            mae.reconstruct(runs[kind], images, **CPU).full
            for images in (tmp_path / "a.tif", pixels.to(torch.uint16), (pixels / top).float())
        ]
        assert all(torch.allclose(found[0], other, rtol=1e-4) for other in found[1:])
        with pytest.raises(UsageError, match="image 1: .* they are on another scale"):
            mae.reconstruct(runs[kind], (pixels / (1e9 if top == 1 else 1)).float(), **CPU)


def test_a_filled_picture_has_the_numbers_of_its_file(runs, tmp_path):
    scene, hole = next(scenes()).astype("f4"), torch.zeros(12, 12)
    hole[4:6, 4:6] = 1
    tifffile.imwrite(tmp_path / "a.tif", scene, photometric="minisblack", planarconfig="contig")
    for number, run in enumerate(runs.values()):
        options = {"mask": hole, "inpaint": True, "out": tmp_path / f"{number}.png", **CPU}
        mae.reconstruct(run, tmp_path / "a.tif", **options)
        written = tifffile.imread(tmp_path / f"{number}-filled.tif")
        assert written.dtype == np.float32 and 100 < written.min() < written.max() < 10000
