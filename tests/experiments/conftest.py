"""A small labelled data set, and one small study of it, run once for all tests."""

from pathlib import Path

import numpy as np
import pytest
from jobs_here import run_jobs_here
from light import without_pictures
from PIL import Image
from tiny_study import TINY

from mae.experiments.run import StudyOutcome, study


@pytest.fixture(autouse=True)
def _without_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test reads the pictures that runs draw."""
    without_pictures(monkeypatch)


@pytest.fixture(scope="session")
def labelled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Gratings of 8 x 8 pixels, one direction per class: 3 x 20 for training, 3 x 6 for testing."""
    root, rng = tmp_path_factory.mktemp("gratings"), np.random.default_rng(0)
    rows, columns = np.mgrid[:8, :8]
    for part, count in (("train", 20), ("test", 6)):
        for name, (down, across) in {"flat": (1, 0), "steep": (0, 1), "tilted": (1, 1)}.items():
            folder = root / part / name
            folder.mkdir(parents=True)
            for number in range(count):
                wave = np.sin((down * rows + across * columns) * rng.uniform(0.8, 1.2) + rng.uniform(0, 6))
                pixels = 127 + 90 * wave[..., None] * rng.uniform(0.3, 1, 3) + rng.normal(0, 8, (8, 8, 3))
                Image.fromarray(np.uint8(pixels.clip(0, 255))).save(folder / f"{number}.png")
    return root


@pytest.fixture(scope="session")
def compared(labelled: Path, tmp_path_factory: pytest.TempPathFactory) -> StudyOutcome:
    """`compare` with two seeds."""
    with pytest.MonkeyPatch.context() as patch:
        run_jobs_here(patch)
        return study("compare", labelled, out=tmp_path_factory.mktemp("study") / "compare", seeds=2, **TINY)
