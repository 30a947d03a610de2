"""What the forward promises: what it sees, what it computes, what it trains."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from tiny import images_for, tiny_model
from torch import Tensor, nn
from torch.testing import assert_close

from mae.core.contracts import Batch, Taught
from mae.core.types import MaskPlan
from mae.errors import UsageError

OPTIONS: list[dict[str, Any]] = [{}, {"cls_token": False}, {"pos_embed": "learned"}, {"norm_pix_loss": False}]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_training_path_equals_the_plain_path(options: dict[str, Any]) -> None:
    lean, plain = tiny_model(**options), tiny_model(**options)
    images = images_for(lean)
    plan = lean.plan(images, generator=torch.Generator().manual_seed(3))
    trained = lean(images, plan=plan)
    shown = plain(images, generator=torch.Generator().manual_seed(3))
    assert_close(trained.loss, shown.loss, rtol=1e-6, atol=1e-6)
    hidden = shown.pred.gather(1, plan.predicted.unsqueeze(-1).expand_as(trained.prediction))
    assert_close(trained.prediction, hidden, rtol=1e-5, atol=1e-5)
    trained.loss.backward()
    shown.loss.backward()
    for (name, mine), other in zip(lean.named_parameters(), plain.parameters(), strict=True):
        assert_close(mine.grad, other.grad, rtol=1e-5, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


def test_a_plan_that_predicts_visible_patches_too_is_taken_as_it_is() -> None:
    """Of 24 patches 12 are visible and 12 predicted, and six are both."""
    model = tiny_model().eval()
    order, hidden = torch.arange(24).expand(3, -1), torch.ones(3, 24, dtype=torch.bool)
    hidden[:, :12] = False
    plan = MaskPlan(visible=order[:, :12], predicted=order[:, 6:18], hidden=hidden)
    some, every = (model(images_for(model), plan=each).prediction for each in (plan, plan.predict_all()))
    assert_close(some, every[:, 6:18], rtol=1e-5, atol=1e-5)


def test_hidden_pixels_never_reach_the_encoder() -> None:
    model = tiny_model()
    images = images_for(model)
    plan = model.plan(images)
    hidden = plan.hidden.reshape(-1, 1, 4, 6).repeat_interleave(4, dim=2).repeat_interleave(4, dim=3)
    spoiled = torch.where(hidden, torch.full_like(images, float("nan")), images)
    with torch.no_grad():
        first, second = model(images, plan=plan), model(spoiled, plan=plan)
    assert torch.equal(first.latent, second.latent)
    assert torch.equal(first.prediction, second.prediction)
    assert first.loss.isfinite() and second.loss.isnan()  # the target did see them


def test_only_hidden_patches_train_the_prediction() -> None:
    model = tiny_model()
    images = images_for(model)
    output = model(images)
    output.prediction.retain_grad()
    output.loss.backward()
    gradient = output.prediction.grad
    assert gradient is not None and gradient.shape == (3, 24, 48)
    assert gradient[output.mask == 0].abs().max() == 0
    assert gradient[output.mask == 1].abs().amax(dim=-1).min() > 0


class CountingTarget:
    """The model's own target, counting the patches it is asked for."""

    def __init__(self, target: Any) -> None:
        self.target, self.needs = target, target.needs
        self.rows = 0

    def __call__(self, batch: Batch, tokens: Tensor | None = None, taught: Taught | None = None) -> Tensor:
        values = self.target(batch, tokens, taught)
        self.rows += values.shape[0] * values.shape[1]
        return values


@pytest.mark.parametrize("cls_token", [True, False])
def test_training_computes_nothing_that_it_throws_away(cls_token: bool) -> None:
    model = tiny_model(cls_token=cls_token)
    images = images_for(model)
    model.target = target = CountingTarget(model.target)
    rows: dict[str, int] = {}

    def count(name: str) -> Any:
        def hook(_: nn.Module, inputs: tuple[Tensor], __: Tensor) -> None:
            rows[name] = rows.get(name, 0) + inputs[0].shape[:-1].numel()

        return hook

    names = ["encoder.patch_embed.proj", "encoder.blocks.0.mlp.fc1", "decoder.pred", "decoder.norm"]
    for name in [*names, "decoder.blocks.0.mlp.fc1", "decoder.blocks.1.mlp.fc1"]:
        model.get_submodule(name).register_forward_hook(count(name))
    plan = model.plan(images)
    model(images, plan=plan).loss.backward()
    batch, visible, predicted = 3, 6, 18
    assert rows == {
        "encoder.patch_embed.proj": batch * visible,
        "encoder.blocks.0.mlp.fc1": batch * (visible + cls_token),
        "decoder.blocks.0.mlp.fc1": batch * (visible + cls_token + predicted),
        "decoder.blocks.1.mlp.fc1": batch * predicted,  # nobody asks for more of the last block
        "decoder.pred": batch * predicted,
        "decoder.norm": batch * predicted,
    }
    assert target.rows == batch * predicted


def test_the_loss_is_the_sum_of_its_named_terms() -> None:
    model = tiny_model()
    output = model(images_for(model))
    assert list(output.terms) == ["reconstruction"]
    assert_close(output.loss, torch.stack(list(output.terms.values())).sum())


def test_masks_follow_the_generator_they_are_drawn_from() -> None:
    model = tiny_model()
    images = images_for(model)
    masks = [model(images, generator=torch.Generator().manual_seed(seed)).mask for seed in (1, 1, 2)]
    assert torch.equal(masks[0], masks[1]) and not torch.equal(masks[0], masks[2])
    torch.manual_seed(5)
    first = model(images).mask
    second = model(images).mask
    torch.manual_seed(5)
    assert torch.equal(model(images).mask, first) and not torch.equal(first, second)
    assert not torch.equal(first[0], first[1])  # every image has its own


def test_more_than_one_source_of_the_mask_is_refused() -> None:
    model = tiny_model()
    images = images_for(model)
    sources = {"mask": torch.arange(24) < 18, "generator": torch.Generator(), "plan": model.plan(images)}
    for left_out in sources:
        with pytest.raises(UsageError, match="not both|at most one"):
            model(images, **{name: source for name, source in sources.items() if name != left_out})


def test_plans_and_keys_of_other_images_are_refused() -> None:
    model = tiny_model()
    images = images_for(model)
    plan = model.plan(images)
    with pytest.raises(UsageError, match="holds no image"):
        model(images[:0])
    with pytest.raises(UsageError, match=r"the plan is for images and tokens \(3, 24\); expected \(2, 24\)"):
        model(images[:2], plan=plan)
    with pytest.raises(UsageError, match=r"expected \(3, 12\)"):
        model.predict(images[:, :, :8], plan)
    nothing = replace(plan, visible=plan.visible[:, :0], hidden=torch.ones_like(plan.hidden))
    with pytest.raises(UsageError, match="leaves no token visible"):
        model(images, plan=nothing)
    for keys in (torch.arange(2), torch.arange(3.0)):
        with pytest.raises(UsageError, match=r"expected torch.int64, one an image: \[3\]"):
            model.plan(images, keys=keys)
        with pytest.raises(UsageError, match="one an image"):
            model(images, keys=keys)


@pytest.mark.parametrize(
    ("shape", "message"),
    [((2, 1, 16, 24), "3 channels"), ((2, 3, 17, 24), "nearest sizes"), ((2, 3, 0, 24), "nearest sizes")],
)
def test_images_of_a_wrong_shape_are_refused_on_both_entrances(shape: tuple[int, ...], message: str) -> None:
    model = tiny_model()
    for entrance in (model, model.encode):
        with pytest.raises(UsageError, match=message):
            entrance(torch.zeros(shape))


def test_a_batch_of_one_and_gradients_for_images() -> None:
    model = tiny_model()
    images = images_for(model, batch=1).requires_grad_()
    model(images).loss.backward()
    assert images.grad is not None and images.grad.abs().amax(dim=(0, 1)).min() > 0
