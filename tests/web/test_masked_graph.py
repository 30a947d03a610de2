"""Hidden patches kept out of the attention are the same as dropped ones, whatever their number."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny import images_for, tiny_model
from torch.testing import assert_close

from mae.core.types import MaskPlan
from mae.errors import UsageError
from mae.masks.given import plan_from_mask
from mae.models.masked_autoencoder import MaskedAutoencoder
from mae.models.reconstruction import reconstruct
from mae.web.graph import MaskedGraph, write_graph

STATISTICS = {"mean": (0.4, 0.5, 0.6), "std": (0.2, 0.3, 0.25)}


def model_of(**options: Any) -> MaskedAutoencoder:
    torch.manual_seed(0)
    return tiny_model(**STATISTICS, **options).eval()


def picture_and_mask(model: MaskedAutoencoder, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, MaskPlan]:
    """A picture in [0, 1], the same normalised, and one mask of so many patches twice."""
    pixels = images_for(model, batch=1).sigmoid()
    mean, std = (torch.tensor(STATISTICS[name])[:, None, None] for name in ("mean", "std"))
    number = model.tokenizer.layout.num_tokens
    hidden = torch.zeros(1, number, dtype=torch.bool)
    hidden[:, torch.randperm(number, generator=torch.Generator().manual_seed(count))[:count]] = True
    plan = plan_from_mask(hidden, batch=1, layout=model.tokenizer.layout) if 0 < count < number else None
    return pixels, (pixels - mean) / std, hidden, plan  # type: ignore[return-value]


@pytest.mark.parametrize("target", ["pixels", "low_pass"])
@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("count", [1, 3, 8, 15])
def test_any_number_of_hidden_patches_is_the_same_as_dropping_them(count: int, norm: bool, target: str):
    model = model_of(norm_pix_loss=norm, cls_tokens=2, target=target)
    pixels, images, hidden, plan = picture_and_mask(model, count)
    with torch.no_grad():
        found = MaskedGraph(model)(pixels, hidden)
        assert_close(found["patches"], model.predict(images, plan), rtol=1e-5, atol=1e-5)
    views = reconstruct(model, images, plan)
    std, mean = torch.tensor(STATISTICS["std"])[:, None, None], torch.tensor(STATISTICS["mean"])[:, None, None]
    assert_close(found["picture"], views.pasted * std + mean, rtol=1e-5, atol=1e-5)
    if norm:
        assert views.leaky is not None
        assert_close(found["informed"], views.leaky * std + mean, rtol=1e-5, atol=1e-5)
    else:
        assert "informed" not in found


def test_codes_that_are_predicted_beside_pixels_are_left_out():
    model = model_of(code_prediction=0.2)
    pixels, images, hidden, plan = picture_and_mask(model, 8)
    with torch.no_grad():
        assert_close(MaskedGraph(model)(pixels, hidden)["patches"], model.predict(images, plan), rtol=1e-5, atol=1e-5)


def test_nothing_hidden_gives_the_picture_back_and_all_but_nothing_visible_stays_finite():
    model = model_of()
    pixels, _, hidden, _ = picture_and_mask(model, 0)
    graph = MaskedGraph(model)
    with torch.no_grad():
        assert_close(graph(pixels, hidden)["picture"], pixels, rtol=1e-5, atol=1e-5)
        hidden[:, 1:] = True
        assert all(bool(values.isfinite().all()) for values in graph(pixels, hidden).values())


def test_attention_is_that_of_the_last_block_and_none_of_hidden_patches():
    model = model_of()
    pixels, images, hidden, plan = picture_and_mask(model, 6)
    with torch.no_grad():
        attention = MaskedGraph(model)(pixels, hidden)["attention"][0]
        x = model.encoder._embed(images, plan)
        for block in model.encoder.blocks[:-1]:
            x = block(x)
        expected = model.encoder.blocks[-1].attention_weights(x, queries=x.shape[1]).mean(dim=1)[0]
    lead, seen = model.encoder.num_prefix, plan.visible[0]
    assert_close(attention[seen][:, seen], expected[lead:, lead:], rtol=1e-4, atol=1e-6)
    assert attention[hidden[0]].abs().sum() == 0 and attention[:, hidden[0]].abs().sum() == 0


@pytest.mark.parametrize("target", ["pixels", "low_pass"])
def test_onnxruntime_computes_the_same(tmp_path: Path, target: str):
    onnxruntime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    model = model_of(target=target)
    write_graph(model, tmp_path / "model.onnx")
    session = onnxruntime.InferenceSession(str(tmp_path / "model.onnx"))
    graph = MaskedGraph(model)
    for count in (0, 5, 15):
        pixels, _, hidden, _ = picture_and_mask(model, count)
        with torch.no_grad():
            expected = graph(pixels, hidden)
        found = session.run(None, {"image": pixels.numpy(), "hidden": hidden.numpy()})
        for name, values in zip([output.name for output in session.get_outputs()], found, strict=True):
            assert np.abs(values - expected[name].numpy()).max() < 1e-4, name


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"target": "hog", "target_cell": 2}, "predicts hog, not pixels"),
        ({"encoder_mask_tokens": True, "decoder": "linear"}, "replaces hidden patches"),
        ({"decoder": "cross"}, "--decoder self"),
        ({"in_chans": 4, "mean": (0.0,) * 4, "std": (1.0,) * 4}, "of 4 channels"),
        ({"mean": None, "std": None}, "does not say how"),
    ],
)
def test_what_cannot_be_drawn_on_is_refused(options: dict[str, Any], says: str):
    with pytest.raises(UsageError, match=says):
        MaskedGraph(tiny_model(**{**STATISTICS, **options}))
