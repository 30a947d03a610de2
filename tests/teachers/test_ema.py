import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from pieces import batch_of
from torch.nn.functional import layer_norm
from torch.testing import assert_close

import mae
from mae.core.contracts import Batch
from mae.core.types import MaskPlan
from mae.errors import UsageError
from mae.randomness import sample_keys
from mae.teachers.ema import EmaNetwork, EmaTeacher

SIZES: dict[str, Any] = {
    "img_size": 16, "patch_size": 4, "embed_dim": 24, "depth": 3, "num_heads": 3,
    "decoder_embed_dim": 16, "decoder_depth": 1, "decoder_num_heads": 2,
}  # fmt: skip


def model_with(**options: Any) -> mae.MaskedAutoencoder:
    torch.manual_seed(0)
    return mae.create_model("mae_vit_tiny_patch16", **SIZES, target="features", teacher="ema", **options)


def taught(model: mae.MaskedAutoencoder) -> EmaNetwork:
    assert isinstance(model.teacher, EmaNetwork)
    return model.teacher


def images(count: int = 4, seed: int = 1) -> torch.Tensor:
    return torch.randn(count, 3, 16, 16, generator=torch.Generator().manual_seed(seed))


def plan_of(model: mae.MaskedAutoencoder, x: torch.Tensor, epoch: int = 0) -> MaskPlan:
    return model.plan(x, keys=sample_keys(0, epoch, torch.arange(len(x))))


def batch_for(model: mae.MaskedAutoencoder, x: torch.Tensor) -> Batch:
    return Batch(x=x, tokenizer=model.tokenizer)


@pytest.mark.parametrize(("layers", "blocks"), [(1, [2]), (2, [1, 2]), (3, [0, 1, 2]), (None, [1, 2])])
def test_outputs_are_the_normalised_mean_of_normalised_blocks(layers: int | None, blocks: list[int]):
    model, x = model_with(teacher_layers=layers), images()
    features = model.encode(x, layers=blocks)
    # The last block's tokens go through the encoder's own norm first.
    levels = [*features.layers[:-1], features.patches]
    mean = sum(layer_norm(level, (24,)) for level in levels) / len(levels)
    assert_close(model.taught(batch_for(model, x))["tokens"], layer_norm(mean, (24,)), rtol=0, atol=1e-5)


def test_weights_approach_those_of_a_student_that_stands_still_as_the_closed_form_says():
    model = model_with(teacher_momentum=0.9, teacher_final_momentum=0.9)
    teacher = taught(model)
    before = [weight.clone() for weight in teacher.encoder.parameters()]
    with torch.no_grad():
        for weight in model.encoder.parameters():
            weight.add_(torch.randn_like(weight))
    for step in range(1, 6):
        teacher.after_step(model, step / 5)
    for first, own, student in zip(before, teacher.encoder.parameters(), model.encoder.parameters(), strict=True):
        assert_close(own, 0.9**5 * first + (1 - 0.9**5) * student, rtol=1e-5, atol=1e-6)


def test_momentum_rises_by_half_a_cosine_to_its_end():
    teacher = taught(model_with(teacher_momentum=0.9, teacher_final_momentum=0.99))
    assert teacher.momentum_at(0.0) == pytest.approx(0.9) and teacher.momentum_at(1.0) == pytest.approx(0.99)
    assert teacher.momentum_at(0.5) == pytest.approx(0.945)


def test_it_sees_what_is_masked_and_gives_no_gradient():
    model, x = model_with(), images()
    plan = plan_of(model, x)
    noisy = torch.where(
        model.tokenizer.join(plan.hidden.unsqueeze(-1).expand(-1, -1, 48), model.tokenizer.layout), 9.0, x
    )
    assert torch.equal(model.encoded(x, plan).tokens, model.encoded(noisy, plan).tokens)
    assert not torch.equal(*(model.taught(batch_for(model, each))["tokens"] for each in (x, noisy)))
    model(x, plan=plan).loss.backward()
    assert all(weight.grad is None and not weight.requires_grad for weight in taught(model).parameters())


def test_it_is_no_part_of_the_model_and_goes_where_the_model_goes():
    model = model_with()
    names = {name for name, _ in model.named_parameters()} | model.state_dict().keys()
    assert model.teacher is not None and not any("teacher" in name for name in names)
    moved = copy.deepcopy(model).double()
    assert moved.teacher is not model.teacher
    assert next(taught(moved).parameters()).dtype == torch.float64
    assert next(taught(model).parameters()).dtype == torch.float32


def test_a_model_without_it_has_none():
    assert mae.create_model("mae_vit_tiny_patch16", **SIZES).teacher is None


def test_a_file_holds_the_student_alone(tmp_path: Path):
    model = model_with()
    with torch.no_grad():
        for weight in taught(model).parameters():
            weight.zero_()
    mae.save(model, tmp_path / "m.safetensors")
    again = mae.load(tmp_path / "m.safetensors")
    assert isinstance(again, mae.MaskedAutoencoder) and again.state_dict().keys() == model.state_dict().keys()
    # There it begins anew, from the student's weights.
    assert_close(dict(taught(again).encoder.named_parameters()), dict(again.encoder.named_parameters()))


def test_more_layers_than_there_are_blocks_are_refused():
    with pytest.raises(UsageError, match="^teacher_layers is 4, and the encoder has 3 blocks; expected"):
        model_with(teacher_layers=4)


def test_features_without_a_teacher_are_refused():
    with pytest.raises(
        UsageError, match="target features needs a teacher that gives tokens; give --teacher ema or --teacher frozen"
    ):
        mae.create_model("mae_vit_tiny_patch16", **SIZES, target="features")


def colours(count: int, seed: int) -> torch.Tensor:
    """One colour an image, with some noise: what is visible tells what is masked."""
    generator = torch.Generator().manual_seed(seed)
    noise = 0.1 * torch.randn(count, 3, 16, 16, generator=generator)
    return torch.randn(count, 3, 1, 1, generator=generator) + noise


@pytest.mark.parametrize(("make", "learns"), [(colours, True), (images, False)])
def test_features_of_structure_are_learned_and_those_of_noise_are_not(make: Any, learns: bool):
    # A teacher that stands still: its features are a fixed function of the image.
    model = model_with(teacher_momentum=1.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    for step in range(75):
        x = make(64, seed=step)
        optimizer.zero_grad()
        model(x, plan=plan_of(model, x, epoch=step)).loss.backward()
        optimizer.step()
    x, others = make(128, seed=10_000), make(512, seed=20_000)
    plan = plan_of(model, x, epoch=10_000)
    with torch.no_grad():
        loss = model(x, plan=plan).loss
        # Positions are among the features, so the best guess without looking is the mean of each place.
        guess = model.target(batch_for(model, others), taught=model.taught(batch_for(model, others))).mean(dim=0)
        true = model.target(batch_for(model, x), plan.predicted, model.taught(batch_for(model, x)))
        trivial = model.loss(guess[plan.predicted], true, None)
    if learns:
        assert loss < 0.3 * trivial
    else:
        assert 0.97 * trivial < loss < 1.1 * trivial


def test_a_teacher_of_one_patch_size_reads_images_of_another_size():
    target_of = EmaTeacher().build(model_with())
    assert target_of(batch_of(torch.randn(2, 3, 24, 32), 4))["tokens"].shape == (2, 48, 24)
