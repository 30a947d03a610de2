"""Images that go away, or can be read no more, while a run trains on them."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from light import forget_images
from PIL import Image

import mae
from mae.cli import main
from mae.errors import MAEError
from mae.training.engine import Trainer

pytestmark = pytest.mark.slow

Run = Callable[..., mae.PretrainResult]
COUNT = 64


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """64 images, too many to be kept decoded."""
    folder = tmp_path / "images"
    folder.mkdir()
    rng = np.random.default_rng(0)
    for number in range(COUNT):
        Image.fromarray(rng.integers(0, 255, (8, 8), dtype=np.uint8)).save(folder / f"{number:02d}.png")
    forget_images(monkeypatch)
    return folder


@pytest.fixture
def after_two_steps(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], Any]], None]:
    """Something that happens in the midst of a run."""

    def plan(event: Callable[[], Any]) -> None:
        clip = Trainer._clip
        monkeypatch.setattr(Trainer, "_clip", lambda self: [self.step == 2 and event(), clip(self)][1])

    return plan


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:20])


def as_folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


def as_pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def as_loop(file: Path) -> None:
    file.unlink()
    file.symlink_to(file)


@pytest.mark.parametrize("workers", [0, 2])
def test_some_are_counted_and_named_and_others_shown(
    pretrain: Run, source: Path, workers: int, after_two_steps: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    after_two_steps((source / "07.png").unlink)
    options = {"batch_size": 16, "steps": 16, "max_unreadable": 0.02, "workers": workers, "quiet": False}
    result = pretrain(source=source, **options)
    assert result.summary["unreadable"] == [f"{source / '07.png'} cannot be read: No such file or directory"]
    shown = capsys.readouterr().out.partition("Finished")[2]
    assert "1 unreadable; others are shown in their place:" in shown and "07.png cannot be read" in shown


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("change", [Path.unlink, cut, as_folder, as_pipe, as_loop])
def test_all_of_them_end_the_run_in_a_line(
    pretrain: Run, source: Path, tmp_path: Path, workers: int, change: Callable[[Path], Any], after_two_steps: Any
) -> None:
    after_two_steps(lambda: [change(file) for file in sorted(source.iterdir())])
    with pytest.raises(MAEError, match=r"of 64 images cannot be used, more than .*\.png") as ended:
        pretrain(source=source, batch_size=16, steps=16, workers=workers)
    assert "\n" not in str(ended.value)
    steps = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert steps and not any(name.startswith(".") for name in steps)  # what was saved until then is there


def test_a_run_goes_on_when_they_are_back(pretrain: Run, source: Path, tmp_path: Path, monkeypatch: Any) -> None:
    whole = pretrain("whole", source=source, batch_size=16, steps=6)
    with monkeypatch.context() as patch:
        clip = Trainer._clip
        away = tmp_path / "away"
        patch.setattr(Trainer, "_clip", lambda self: [self.step == 3 and source.rename(away), clip(self)][1])
        with pytest.raises(MAEError, match="cannot be used"):
            pretrain(source=source, batch_size=16, steps=6)
    assert main(["pretrain", "--out", str(tmp_path / "run"), "--resume"]) in (1, 2)  # they are still away
    away.rename(source)
    again = mae.pretrain(out=tmp_path / "run", resume=True, quiet=True)
    one, other = whole.load_model().state_dict(), again.load_model().state_dict()
    assert again.finished and all((one[name] == other[name]).all() for name in one)
