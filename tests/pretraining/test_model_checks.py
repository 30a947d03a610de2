"""The checks of a model: each fires where its fault is planted, and all are quiet on a model that is well."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mae.core.types import Encoded, Layout, MaskPlan, MaskRequest
from mae.masks.random import RandomMasking
from mae.models.masked_autoencoder import MaskedAutoencoder
from mae.models.presets import create_model
from mae.pretraining.checks.model import CHECKS, Subject, check_model

OPTIONS: dict[str, Any] = {"img_size": (24, 16), "patch_size": 4, "embed_dim": 32, "depth": 2, "num_heads": 2}
OPTIONS |= {"decoder_embed_dim": 16, "decoder_depth": 1, "decoder_num_heads": 2}


def subject(images: Tensor | None = None, **options: Any) -> Subject:
    torch.manual_seed(0)
    model = create_model("mae_vit_compact_patch16", **{**OPTIONS, **options})
    assert model.config is not None
    generator = torch.Generator().manual_seed(1)
    shape = (4, model.config.layout.channels, *model.config.layout.size)
    made = torch.randn(shape, generator=generator) if images is None else images
    return Subject(
        model=model, images=made, numbers=torch.arange(600), seed=0, mask_ratio=0.75, betas=(0.9, 0.95),
        weight_decay=0.05,
    )  # fmt: skip


def levels(subject: Subject) -> dict[str, str]:
    return {finding.name: finding.level for finding in check_model(subject)}


def stopped(subject: Subject) -> set[str]:
    return {name for name, level in levels(subject).items() if level != "ok"}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"norm_pix_loss": False, "cls_token": False},
        {"pos_embed": "learned"},
        {"laplacian": 0.05, "uniformity": 0.01, "focal_frequency": 0.1},
        {"laplacian": 0.05, "laplacian_raw": True},
        {"img_size": (4, 64)},
        {"in_chans": 13, "target": "low_pass", "target_cutoff": 0.5, "loss": "l1"},
    ],
    ids=str,
)
def test_a_model_that_is_well_passes_every_check(options: dict[str, Any]) -> None:
    found = check_model(subject(**options))
    assert [(finding.name, finding.value) for finding in found if finding.level != "ok"] == []
    assert len(found) == len(CHECKS) and all(finding.value and not finding.advice for finding in found)


def test_nothing_of_the_model_or_the_generator_is_changed() -> None:
    here = subject()
    before = {name: value.clone() for name, value in here.model.state_dict().items()}
    here.model.train()
    state = torch.get_rng_state()
    check_model(here)
    assert torch.equal(torch.get_rng_state(), state) and here.model.training
    assert all(torch.equal(value, before[name]) for name, value in here.model.state_dict().items())
    assert all(parameter.grad is None for parameter in here.model.parameters())


class OtherMask(MaskedAutoencoder):
    """Draws a mask of its own, whatever is asked for."""

    def plan(self, images: Tensor, **asked: Any) -> MaskPlan:
        return super().plan(images, generator=torch.Generator().manual_seed(7))


class Leaky(nn.Module):
    """Tells the encoder the mean of the whole image."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.patch_size = inner.patch_size

    def grid(self, images: Tensor) -> Any:
        return self.inner.grid(images)

    def forward(self, images: Tensor, visible: Tensor | None = None) -> Tensor:
        return self.inner(images, visible) + images.mean()


class Detached(nn.Module):
    """A decoder that sends nothing back."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, encoded: Encoded, plan: MaskPlan, layout: Layout) -> Tensor:
        return self.inner(replace(encoded, levels=[tokens.detach() for tokens in encoded.levels]), plan, layout)


class SameForAll(RandomMasking):
    """One mask for every sample."""

    def plan(self, request: MaskRequest) -> MaskPlan:
        return super().plan(replace(request, keys=torch.zeros_like(request.keys)))


class SameEachEpoch(RandomMasking):
    """The keys repeat: a generator that is seeded anew each epoch."""

    def plan(self, request: MaskRequest) -> MaskPlan:
        keys, half = request.keys, len(request.keys) // 2
        return super().plan(replace(request, keys=torch.cat([keys[:half]] * 2) if len(keys) > 100 else keys))


class LastRowsNever(RandomMasking):
    """The first patches are always the visible ones."""

    def plan(self, request: MaskRequest) -> MaskPlan:
        plan = super().plan(request)
        order = torch.arange(plan.hidden.shape[1]).expand(len(request.keys), -1)
        seen = plan.visible.shape[1]
        hidden = torch.ones_like(plan.hidden).scatter(1, order[:, :seen], False)
        return MaskPlan(visible=order[:, :seen], predicted=order[:, seen:], hidden=hidden)


class Half(RandomMasking):
    """Masks half, whatever is asked for."""

    def plan(self, request: MaskRequest) -> MaskPlan:
        return super().plan(replace(request, ratio=0.5))


class Noisy(nn.Module):
    """An encoder in which something random was forgotten."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + 1e-3 * torch.randn_like(x)


def inverted(here: Subject) -> None:
    """Judged by the visible patches."""
    loss = here.model.loss
    here.model.loss = lambda pred, target, weight: loss(pred, target, None if weight is None else 1 - weight)


def other_mask(here: Subject) -> None:
    here.model.__class__ = OtherMask


def leaky(here: Subject) -> None:
    here.model.encoder.patch_embed = Leaky(here.model.encoder.patch_embed)


def detached(here: Subject) -> None:
    here.model.decoder = Detached(here.model.decoder)


def same_for_all(here: Subject) -> None:
    here.model.masking = SameForAll(ratio=0.75)


def same_each_epoch(here: Subject) -> None:
    here.model.masking = SameEachEpoch(ratio=0.75)


def last_rows_never(here: Subject) -> None:
    here.model.masking = LastRowsNever(ratio=0.75)


def noisy(here: Subject) -> None:
    here.model.encoder.norm = Noisy(here.model.encoder.norm)


def zero_positions(here: Subject) -> None:
    here.model.encoder.pos_embed.forward = lambda grid: torch.zeros(grid[0] * grid[1], 32)


def square_positions(here: Subject) -> None:
    """Positions of a grid of as many patches, 4x6 instead of 6x4."""
    right = here.model.encoder.pos_embed.forward
    here.model.encoder.pos_embed.forward = lambda grid: right((grid[1], grid[0]))


def summed(here: Subject) -> None:
    mean = here.model.loss
    here.model.loss = lambda pred, target, weight: mean(pred, target, weight) * len(pred)


def frozen(here: Subject) -> None:
    here.model.encoder.blocks[1].register_forward_hook(lambda module, inputs, output: output.detach())


def unlearnable(here: Subject) -> None:
    here.model.loss = lambda pred, target, weight: (pred.sum() * 0 + 1) + (pred - pred.detach()).sum()


@pytest.mark.parametrize(
    ("plant", "fires"),
    [
        (inverted, "loss"),
        (other_mask, "mask reported"),
        (leaky, "encoder sees visible patches only"),
        (detached, "every tensor learns"),
        (frozen, "every tensor learns"),
        (same_for_all, "masks"),
        (same_each_epoch, "masks"),
        (last_rows_never, "masks"),
        (noisy, "encode"),
        (zero_positions, "positions"),
        (square_positions, "positions"),
        (summed, "batch in parts"),
        (unlearnable, "one batch overfits"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_a_planted_fault_is_found(plant: Callable[[Subject], None], fires: str) -> None:
    here = subject()
    plant(here)
    assert fires in stopped(here)


@pytest.mark.parametrize("share", [1.0, 0.7])
def test_constant_images_leave_nothing_to_predict(share: float) -> None:
    images = torch.randn(4, 3, 24, 16, generator=torch.Generator().manual_seed(1))
    images[:, :, : round(24 * share)] = 0.5
    assert levels(subject(images))["target"] == ("stop" if share == 1 else "warn")


@pytest.mark.parametrize("mask", ["block", "multi_block"])
def test_masks_of_few_images_are_drawn_until_each_position_had_its_turn(mask: str) -> None:
    here = replace(subject(img_size=56, mask=mask), numbers=torch.arange(20))
    assert levels(here)["masks"] == "ok"


def test_a_position_that_is_always_masked_is_worth_a_warning() -> None:
    here = replace(subject(img_size=112, mask="block", mask_ratio=0.9), mask_ratio=0.9)
    assert levels(here)["masks"] == "warn"


def test_a_wrong_ratio_is_found() -> None:
    here = subject()
    here.model.masking = Half()
    assert "masks" in stopped(here)


def test_a_parameter_that_takes_part_in_nothing_is_named() -> None:
    here = subject()
    here.model.encoder.unused = nn.Linear(3, 3)
    (finding,) = [finding for finding in check_model(here) if finding.level == "stop"]
    assert finding.name == "every tensor learns" and "encoder.unused.weight, encoder.unused.bias" in finding.value
