from pathlib import Path
from typing import Any

import pytest
import torch
from light import without_pictures
from resuming import whole_and_resumed
from safetensors.torch import load_file

import mae
from mae.core.types import Layout, MaskRequest
from mae.errors import UsageError
from mae.masks.hard import HardMasking
from mae.masks.random import RandomMasking
from mae.randomness import sample_keys
from mae.training.run_folder import find_weights

LAYOUT = Layout(size=(32, 32), patch=(4, 4), channels=3)
KEYS = sample_keys(0, 0, torch.arange(300))
SCORES = torch.rand(300, 64, generator=torch.Generator().manual_seed(0))


def hidden(progress: float | None, **options: Any) -> torch.Tensor:
    request = MaskRequest(layout=LAYOUT, keys=KEYS, scores=SCORES, progress=progress)
    plan = HardMasking(**options).plan(request)
    assert plan.visible.shape == (300, 16) and plan.hidden.sum() == 300 * 48
    return plan.hidden


def hardest(count: int) -> torch.Tensor:
    return torch.zeros(300, 64, dtype=torch.bool).scatter(1, SCORES.topk(count, dim=1).indices, True)


@pytest.mark.parametrize(
    ("progress", "count"), [(0.0, 0), (0.25, 6), (0.5, 12), (1.0, 24), (None, 24)]
)  # of 48 that are masked
def test_as_many_of_the_hardest_are_masked_as_the_progress_says_and_others_by_chance(
    progress: float | None, count: int
):
    masked, hard = hidden(progress), hardest(count)
    assert masked[hard].all()
    rate = masked[~hard].float().mean()
    assert abs(float(rate) - (48 - count) / (64 - count)) < 1e-6
    positions = (masked & ~hard).float().sum(dim=0) / (~hard).float().sum(dim=0)
    assert (
        float((positions - rate).abs().max()) < 5 * float((rate * (1 - rate)) ** 0.5) / (300 - 300 * count / 64) ** 0.5
    )


def test_before_anything_is_known_it_is_the_random_mask():
    random = RandomMasking().plan(MaskRequest(layout=LAYOUT, keys=KEYS)).hidden
    assert torch.equal(hidden(0.0), random) and not torch.equal(hidden(0.1), random)


def test_bounds_of_the_share_are_options():
    assert hidden(0.5, first=1.0, last=1.0)[hardest(48)].all()
    assert (
        hidden(0.0, first=0.5, last=0.0)[hardest(24)].all() and not hidden(1.0, first=0.5, last=0.0)[hardest(24)].all()
    )


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (
            {"difficulty": 1.0},
            "mask hard asks a teacher which patches are hard; choose one that says so with --teacher ema",
        ),
        ({"teacher": "ema"}, "mask hard needs a term that learns which patches are hard; add --difficulty 1"),
        ({"teacher": "codebook", "difficulty": 1.0}, "mask hard asks a teacher"),
    ],
)
def test_what_it_needs_is_asked_for(options: dict[str, Any], told: str):
    with pytest.raises(UsageError, match=told):
        mae.create_model("mae_vit_lesson_patch4", mask="hard", **options)
    with pytest.raises(UsageError, match="mask hard asks a teacher which patches are hard, and there is none"):
        HardMasking().plan(MaskRequest(layout=LAYOUT, keys=KEYS))


TINY = {"model": "mae_vit_lesson_patch4", "img_size": 8, "patch_size": 2, "embed_dim": 24, "depth": 2, "num_heads": 3}


def pretrain(out: Path, **options: Any) -> mae.PretrainResult:
    run = {"mask": "hard", "teacher": "ema", "teacher_momentum": 0.5, "difficulty": 1.0, "mask_first": 0.2, "steps": 6,
           "batch_size": 8, "lr": 0.01, "checkpoint_every": 1, "device": "cpu"}  # fmt: skip
    return mae.pretrain("builtin:digits", out=out, quiet=True, **TINY, **run, **options)


def test_a_run_resumes_with_the_same_masks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    without_pictures(monkeypatch)
    whole, resumed = whole_and_resumed(tmp_path, pretrain)
    one, other = (load_file(find_weights(run.folder)) for run in (whole, resumed))
    assert all(torch.equal(one[name], other[name]) for name in one)
    teacher = load_file(find_weights(whole.folder).with_name("teacher.safetensors"))
    assert any(name.startswith("predictor.") for name in teacher)
