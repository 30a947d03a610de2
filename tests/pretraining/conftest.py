"""A run small enough for a test, and folders of images made on the fly."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import mae
from mae.pretraining import monitor

TINY = {
    "model": "mae_vit_lesson_patch4", "img_size": 8, "patch_size": 2, "mlp_ratio": 0.5, "batch_size": 32, "steps": 6,
    "workers": 0, "save_every": 2, "device": "cpu", "quiet": True, "held_out": 0.0,
}  # fmt: skip
WATCHED = {"LABEL_FREE": 24, "VIEWED": 8, "TRAIN": 20, "TEST": 10}


@pytest.fixture(autouse=True)
def _without_pictures(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing takes longer than such a run; only tests marked `pictures` look at them."""
    if request.node.get_closest_marker("pictures") is None:
        monkeypatch.setattr("mae.pretraining.parts.draw_panels", lambda *args, **options: None)
        monkeypatch.setattr("mae.pretraining.narrate.draw_curve", lambda *args, **options: None)


@pytest.fixture(autouse=True)
def few_watched() -> Iterator[pytest.MonkeyPatch]:
    """A look at the features takes longer than such a run; a test that wants all images undoes this.

    A test that wants other counts sets them by this: `monkeypatch` is undone later, and would bring these back.
    """
    with pytest.MonkeyPatch.context() as patch:
        for name, count in WATCHED.items():
            patch.setattr(monitor, f"_{name}_IMAGES", count)
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
