from dataclasses import replace
from math import log
from typing import Any

import pytest
import torch
from pieces import batch_of
from torch.testing import assert_close

import mae
from mae.core.contracts import Step
from mae.core.types import Encoded, MaskPlan, take_tokens
from mae.errors import UsageError
from mae.masks.planar import plan_in_order
from mae.randomness import sample_keys
from mae.teachers.ema import EmaNetwork
from mae.terms.difficulty import Difficulty

SIZES: dict[str, Any] = {
    "img_size": 16, "patch_size": 4, "embed_dim": 24, "depth": 2, "num_heads": 3,
    "decoder_embed_dim": 16, "decoder_depth": 1, "decoder_num_heads": 2,
    "difficulty": 1.0, "difficulty_embed_dim": 16, "difficulty_num_heads": 2,
}  # fmt: skip


def model_with(**options: Any) -> mae.MaskedAutoencoder:
    torch.manual_seed(0)
    return mae.create_model("mae_vit_tiny_patch16", **SIZES, **options)


def step_of(guess: torch.Tensor, *, everything: bool = False, gap: bool = False) -> Step:
    """Of guesses `[B, 16, 1]`, under a mask of 12 of 16 patches."""
    torch.manual_seed(1)
    plan = plan_in_order(torch.rand(len(guess), 16).argsort(dim=1), 4)
    if everything:
        plan = plan.predict_all()
    prediction, target = torch.randn(2, len(guess), plan.predicted.shape[1], 48)
    if gap:
        target[:, 3] = torch.nan
    return Step(
        batch=batch_of(torch.zeros(len(guess), 3, 16, 16), 4), plan=plan, prediction=prediction.requires_grad_(),
        encoded=Encoded(levels=(torch.zeros(len(guess), 5, 24),), num_prefix=1, places=plan.visible),
        target=target, std=None, taught={}, projected=take_tokens(guess, plan.predicted),
    )  # fmt: skip


def slowly(step: Step) -> float:
    """Pair by pair."""
    assert step.projected is not None
    total, pairs = 0.0, 0
    for row in range(len(step.projected)):
        masked = [place for place, number in enumerate(step.plan.predicted[row]) if step.plan.hidden[row, number]]
        errors = (step.prediction[row].detach() - step.target[row]).square().mean(dim=-1)
        for i in masked:
            for j in masked:
                pairs += i < j
                if errors[i] > errors[j]:
                    own, other = (step.projected[row, place, 0] for place in (i, j))
                    total -= float(torch.sigmoid(own - other).log())
    return total / pairs


@pytest.mark.parametrize("changes", [{}, {"everything": True}, {"gap": True}])
def test_it_is_the_mean_over_pairs_of_masked_patches(changes: dict[str, bool]):
    step = step_of(torch.randn(3, 16, 1), **changes)
    assert float(Difficulty()(step)) == pytest.approx(slowly(step), rel=1e-5)


def test_parts_of_a_batch_add_up_to_the_whole_where_data_is_missing():
    step = step_of(torch.randn(2, 16, 1))
    step.target[0, 3:9] = torch.nan
    alone = []
    for row in (0, 1):
        part = slice(row, row + 1)
        of = {name: getattr(step.plan, name)[part] for name in ("visible", "predicted", "hidden")}
        own = {name: getattr(step, name)[part] for name in ("prediction", "target", "projected")}
        alone.append(Difficulty()(replace(step, plan=replace(step.plan, **of), **own)))
    assert_close(sum(alone) / 2, Difficulty()(step))


def test_a_guess_that_knows_nothing_has_log_2_and_the_right_order_nothing():
    assert float(Difficulty()(step_of(torch.zeros(3, 16, 1)))) == pytest.approx(log(2))
    step = step_of(torch.zeros(2, 16, 1))
    error = (step.prediction - step.target).square().mean(dim=-1, keepdim=True).detach()
    ranks = step.plan.on_grid(error.argsort(dim=1).argsort(dim=1).float())
    right, wrong = (Difficulty()(step_of(sign * 50 * ranks)) for sign in (1, -1))
    assert right < 1e-6 and wrong > 50


def test_it_teaches_its_own_network_and_the_encoder_and_not_the_prediction():
    guess = torch.randn(2, 16, 1).requires_grad_()
    step = step_of(guess)
    Difficulty()(step).backward()
    assert step.prediction.grad is None and guess.grad is not None
    assert (guess.grad.squeeze(-1)[~step.plan.hidden] == 0).all() and guess.grad.abs().sum() > 0


def half_noise(count: int, seed: int) -> torch.Tensor:
    """Noise in the left or in the right half, one colour in the other: which half it is can be seen."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(count, 3, 16, 16, generator=generator)
    side = torch.rand(count, 1, 1, 1, generator=generator) < 0.5
    left = torch.arange(16) < 8
    return torch.where(left == side, noise, torch.randn(count, 3, 1, 1, generator=generator).expand_as(noise))


def noise(count: int, seed: int) -> torch.Tensor:
    return torch.randn(count, 3, 16, 16, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("make", "steps", "learns"), [(half_noise, 400, True), (noise, 150, False)])
def test_it_learns_where_patches_are_hard_and_of_noise_learns_nothing(make: Any, steps: int, learns: bool):
    model = model_with(norm_pix_loss=False, teacher="ema", teacher_momentum=0.9, teacher_final_momentum=0.9)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    assert isinstance(model.teacher, EmaNetwork)
    for step in range(steps):
        x, keys = make(64, seed=step), sample_keys(0, step, torch.arange(64))
        optimizer.zero_grad()
        model(x, plan=model.plan(x, keys=keys)).loss.backward()
        optimizer.step()
        model.teacher.after_step(model, 0.5)
    x = make(256, seed=10_000)
    with torch.no_grad():
        value = float(model(x, plan=model.plan(x, keys=sample_keys(0, 0, torch.arange(256)))).terms["difficulty"])
    hard = model.teacher.difficulty(batch_of(x, 4))
    noisy = x[:, 0].view(256, 4, 4, 4, 4).transpose(2, 3).flatten(3).std(dim=3).flatten(1) > 0.3
    if learns:
        assert value < 0.6 * log(2)  # half of the pairs are of two patches alike, whose order nobody can know
        # No patch of a whole image is masked, as those are of which it learned: its order is right less often there.
        pairs = noisy.unsqueeze(2) & ~noisy.unsqueeze(1)
        assert ((hard.unsqueeze(2) > hard.unsqueeze(1)) & pairs).sum() > 0.65 * pairs.sum()
    else:
        assert 0.97 * log(2) < value < 1.1 * log(2)


def test_the_teacher_has_a_mean_of_its_network_too():
    model = model_with(teacher="ema", teacher_momentum=0.9, teacher_final_momentum=0.9, mask="hard")
    teacher, head = model.teacher, model.term_heads["difficulty"]
    assert isinstance(teacher, EmaNetwork) and teacher.predictor is not None
    before = [weight.clone() for weight in teacher.predictor.parameters()]
    with torch.no_grad():
        for weight in head.parameters():
            weight.add_(torch.randn_like(weight))
    teacher.after_step(model, 0.5)
    for first, own, student in zip(before, teacher.predictor.parameters(), head.parameters(), strict=True):
        assert_close(own, 0.9 * first + 0.1 * student)
    images = noise(3, 0)
    whole = torch.arange(16).expand(3, -1)
    plan = MaskPlan(visible=whole, predicted=whole, hidden=torch.zeros(3, 16, dtype=torch.bool))
    expected = teacher.predictor(teacher.encoder(images, plan), plan, model.tokenizer.layout)
    assert_close(model.scores(images), expected.squeeze(-1).detach(), rtol=0, atol=1e-5)
    assert model_with(teacher="ema", difficulty_depth=2).teacher.predictor is not None  # type: ignore[union-attr]


def test_a_target_of_classes_is_refused():
    with pytest.raises(UsageError, match="difficulty learns from squared errors, and the target codes has classes"):
        model_with(target="codes", teacher="codebook", loss="cross_entropy")


def test_a_loss_that_leaves_the_length_of_predictions_open_is_refused():
    with pytest.raises(UsageError, match="loss cosine leaves the length of predictions open; give --loss smooth_l1"):
        model_with(loss="cosine")


@pytest.mark.parametrize("options", [{}, {"decoder": "linear", "encoder_mask_tokens": True}], ids=["dropped", "tokens"])
def test_every_weight_of_its_decoder_learns(options: dict[str, Any]):
    """What no loss asks for has a gradient of 0 or of rounding alone."""
    if options:
        sizes = {name: value for name, value in SIZES.items() if not name.startswith("decoder_")}
        torch.manual_seed(0)
        model = mae.create_model("mae_vit_tiny_patch16", **sizes, **options, teacher="ema", mask="hard")
    else:
        model = model_with(teacher="ema", mask="hard")
    images = noise(8, 0)
    keys = sample_keys(0, 0, torch.arange(8))
    model(images, plan=model.plan(images, keys=keys)).loss.backward()
    head = model.term_heads["difficulty"]
    assert all(tensor.grad is not None and tensor.grad.abs().max() > 1e-7 for tensor in head.parameters())
    names = {name for name, _ in head.named_parameters()}
    assert not {"norm.bias", "pred.bias"} & names and ("mask_token" in names) is not bool(options)
    assert model.teacher is not None
    model.teacher.after_step(model, 0.5)
    assert model.scores(images).shape == (8, 16)
