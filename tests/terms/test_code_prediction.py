from collections.abc import Callable
from math import log
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

import mae
from mae.core.contracts import Batch
from mae.interop.exports.naming import official_tensors
from mae.layers.codebook import Codebook
from mae.pretraining.init_weights import fresh_part, load_initial_weights, open_init_weights
from mae.randomness import sample_keys

SIZES: dict[str, Any] = {
    "img_size": 16, "patch_size": 4, "embed_dim": 24, "depth": 2, "num_heads": 3,
    "decoder_embed_dim": 16, "decoder_depth": 1, "decoder_num_heads": 2,
    "code_prediction": 1.0,
}  # fmt: skip


def model_with(**options: Any) -> mae.MaskedAutoencoder:
    torch.manual_seed(0)
    own = {"code_prediction_codes": 16, "code_prediction_window": 1}
    return mae.create_model("mae_vit_tiny_patch16", **{**SIZES, **own, **options})


def codebook_of(model: mae.MaskedAutoencoder) -> Codebook:
    codebook = model.term_teachers["code_prediction"]
    assert isinstance(codebook, Codebook)
    return codebook


def value_of(model: mae.MaskedAutoencoder, images: torch.Tensor, *, everything: bool = False) -> float:
    plan = model.plan(images, keys=sample_keys(0, 0, torch.arange(len(images))))
    with torch.no_grad():
        return float(model.eval()(images, plan=plan.predict_all() if everything else plan).terms["code_prediction"])


def slowly(model: mae.MaskedAutoencoder, images: torch.Tensor) -> float:
    """Masked patch by masked patch, with the code that is nearest by distance."""
    plan = model.plan(images, keys=sample_keys(0, 0, torch.arange(len(images))))
    with torch.no_grad():
        logits = model.decoder(model.encoded(images, plan), plan, model.tokenizer.layout)[..., 48:]
    patches, total = model.tokenizer.cut(images), 0.0
    for row, numbers in enumerate(plan.predicted.tolist()):
        for place, number in enumerate(numbers):
            patch = patches[row, number]
            pattern = (patch - patch.mean()) / patch.std(correction=0)
            code = (codebook_of(model).codes - pattern).square().sum(dim=1).argmin()
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
    codebook = codebook_of(model)
    for step in range(150):
        images, keys = make(32, step), sample_keys(0, step, torch.arange(32))
        optimizer.zero_grad()
        model(images, plan=model.plan(images, keys=keys), keys=keys).loss.backward()
        optimizer.step()
        codebook.after_step(model, 0.5)
    images = make(256, 10_000)
    value = value_of(model, images)
    codes = codebook(Batch(x=images, tokenizer=model.tokenizer))["codes"]
    shares = codes.long().flatten().bincount(minlength=16) / codes.numel()
    entropy = float(-torch.special.xlogy(shares, shares).sum())  # what the codes' frequencies alone reach
    assert entropy > 1
    assert value < 0.4 * entropy if learns else value > 0.97 * entropy


@pytest.mark.parametrize("options", [{}, {"target": "features", "teacher": "ema"}])
def test_its_codes_are_of_the_model_whatever_teacher_there_is(options: dict[str, str], tmp_path: Path):
    model, images, keys = model_with(**options), stripes(8, 0), sample_keys(0, 0, torch.arange(8))
    assert (model.teacher is None) == (not options)
    model(images, keys=keys)
    codebook_of(model).after_step(model, 0.5)
    mae.save(model, tmp_path / "model.safetensors")
    found = mae.load(tmp_path / "model.safetensors")
    assert torch.equal(codebook_of(found).codes, codebook_of(model).codes)
    assert value_of(found, images) == value_of(model, images)
    assert value_of(model, images) != value_of(model_with(**options), images)


def test_pixels_alone_leave_in_exports_and_for_other_runs(tmp_path: Path):
    model, images = model_with(), torch.randn(2, 3, 16, 16)
    mae.save(model, tmp_path / "model.safetensors")
    found = mae.load(tmp_path / "model.safetensors")
    plan = model.plan(images, keys=sample_keys(0, 0, torch.arange(2)))
    prediction = model.predict(images, plan)
    assert model.decoder.pred.weight.shape == (64, 16) and prediction.shape == (2, 16, 48)
    assert torch.equal(found.predict(images, plan), prediction)
    tensors = official_tensors(model)
    assert tensors["decoder_pred.weight"].shape == (48, 16) and not any("codes" in name for name in tensors)
    start = open_init_weights(str(tmp_path / "model.safetensors"))
    assert fresh_part(start, start.config) == fresh_part(start, model.config) == ()


@pytest.mark.parametrize("codes", [0, 16, 8])
def test_of_the_last_layer_a_run_takes_what_predicts_the_target(codes: int, tmp_path: Path):
    """Codes of another codebook are others: their rows begin anew, also where there are as many."""
    trained = model_with()
    torch.nn.init.constant_(trained.decoder.pred.weight, 3.0)
    mae.save(trained, tmp_path / "model.safetensors")
    without = {**SIZES, "code_prediction": 0.0}
    model = model_with(code_prediction_codes=codes) if codes else mae.create_model("mae_vit_tiny_patch16", **without)
    fresh = model.decoder.pred.weight.clone()
    load_initial_weights(model, open_init_weights(str(tmp_path / "model.safetensors")))
    found = model.decoder.pred.weight
    assert len(found) == 48 + codes and (found[:48] == 3).all() and torch.equal(found[48:], fresh[48:])
