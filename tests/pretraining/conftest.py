"""A run small enough for a test, and folders of images made on the fly."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from light import few_looks, light_runs, without_pictures
from PIL import Image

import mae

TINY = {
    "model": "mae_vit_lesson_patch4", "img_size": 8, "patch_size": 2, "mlp_ratio": 0.5, "batch_size": 32, "steps": 6,
    "workers": 0, "checkpoint_every": 2, "device": "cpu", "quiet": True, "held_out": 0.0,
}  # fmt: skip


@pytest.fixture(autouse=True)
def _without_pictures(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only tests marked `pictures` look at them."""
    if request.node.get_closest_marker("pictures") is None:
        without_pictures(monkeypatch)


@pytest.fixture(autouse=True)
def few_watched() -> Iterator[pytest.MonkeyPatch]:
    """A look at the features takes longer than such a run; a test that wants all images undoes this.

    A test that wants other counts sets them by this: `monkeypatch` is undone later, and would bring these back.
    """
    with pytest.MonkeyPatch.context() as patch:
        few_looks(patch)
        yield patch


@pytest.fixture
def tiny() -> dict[str, Any]:
    """The options of that run, for a test that starts it otherwise."""
    return TINY


@pytest.fixture
def pretrain(tmp_path: Path) -> Callable[..., mae.PretrainResult]:
    """A quiet tiny run on the embedded digits; options go over its own."""

    def run(name: str = "run", **options: Any) -> mae.PretrainResult:
        source = options.pop("source", "builtin:digits")
        return mae.pretrain(source, out=tmp_path / name, **{**TINY, **options})

    return run


@pytest.fixture(scope="session")
def _finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with light_runs():
        return mae.pretrain("builtin:digits", out=tmp_path_factory.mktemp("finished") / "run", **TINY).folder


@pytest.fixture
def finished(_finished: Path, tmp_path: Path) -> Path:
    """The folder of the tiny run without further options, with checkpoints of its steps 4 and 6; a copy."""
    return Path(shutil.copytree(_finished, tmp_path / "run"))


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """A flat folder of twelve structured images of odd kinds and sizes."""
    folder = tmp_path / "photos"
    folder.mkdir()
    rng = np.random.default_rng(0)
    for number in range(12):
        height, width = 20 + 3 * number, 50 - 2 * number
        rows, columns = np.mgrid[:height, :width] / 20
        waves = np.stack([np.sin(rows * (c + 1) + columns * rng.uniform(0, 2)) for c in range(3)], axis=-1)
        pixels = Image.fromarray(np.uint8(127 + 127 * waves))
        mode, suffix = [("RGB", "png"), ("L", "jpg"), ("CMYK", "jpg"), ("RGBA", "png"), ("P", "bmp"), ("RGB", "webp")][
            number % 6
        ]
        pixels.convert(mode).save(folder / f"{number:02d}.{suffix}")
    Image.fromarray(np.uint16(rows * 3000)).save(folder / "deep.tif")
    Image.new("RGB", (1, 1)).save(folder / "dot.png")
    return folder
