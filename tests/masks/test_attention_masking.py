"""Masks that follow a teacher's attention: against loops, planted scores, and in a run that resumes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from light import without_pictures
from resuming import whole_and_resumed
from safetensors.torch import load_file
from torch import Tensor
from torch.testing import assert_close

import mae
from mae.core.contracts import Batch
from mae.core.types import Layout, MaskPlan, MaskRequest
from mae.errors import UsageError
from mae.masks.attention import AttentionMasking
from mae.randomness import sample_keys
from mae.training.run_folder import find_weights

LAYOUT = Layout(size=(16, 24), patch=(4, 4), channels=3)  # 24 tokens
SIZES = {"img_size": (16, 24), "patch_size": 4, "embed_dim": 24, "depth": 2, "num_heads": 3, "decoder_embed_dim": 16,
         "decoder_depth": 1, "decoder_num_heads": 2}  # fmt: skip


def plan_of(mask: AttentionMasking, scores: Tensor) -> MaskPlan:
    keys = sample_keys(0, 0, torch.arange(len(scores)))
    return mask.plan(MaskRequest(layout=LAYOUT, keys=keys, scores=scores))


@pytest.fixture
def scores() -> Tensor:
    return torch.rand(400, 24, generator=torch.Generator().manual_seed(0))


def test_the_most_attended_patches_are_masked(scores: Tensor):
    plan = plan_of(AttentionMasking(ratio=0.5, guided=1.0), scores)
    for row in range(len(scores)):
        most = set(scores[row].argsort(descending=True)[:12].tolist())
        assert set(plan.hidden[row].nonzero().flatten().tolist()) == most


def test_hints_are_random_ones_of_the_most_attended(scores: Tensor):
    plan = plan_of(AttentionMasking(ratio=0.5, guided=1.0, hints=0.125), scores)  # 3 of 24
    shown = torch.zeros(15)
    for row in range(len(scores)):
        order = scores[row].argsort(descending=True).tolist()
        hidden = set(plan.hidden[row].nonzero().flatten().tolist())
        assert len(hidden) == 12 and hidden < set(order[:15])
        for place, token in enumerate(order[:15]):
            shown[place] += token not in hidden
    assert shown.sum() == 3 * len(scores)
    # Each of the 15 is as likely to be shown: a binomial of 1 in 5, five standard deviations about its mean.
    assert bool(((shown - 80).abs() < 5 * (400 * 0.2 * 0.8) ** 0.5).all())


@pytest.mark.parametrize(("hints", "ratio", "most"), [(0.25, None, 0.2083), (0.99, None, 0.2083), (0.2, 0.8, 0.125)])
def test_hints_that_are_all_that_is_visible_are_refused(hints: float, ratio: float | None, most: float):
    mask = AttentionMasking(hints=hints)
    says = f"mask_hints {hints} leaves nothing to follow at mask_ratio {ratio or 0.75}: .* at most {most}$"
    with pytest.raises(UsageError, match=says):
        mask.num_visible(LAYOUT, ratio)  # of a schedule too
    AttentionMasking(hints=most).num_visible(LAYOUT, ratio)


def test_just_below_that_the_least_attended_patch_is_what_stays_visible(scores: Tensor):
    plan = plan_of(AttentionMasking(guided=1.0, hints=5 / 24), scores)  # 5 of 6 visible ones
    assert not bool(plan.hidden.gather(1, scores.argmin(dim=1, keepdim=True)).any())


def test_as_many_samples_are_guided_as_are_asked_for(scores: Tensor):
    hidden = plan_of(AttentionMasking(ratio=0.5, guided=0.25), scores).hidden
    most = torch.zeros_like(hidden).scatter_(1, scores.argsort(dim=1, descending=True)[:, :12], True)
    guided = (hidden == most).all(dim=1)
    assert abs(int(guided.sum()) - 100) < 5 * (400 * 0.25 * 0.75) ** 0.5
    random = hidden[~guided]
    rates = random.float().mean(dim=0)
    assert bool(((rates - 0.5).abs() < 5 * (0.25 / len(random)) ** 0.5).all())


def test_without_scores_it_says_what_it_reads():
    with pytest.raises(UsageError, match="mask attention reads a teacher's attention, .*--teacher"):
        AttentionMasking().plan(MaskRequest(layout=LAYOUT, keys=torch.arange(2)))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({}, "mask attention follows a teacher's attention; choose one that gives it with --teacher ema"),
        ({"teacher": "ema", "cls_token": False}, "the encoder has none; leave out --no-cls-token"),
    ],
)
def test_what_it_needs_is_asked_for_before_any_training(options: dict[str, Any], says: str):
    with pytest.raises(UsageError, match=says):
        mae.create_model("mae_vit_lesson_patch4", **SIZES, mask="attention", **options)


def test_the_teachers_attention_is_that_of_a_slow_loop():
    torch.manual_seed(0)
    model = mae.create_model("mae_vit_lesson_patch4", **SIZES, mask="attention", teacher="ema")
    images = torch.randn(2, 3, 16, 24)
    encoder: Any = model.encoder
    levels = encoder(images, levels=True).levels
    block, heads = encoder.blocks[-1], 3
    x = block.norm1(levels[-2])
    expected = torch.zeros(2, 24)
    for row in range(2):
        query, key, _ = (x[row] @ block.attn.qkv.weight.T + block.attn.qkv.bias).chunk(3, dim=1)
        for head in range(heads):
            part = slice(8 * head, 8 * head + 8)
            weights = torch.stack([query[0, part] @ key[token, part] / 8**0.5 for token in range(25)]).softmax(dim=0)
            expected[row] += weights[1:].detach() / heads
    found = model.scores(images)
    assert found is not None and not found.requires_grad
    assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert_close(found, model.teacher.attention(Batch(x=images, tokenizer=model.tokenizer)))  # type: ignore[union-attr]
    plan = model.plan(images, keys=torch.arange(2))
    again = model.masking.plan(MaskRequest(layout=model.tokenizer.layout, keys=torch.arange(2), scores=found))
    assert torch.equal(plan.hidden, again.hidden)


def test_masks_follow_the_teacher_as_it_learns():
    torch.manual_seed(0)
    model = mae.create_model(
        "mae_vit_lesson_patch4", **SIZES, mask="attention", teacher="ema", mask_guided=1.0, teacher_momentum=0.5
    )
    images, keys = torch.randn(4, 3, 16, 24), torch.arange(4)
    before = model.plan(images, keys=keys).hidden
    assert model.teacher is not None
    with torch.no_grad():
        for weight in model.encoder.parameters():
            weight.normal_(std=0.3)
    model.teacher.after_step(model, 0.5)
    assert not torch.equal(before, model.plan(images, keys=keys).hidden)


TINY = {"model": "mae_vit_lesson_patch4", "img_size": 8, "patch_size": 2, "embed_dim": 24, "depth": 2, "num_heads": 3}


def pretrain(out: Path, **options: Any) -> mae.PretrainResult:
    run = {"mask": "attention", "teacher": "ema", "teacher_momentum": 0.5, "steps": 6, "batch_size": 8, "lr": 0.01,
           "checkpoint_every": 1, "device": "cpu"}  # fmt: skip
    return mae.pretrain("builtin:digits", out=out, quiet=True, **TINY, **run, **options)


def test_a_run_resumes_with_the_same_masks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    without_pictures(monkeypatch)
    whole, resumed = whole_and_resumed(tmp_path, pretrain)
    one, other = (load_file(find_weights(run.folder)) for run in (whole, resumed))
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(("target", "calls"), [("pixels", 0), ("features", 1)])
def test_the_teacher_is_asked_for_features_only_where_somebody_reads_them(target: str, calls: int):
    model = mae.create_model("mae_vit_lesson_patch4", **SIZES, mask="attention", teacher="ema", target=target)
    assert model.teacher is not None
    asked: list[None] = []
    model.teacher.register_forward_hook(lambda *_: asked.append(None))
    model(torch.randn(2, 3, 16, 24)).loss.backward()
    assert len(asked) == calls
