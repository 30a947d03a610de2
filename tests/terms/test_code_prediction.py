from collections.abc import Callable
from math import log
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

import mae
from mae.core.contracts import Batch
from mae.errors import UsageError
from mae.interop.exports.naming import official_tensors
from mae.pretraining.init_weights import fresh_part, open_init_weights
from mae.randomness import sample_keys

SIZES: dict[str, Any] = {
    "img_size": 16, "patch_size": 4, "embed_dim": 24, "depth": 2, "num_heads": 3,
    "decoder_embed_dim": 16, "decoder_depth": 1, "decoder_num_heads": 2,
    "code_prediction": 1.0,
}  # fmt: skip


def model_with(**options: Any) -> mae.MaskedAutoencoder:
    torch.manual_seed(0)
    return mae.create_model("mae_vit_tiny_patch16", **{**SIZES, "teacher": "codebook", "teacher_codes": 16, **options})


def value_of(model: mae.MaskedAutoencoder, images: torch.Tensor, *, everything: bool = False) -> float:
    plan = model.plan(images, keys=sample_keys(0, 0, torch.arange(len(images))))
    with torch.no_grad():
        return float(model.eval()(images, plan=plan.predict_all() if everything else plan).terms["code_prediction"])


def slowly(model: mae.MaskedAutoencoder, images: torch.Tensor) -> float:
    """Masked patch by masked patch, with the code that is nearest by distance."""
    plan = model.plan(images, keys=sample_keys(0, 0, torch.arange(len(images))))
    with torch.no_grad():
        logits = model.decoder(model.encoded(images, plan), plan, model.tokenizer.layout)[..., 48:]
    assert model.teacher is not None
    patches, total = model.tokenizer.cut(images), 0.0
    for row, numbers in enumerate(plan.predicted.tolist()):
        for place, number in enumerate(numbers):
            patch = patches[row, number]
            pattern = (patch - patch.mean()) / patch.std(correction=0)
            code = (model.teacher.codes - pattern).square().sum(dim=1).argmin()  # type: ignore[union-attr, operator]
            total += float(cross_entropy(logits[row, place], code))
    return total / plan.predicted.numel()


@pytest.mark.parametrize("everything", [False, True])
def test_it_is_the_cross_entropy_of_the_nearest_codes_of_masked_patches(everything: bool):
    model, images = model_with(), torch.randn(3, 3, 16, 16)
    assert value_of(model, images, everything=everything) == pytest.approx(slowly(model, images), rel=1e-5)


def test_pixels_are_predicted_beside_it():
    model, images = model_with(code_prediction=0.5), torch.randn(3, 3, 16, 16)
    plan = model.plan(images, keys=sample_keys(0, 0, torch.arange(3)))
    with torch.no_grad():
        output = model.eval()(images, plan=plan)
    terms = output.terms
    assert output.prediction.shape == (3, 12, 48)
    assert float(output.loss) == pytest.approx(float(terms["reconstruction"] + 0.5 * terms["code_prediction"]))


def test_a_prediction_that_knows_nothing_has_log_k():
    model = model_with()
    with torch.no_grad():
        model.decoder.pred.weight[48:].zero_()
    assert value_of(model, torch.randn(4, 3, 16, 16)) == pytest.approx(log(16), rel=1e-6)


def test_patches_without_data_add_nothing():
    model = model_with(nodata="nan")
    with torch.no_grad():
        model.decoder.pred.weight[48:].zero_()
    images = torch.randn(2, 3, 16, 16)
    images[0] = torch.nan
    assert value_of(model, images) == pytest.approx(log(16) / 2, rel=1e-6)


def stripes(count: int, seed: int) -> torch.Tensor:
    """One pattern of four in all patches of an image: what is seen says what is hidden."""
    generator = torch.Generator().manual_seed(seed)
    patterns = torch.randn(4, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    which = torch.randint(4, (count,), generator=generator)
    return patterns[which].repeat(1, 1, 4, 4) + 0.1 * torch.randn(count, 3, 16, 16, generator=generator)


def noise(count: int, seed: int) -> torch.Tensor:
    return torch.randn(count, 3, 16, 16, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("make", "learns"), [(stripes, True), (noise, False)])
def test_it_learns_codes_that_can_be_told_and_nothing_of_noise(make: Callable[[int, int], torch.Tensor], learns: bool):
    model = model_with()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    assert model.teacher is not None
    for step in range(150):
        images, keys = make(32, step), sample_keys(0, step, torch.arange(32))
        optimizer.zero_grad()
        model(images, plan=model.plan(images, keys=keys), keys=keys).loss.backward()
        optimizer.step()
        model.teacher.after_step(model, 0.5)
    images = make(256, 10_000)
    value = value_of(model, images)
    codes = model.teacher(Batch(x=images, tokenizer=model.tokenizer))["codes"]
    shares = codes.long().flatten().bincount(minlength=16) / codes.numel()
    entropy = float(-torch.special.xlogy(shares, shares).sum())  # what the codes' frequencies alone reach
    assert entropy > 1
    assert value < 0.4 * entropy if learns else value > 0.97 * entropy


@pytest.mark.parametrize("teacher", [{}, {"teacher": "ema"}])
def test_without_codes_it_is_refused(teacher: dict[str, str]):
    with pytest.raises(UsageError, match="code_prediction .*codes"):
        mae.create_model("mae_vit_tiny_patch16", **SIZES, **teacher)


def test_pixels_alone_leave_in_exports_and_for_other_runs(tmp_path: Path):
    model, images = model_with(), torch.randn(2, 3, 16, 16)
    mae.save(model, tmp_path / "model.safetensors")
    found = mae.load(tmp_path / "model.safetensors")
    plan = model.plan(images, keys=sample_keys(0, 0, torch.arange(2)))
    prediction = model.predict(images, plan)
    assert model.decoder.pred.weight.shape == (64, 16) and prediction.shape == (2, 16, 48)
    assert torch.equal(found.predict(images, plan), prediction)
    assert official_tensors(model)["decoder_pred.weight"].shape == (48, 16)
    start = open_init_weights(str(tmp_path / "model.safetensors"))
    assert fresh_part(start, start.config) == ("decoder.pred.",) and fresh_part(start, model.config) == ()
