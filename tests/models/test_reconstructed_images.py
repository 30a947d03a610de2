"""The tensors behind a panel: what is true, what is predicted, and what the model was not given."""

from dataclasses import replace
from math import exp, sqrt

import pytest
import torch
from pieces import asked, batch_of, layout_of
from torch import Tensor, nn

from mae.core.types import Encoded, Layout, MaskPlan
from mae.errors import UsageError
from mae.masks.given import plan_from_mask
from mae.masks.random import RandomMasking
from mae.modalities.images.patches import patchify
from mae.modalities.images.pictures import score
from mae.models.reconstruction import interpolate_statistics, reconstruct
from mae.targets.hog import HogTarget
from mae.targets.low_pass import LowPassTarget
from mae.targets.pixels import patch_statistics


class Oracle(nn.Module):
    """A decoder that knows the answer."""

    def __init__(self, answer: Tensor) -> None:
        super().__init__()
        self.answer = answer

    def forward(self, encoded: Encoded, plan: MaskPlan, layout: Layout) -> Tensor:
        return self.answer


def test_plain_pixels_are_pasted_as_predicted(small_model, blocky_images):
    model, images = small_model(norm_pix=False), blocky_images()
    plan = model.plan(images, generator=torch.Generator().manual_seed(0))
    views = reconstruct(model, images, plan)

    with torch.no_grad():
        prediction = model(images, plan=plan.predict_all()).pred
    hidden = plan.hidden.unsqueeze(-1)
    torch.testing.assert_close(patchify(views.full, (4, 4)), prediction)
    expected = torch.where(hidden, prediction, patchify(images, (4, 4)))
    torch.testing.assert_close(patchify(views.pasted, (4, 4)), expected)
    torch.testing.assert_close(views.error, (views.pasted - images).abs())
    assert views.leaky is None and views.filled is None
    assert torch.equal(patchify(views.hidden.unsqueeze(1), (4, 4)).all(dim=-1), plan.hidden)
    assert views.hidden.float().mean() == 0.75
    assert views.error[~views.hidden.unsqueeze(1).expand_as(views.error)].abs().max() == 0


def test_only_the_leaky_picture_of_a_perfect_norm_pix_model_is_perfect(small_model, blocky_images):
    model, images = small_model(norm_pix=True), blocky_images()
    model.decoder = Oracle(model.target(batch_of(images)))
    views = reconstruct(model, images, model.plan(images, generator=torch.Generator().manual_seed(0)))
    torch.testing.assert_close(views.leaky, images, atol=1e-5, rtol=0)
    visible = ~views.hidden.unsqueeze(1).expand_as(images)
    torch.testing.assert_close(views.full[visible], images[visible], atol=1e-5, rtol=0)
    assert views.error.max() > 0.5
    filled = patchify(views.filled, (4, 4))[views.hidden[:, ::4, ::4].flatten(1)]
    means = patch_statistics(patchify(views.full, (4, 4)))[0][views.hidden[:, ::4, ::4].flatten(1)]
    torch.testing.assert_close(filled, means.expand_as(filled), atol=1e-5, rtol=0)
    torch.testing.assert_close(views.filled[visible], images[visible], atol=1e-5, rtol=0)
    torch.testing.assert_close(
        model.target(batch_of(views.pasted)), model.target(batch_of(images)), atol=1e-3, rtol=1e-3
    )


def test_a_perfect_low_pass_model_told_the_statistics_draws_the_filtered_image(small_model, blocky_images):
    model, images = small_model(norm_pix=True), blocky_images()
    model.target = LowPassTarget(cutoff=0.3)
    model.decoder = Oracle(model.target(batch_of(images)))
    plan = model.plan(images, generator=torch.Generator().manual_seed(0))
    views = reconstruct(model, images, plan)
    hidden = views.hidden.unsqueeze(1).expand_as(images)
    filtered = model.target.picture(images)
    torch.testing.assert_close(views.leaky[hidden], filtered[hidden], atol=1e-5, rtol=0)
    assert (filtered - images).abs()[hidden].max() > 0.5
    spoiled = torch.where(hidden, torch.randn_like(images), images)  # filtering would carry it to visible patches
    torch.testing.assert_close(reconstruct(model, spoiled, plan).filled, views.filled, atol=0, rtol=0)


def test_at_99_percent_the_honest_picture_does_not_recover_the_patches_means(small_model, blocky_images):
    model, images = small_model(norm_pix=True, img_size=64), blocky_images(batch=8, side=64)
    model.decoder = Oracle(model.target(batch_of(images)))
    plan = RandomMasking(ratio=0.99).plan(asked((16, 16), torch.arange(8)))
    views = reconstruct(model, images, plan)
    assert plan.visible.shape[1] == 2

    def r2_of_means(picture: Tensor) -> float:
        true, drawn = (patch_statistics(patchify(x, (4, 4)))[0].squeeze(-1) for x in (images, picture))
        baseline = true.gather(1, plan.visible).mean(dim=1, keepdim=True)
        errors = [((guess - true).square() * plan.hidden).sum() for guess in (drawn, baseline)]
        return float(1 - errors[0] / errors[1])

    assert r2_of_means(views.pasted) < 0.1
    assert r2_of_means(views.leaky) > 0.999
    honest, leaky = (score(images, picture, views.hidden, (0.25,) * 3) for picture in (views.pasted, views.leaky))
    assert honest.r2 < 0.3 < 0.99 < leaky.r2


def test_hidden_pixels_never_reach_the_honest_picture(small_model, blocky_images):
    model, images = small_model(norm_pix=True), blocky_images()
    plan = model.plan(images, generator=torch.Generator().manual_seed(0))
    views = reconstruct(model, images, plan)
    other = torch.where(views.hidden.unsqueeze(1), 3 * images.flip(0) + 1, images)
    again = reconstruct(model, other, plan)
    assert torch.equal(again.pasted, views.pasted)
    assert torch.equal(again.full, views.full)
    assert not torch.equal(again.leaky, views.leaky)


def test_statistics_are_gaussian_averages_of_the_visible_ones():
    rows, columns = 3, 4
    generator = torch.Generator().manual_seed(0)
    mean, deviation = torch.randn(1, 12, 1, generator=generator), torch.rand(1, 12, 1, generator=generator)
    hidden = torch.ones(1, 12, dtype=torch.bool)
    hidden[0, [1, 6, 11]] = False
    plan = plan_from_mask(hidden, batch=1, layout=layout_of((rows, columns)))
    found = interpolate_statistics(mean, deviation, plan, (rows, columns))
    for true, estimate in zip((mean, deviation), found, strict=True):
        for token in range(12):
            width = 0.6 * sqrt(12 / 3)
            weights = [
                exp(-((token // 4 - v // 4) ** 2 + (token % 4 - v % 4) ** 2) / (2 * width**2)) for v in (1, 6, 11)
            ]
            average = sum(w * float(true[0, v, 0]) for w, v in zip(weights, (1, 6, 11), strict=True)) / sum(weights)
            expected = average if hidden[0, token] else float(true[0, token, 0])
            assert float(estimate[0, token, 0]) == pytest.approx(expected, abs=1e-5)


def test_modes_gradients_and_generators_are_left_as_found(small_model, blocky_images):
    model, images = small_model(norm_pix=True), blocky_images()
    model.train()
    model.encoder.blocks.eval()
    model.decoder.blocks.append(nn.Dropout(0.5))
    before = {name: module.training for name, module in model.named_modules()}
    plan = model.plan(images)
    state = torch.get_rng_state()
    first, second = reconstruct(model, images, plan), reconstruct(model, images, plan)
    assert torch.equal(first.full, second.full)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    assert torch.equal(first.full, reconstruct(model, images, plan).full)  # nothing was dropped before either
    assert torch.equal(torch.get_rng_state(), state)
    assert {name: module.training for name, module in model.named_modules()} == before
    assert not first.full.requires_grad
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_failure_leaves_the_mode_too(small_model, blocky_images):
    model, images = small_model(norm_pix=True), blocky_images()
    model.train()
    with pytest.raises(UsageError, match="channels"):
        reconstruct(model, images[:, :1], model.plan(images))
    assert all(module.training for module in model.modules())


def test_a_half_precision_model_gives_float32_pictures(small_model, blocky_images):
    model, images = small_model(norm_pix=True), blocky_images()
    plan = model.plan(images, generator=torch.Generator().manual_seed(0))
    exact = reconstruct(model, images, plan)
    views = reconstruct(model.to(torch.bfloat16), images, plan)
    assert views.full.dtype == torch.float32
    torch.testing.assert_close(views.full, exact.full, atol=0.15, rtol=0.1)
    visible = ~views.hidden.unsqueeze(1).expand_as(images)
    assert torch.equal(views.pasted[visible], images[visible])


def test_a_plan_that_predicts_little_is_drawn_whole(small_model, blocky_images):
    model, images = small_model(norm_pix=False), blocky_images()
    plan = model.plan(images)
    part = replace(plan, predicted=plan.predicted[:, :3], weight=torch.rand(2, 3))
    assert torch.equal(reconstruct(model, images, part).full, reconstruct(model, images, plan).full)


def test_nothing_is_read_before_it_has_come_from_the_device(small_model, blocky_images, monkeypatch):
    asked_for: list[dict] = []
    to = Tensor.to

    def recorded(self: Tensor, *args, **options):
        asked_for.append(options)
        return to(self, *args, **options)

    model, images = small_model(norm_pix=True), blocky_images()
    plan = model.plan(images)
    monkeypatch.setattr(Tensor, "to", recorded)
    reconstruct(model, images, plan)
    assert asked_for and not any(options.get("non_blocking") for options in asked_for)


def test_target_without_pixels_is_refused(small_model, blocky_images):
    model, images = small_model(norm_pix=False), blocky_images()
    model.target = HogTarget()
    with pytest.raises(UsageError, match="predicts hog, not pixels"):
        reconstruct(model, images, model.plan(images))


def test_score_against_a_loop(blocky_images):
    images = blocky_images(channels=2, side=8)
    picture = images.flip(2)
    hidden = torch.zeros(2, 8, 8, dtype=torch.bool)
    hidden[:, :5] = True
    std = (0.5, 20.0)
    errors, baselines = [], []
    for image in range(2):
        for channel in range(2):
            true = images[image, channel] * std[channel]
            colour = true[~hidden[image]].mean()
            for y, x in hidden[image].nonzero().tolist():
                errors.append(float(picture[image, channel, y, x] * std[channel] - true[y, x]) ** 2)
                baselines.append(float(colour - true[y, x]) ** 2)
    found = score(images, picture, hidden, std)
    assert found.masked_mse == pytest.approx(sum(errors) / len(errors), rel=1e-5)
    assert found.r2 == pytest.approx(1 - sum(errors) / sum(baselines), rel=1e-5)


def test_score_knows_its_ends(blocky_images):
    images = blocky_images()
    hidden = torch.zeros(2, 32, 32, dtype=torch.bool)
    hidden[:, :20] = True
    mean = images[:, :, 20:].mean(dim=(2, 3), keepdim=True).expand_as(images)
    assert score(images, images, hidden, (1.0,) * 3).r2 == 1
    assert score(images, mean, hidden, (1.0,) * 3).r2 == pytest.approx(0, abs=1e-5)
    for value in (0.0, 0.3, -1e4):
        constant = torch.full((1, 3, 32, 32), value)
        assert score(constant, constant + 1, hidden[:1], (1.0, 2.0, 3.0)).r2 is None
