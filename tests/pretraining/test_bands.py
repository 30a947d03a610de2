"""Runs on arrays with named channels and gaps, from the command to features of other files."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

import mae
from mae.cli import main
from mae.errors import UsageError
from mae.models.file import load_with_report
from mae.training.run_folder import find_weights

BANDS = ("B02", "B03", "B04", "B08", "B11")


def tiles(folder: Path, order: tuple[str, ...] = BANDS, *, count: int = 24, gaps: bool = True) -> Path:
    """The same scenes of waves, their bands in any order, some with gaps."""
    folder.mkdir()
    (folder / "channels.txt").write_text("\n".join(order))
    rng = np.random.default_rng(0)
    rows, columns = np.mgrid[:12, :12] / 12
    for number in range(count):
        turn, phase = rng.uniform(0, 6.3, 2)
        wave = np.sin(6.3 * (rows * np.cos(turn) + columns * np.sin(turn)) + phase)
        scene = {band: (1000 * at + (100 + at) * wave).astype(np.float32) for at, band in enumerate(BANDS, start=1)}
        if gaps and number % 3 == 0:
            for values in scene.values():
                values[: number % 7 + 2, :5] = np.nan
        np.save(folder / f"{number:02}.npy", np.stack([scene[band] for band in order]))
    return folder


def test_a_run_learns_from_what_is_known_and_its_model_says_of_what(
    tmp_path: Path, pretrain: Callable, capsys: pytest.CaptureFixture[str]
) -> None:
    wanted, source = ("B08", "B02", "B11"), str(tiles(tmp_path / "tiles"))
    result = pretrain(source=source, channels=wanted, nodata="nan", steps=30, batch_size=12, lr=5e-3, quiet=False)
    told = " ".join(capsys.readouterr().out.split())
    assert "3 channels (B08, B02, B11);" in told and "nan in the files means no data" in told
    rows = [json.loads(line) for line in (result.folder / "metrics.jsonl").read_text().splitlines()]
    losses = [row["loss"] for row in rows if "loss" in row]
    assert np.isfinite(losses).all() and losses[-1] < 0.9 * losses[0]
    model, report = load_with_report(find_weights(result.folder))
    assert report.channels == wanted and model.config is not None and model.config.tokenizer.nodata == "nan"
    values = np.stack([np.load(path) for path in sorted((tmp_path / "tiles").glob("*.npy"))])[:, [3, 0, 4]]
    expected = np.nanmean(values, axis=(0, 2, 3), dtype=np.float64)
    assert model.config.tokenizer.mean == pytest.approx(expected.tolist(), rel=1e-5)


@pytest.mark.slow
def test_other_files_are_matched_by_the_names_of_their_channels(tmp_path: Path, pretrain: Callable) -> None:
    """Bands in another order, and more of them, give the same features; a missing one is an error."""
    result = pretrain(
        source=str(tiles(tmp_path / "tiles")), channels=("B08", "B02", "B11"), nodata="nan", steps=2, batch_size=12
    )
    shuffled = tiles(tmp_path / "shuffled", ("B11", "B04", "B02", "B03", "B08"))
    found = [
        mae.embed(result.folder, folder, out=tmp_path / f"{folder.name}.safetensors", device="cpu", quiet=True)
        for folder in (tmp_path / "tiles", shuffled)
    ]
    first, second = (load_file(path)["mean"] for path in found)
    assert np.array_equal(first, second) and np.isfinite(first).all()
    pictures = [
        mae.reconstruct(result.folder, folder / "00.npy", out=tmp_path / f"{folder.name}.png", device="cpu").numbers[0]
        for folder in (tmp_path / "tiles", shuffled)
    ]
    assert pictures[0] == pictures[1] and np.isfinite(pictures[0].masked_mse)
    nested = shuffled / "scene"
    nested.mkdir()
    (shuffled / "00.npy").rename(nested / "00.npy")
    again = mae.reconstruct(result.folder, nested / "00.npy", out=tmp_path / "nested.png", device="cpu").numbers[0]
    assert again == pictures[0]  # the names stand above it
    (shuffled / "channels.txt").write_text("B11\nB04\nB02\n")
    with pytest.raises(UsageError, match="00.npy has 5 channels, and 3 are named in the channels.txt above it"):
        mae.reconstruct(result.folder, nested / "00.npy", out=tmp_path / "o.png", device="cpu")
    (shuffled / "channels.txt").write_text("B11\nB04\nB02\nB03\nred edge\n")
    with pytest.raises(UsageError, match="has no channel 'B08'; its channels are B11, B04, B02, B03, red edge"):
        mae.embed(result.folder, shuffled, out=tmp_path / "no.safetensors", device="cpu", quiet=True)


def test_the_options_are_typed_as_the_help_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tiles(tmp_path / "tiles", gaps=False)
    command = ["pretrain", str(folder), "--out", str(tmp_path / "run"), "--device", "cpu"]
    for option, says in (
        (["--channels", "B02,B99"], "has no channel 'B99'"),
        (["--channels", "B02, B99"], "has no channel 'B99'"),
        (["--channels", "B02,B03", "--in-chans", "3"], "--in-chans is 3, and --channels names 2"),
        (["--channels", "B02,B02"], "channels are ['B02', 'B02']; expected 2 different names"),
        (["--nodata", "cloud"], "--nodata is 'cloud'; expected a finite number, or nan"),
        (["--nodata", "nan", "--laplacian", "0.1"], "laplacian reads whole samples, and those have gaps"),
    ):
        assert main([*command, *option]) == 2
        assert says in capsys.readouterr().err


def test_images_to_watch_are_matched_by_name_too(tmp_path: Path, pretrain: Callable) -> None:
    labelled = tmp_path / "labelled"
    for name in ("calm", "rough"):
        labelled.mkdir(exist_ok=True)
        tiles(labelled / name, count=4)
        (labelled / name / "channels.txt").unlink()
    (labelled / "channels.txt").write_text("B02\nB03\nB04\nred edge\nB11\n")
    options = {"channels": ("B08", "B02"), "nodata": "nan", "steps": 2, "batch_size": 12}
    with pytest.raises(UsageError, match="labelled has no channel 'B08'"):
        pretrain(source=str(tiles(tmp_path / "tiles")), monitor=str(labelled), **options)
