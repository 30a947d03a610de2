"""What every test runs under."""

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

# Before any module of ours: its shape checks make Python compile anew what our modules are the first to import.
import scipy.stats  # noqa: F401
import torch
import torch._dynamo
import torchvision.transforms.v2  # noqa: F401
from jaxtyping import Float
from light import few_digits, in_float32, without_doctor
from torch import Tensor

# Tiny models lose more to threads that wait for each other than they gain; the processes that tests start as well.
torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"


@pytest.fixture(autouse=True)
def _without_doctor(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs begin without the doctor's checks but in tests marked `doctor`."""
    if request.node.get_closest_marker("doctor") is None:
        without_doctor(monkeypatch)


@pytest.fixture(autouse=True)
def _few_digits(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """All the embedded digits are there only in tests marked `digits`."""
    if request.node.get_closest_marker("digits") is None:
        few_digits(monkeypatch)


@pytest.fixture(autouse=True)
def _in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    in_float32(monkeypatch)


@pytest.fixture(autouse=True)
def _own_components_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """Components that a test registers are gone after it."""
    from mae.core import kinds

    for room, known in kinds._registered.items():
        monkeypatch.setitem(kinds._registered, room, dict(known))


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 MB."""
    place = tmp_path / "disk"
    place.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "none", place], capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"no file system can be mounted here: {made.stderr.strip()}")
    yield place
    subprocess.run(["umount", "-l", place], check=True)


@pytest.fixture
def small_model() -> Callable[..., torch.nn.Module]:
    """A factory of models on patches of 4 pixels, weights from a fixed seed."""
    from mae.models.presets import create_model  # here: shapes are checked only in modules imported after this one

    def build(*, norm_pix: bool, in_chans: int = 3, img_size: int = 32) -> torch.nn.Module:
        torch.manual_seed(0)
        return create_model(
            "mae_vit_lesson_patch4",
            img_size=img_size,
            in_chans=in_chans,
            embed_dim=32,
            depth=1,
            decoder_embed_dim=16,
            decoder_depth=1,
            norm_pix_loss=norm_pix,
        )

    return build


@pytest.fixture
def blocky_images() -> Callable[..., Float[Tensor, "B C H W"]]:
    """A factory of normalised images (mean 0.5, std 0.25): a level per 4x4 block plus texture, in [0, 1]."""

    def build(*, batch: int = 2, channels: int = 3, side: int = 32) -> Float[Tensor, "B C H W"]:
        generator = torch.Generator().manual_seed(1)
        level = torch.rand(batch, 1, side // 4, side // 4, generator=generator) * 0.8 + 0.1
        level = level.repeat_interleave(4, dim=2).repeat_interleave(4, dim=3)
        texture = (torch.rand(batch, channels, side, side, generator=generator) - 0.5) * 0.2
        return (level + texture - 0.5) / 0.25

    return build
