"""Images with gaps: what is missing is not seen, not asked for, and leaves everything else as it is."""

from dataclasses import replace
from math import log10
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny import images_for, tiny_config, tiny_model
from torch import Tensor

import mae
from mae.errors import UsageError
from mae.evaluation.common.baselines import measure_baselines
from mae.modalities.images.patches import patchify
from mae.modalities.images.pictures import score
from mae.models.build import build_model
from mae.models.reconstruction import reconstruct

PATCH = (4, 4)


def gappy(images: Tensor, *, share: float = 0.3) -> Tensor:
    gaps = torch.rand(images.shape, generator=torch.Generator().manual_seed(5)) < share
    return images.masked_fill(gaps, torch.nan)


@pytest.mark.parametrize("norm_pix", [True, False])
@pytest.mark.parametrize("loss", ["mse", "l1", "smooth_l1"])
def test_the_loss_asks_for_hidden_values_that_are_known_and_for_no_other(norm_pix: bool, loss: str) -> None:
    model = tiny_model(nodata="nan", norm_pix_loss=norm_pix, loss=loss)
    images = gappy(images_for(model))
    output = model(images, generator=torch.Generator().manual_seed(1))
    output.prediction.retain_grad()
    output.loss.backward()
    assert output.prediction.grad is not None and bool(output.loss.isfinite())
    asked = output.plan.hidden.unsqueeze(-1) & ~patchify(images, PATCH).isnan()
    assert torch.equal(output.prediction.grad != 0, asked)
    assert all(bool(parameter.grad.isfinite().all()) for parameter in model.parameters() if parameter.grad is not None)


def test_what_is_missing_enters_the_encoder_as_the_mean() -> None:
    model, images = tiny_model(nodata="-9999").eval(), gappy(images_for(tiny_model()))
    filled = images.nan_to_num(nan=0.0)
    assert torch.equal(model.encode(images).patches, model.encode(filled).patches)
    assert torch.equal(model.encode(filled).patches, tiny_model().eval().encode(filled).patches)


def test_without_gaps_the_model_is_the_one_that_knows_none() -> None:
    model, plain = tiny_model(nodata="nan"), tiny_model()
    images = images_for(model)
    plan = model.plan(images, generator=torch.Generator().manual_seed(1))
    ours, usual = model(images, plan=plan), plain(images, plan=plan)
    assert torch.equal(ours.prediction, usual.prediction)
    torch.testing.assert_close(ours.loss, usual.loss)


def test_a_gap_that_nobody_spoke_of_spoils_the_loss_and_so_is_seen() -> None:
    model = tiny_model()
    images = gappy(images_for(model))
    assert not bool(model(images, generator=torch.Generator().manual_seed(1)).loss.isfinite())
    assert not bool(model.encode(images).patches.isfinite().any())


@pytest.mark.parametrize(
    "option", [{"laplacian": 0.1}, {"focal_frequency": 1.0}, {"target": "low_pass", "target_cutoff": 0.5}]
)
def test_what_reads_whole_samples_is_refused(option: dict) -> None:
    with pytest.raises(UsageError, match="reads whole samples, and those have gaps"):
        tiny_config(nodata="nan", **option)


@pytest.mark.parametrize("value", ["inf", "none", "", "1,5"])
def test_what_is_no_value_is_refused(value: str) -> None:
    with pytest.raises(UsageError, match="nodata is .*; expected a finite number, or nan"):
        tiny_config(nodata=value)


@pytest.mark.parametrize("names", [("a", "b"), ("a", "a", "b"), ("a", "", "b")])
def test_names_must_be_different_and_one_a_channel(names: tuple[str, ...]) -> None:
    with pytest.raises(UsageError, match="expected 3 different names"):
        tiny_config(channels=names)


def test_baselines_are_of_known_values_and_several_batches_count_as_one() -> None:
    model = tiny_model(nodata="nan", norm_pix_loss=False)
    images = gappy(images_for(model, batch=6), share=0.5)
    images[:2, :, :8] = torch.nan
    plan = model.plan(images, generator=torch.Generator().manual_seed(1))
    some = [
        replace(plan, visible=plan.visible[part], predicted=plan.predicted[part], hidden=plan.hidden[part])
        for part in (slice(0, 2), slice(2, 6))
    ]
    whole = measure_baselines(model.target, model.tokenizer, [(images, plan)], loss=model.loss)
    batches = zip(images.split([2, 4]), some, strict=True)
    parts = measure_baselines(model.target, model.tokenizer, batches, loss=model.loss)
    assert whole.as_dict() == pytest.approx(parts.as_dict(), rel=1e-5)
    hidden = patchify(images, PATCH)[plan.hidden]
    assert whole.zero == pytest.approx(float(hidden.nan_to_num(nan=0.0).square().mean()), rel=1e-5)


@pytest.mark.parametrize("norm_pix", [True, False])
def test_pictures_are_judged_by_what_is_known(norm_pix: bool) -> None:
    model = tiny_model(nodata="nan", norm_pix_loss=norm_pix)
    images = gappy(images_for(model))
    views = reconstruct(model, images, model.plan(images, generator=torch.Generator().manual_seed(1)))
    known, hidden = ~images.isnan(), views.hidden.unsqueeze(1)
    assert bool(views.full.isfinite().all()) and bool(views.error.isfinite().all())
    assert torch.equal(views.pasted.isnan(), ~known & ~hidden) and not views.error[~known].any()
    judged = score(images, views.pasted, views.hidden, (2.0, 2.0, 2.0))
    where = known & hidden
    errors = (2 * (views.pasted - images))[where].double().square()
    assert judged.masked_mse == pytest.approx(float(errors.mean()), rel=1e-5)
    means = torch.stack(
        [
            torch.stack([image[c][known[n, c] & ~views.hidden[n]].mean() for c in range(3)])
            for n, image in enumerate(images)
        ]
    )
    baseline = (2 * (means[:, :, None, None] - images))[where].double().square().sum()
    assert judged.r2 == pytest.approx(1 - float(errors.sum() / baseline), rel=1e-4)


def test_a_model_is_built_from_what_its_file_says() -> None:
    config = tiny_config(nodata="-9999", channels=("B02", "B03", "B08"))
    again = type(config).from_json(config.to_json())
    assert again == config and build_model(again).encoder.patch_embed.may_miss


def test_empty_patches_tell_nothing_of_their_neighbours() -> None:
    """Brightness and contrast of hidden patches come from visible patches with data alone."""
    model = tiny_model(nodata="nan")
    images = 2 + images_for(model)
    images[..., :12] = torch.nan
    views = reconstruct(model, images, model.plan(images, generator=torch.Generator().manual_seed(1)))
    hidden = patchify(views.hidden.unsqueeze(1).float(), PATCH).bool().all(dim=-1)
    assert views.filled is not None
    guessed = patchify(views.filled, PATCH)[hidden]
    assert 1.5 < float(guessed.min()) and float(guessed.max()) < 2.5
    nothing = torch.full_like(images, torch.nan)
    blank = reconstruct(model, nothing, model.plan(nothing, generator=torch.Generator().manual_seed(1)))
    assert bool(blank.full.isfinite().all())


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_whole_numbers_with_gaps_are_judged_in_the_range_of_whole_numbers(tmp_path: Path, dtype: type) -> None:
    """Of 8 bits in all of it, of 16 in the part that is there; without the gap's value, which would make it larger."""
    values = np.random.default_rng(0).integers(100, 200, (16, 24, 3)).astype(dtype)
    values[:4, :4] = 0
    np.save(tmp_path / "a.npy", values)
    unit = "uint8" if dtype is np.uint8 else "uint16"
    model = tiny_model(nodata="0", mean=(0.2, 0.2, 0.2), std=(0.1, 0.1, 0.1), pixel_dtype=unit)
    found = mae.reconstruct(model, tmp_path / "a.npy", device="cpu")
    known = found.input[~found.input.isnan()]
    span = 1.0 if dtype is np.uint8 else float(known.max() - known.min())
    assert found.numbers[0].psnr == pytest.approx(10 * log10(span**2 / found.numbers[0].masked_mse), rel=1e-4)
    assert dtype is np.uint8 or span <= 100 / 65535
    np.save(tmp_path / "empty.npy", np.zeros_like(values))
    with pytest.raises(UsageError, match="empty.npy holds no data in its central crop"):
        mae.reconstruct(model, tmp_path / "empty.npy", device="cpu")
