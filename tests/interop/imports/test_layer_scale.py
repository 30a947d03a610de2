"""DINOv2's LayerScale: folded into the layer before it, the model is the same."""

from pathlib import Path
from typing import Any

import pytest
import torch
from foreign import TIMM_VIT, saved
from timm.models.vision_transformer import VisionTransformer
from torch import nn
from torch.testing import assert_close
from transformers import Dinov2Config, Dinov2Model

from mae.errors import MAEError, UsageError
from mae.interop.imports.convert import WeightMetadata
from mae.interop.imports.layer_scale import fold_layer_scale
from mae.interop.imports.load import load_external
from mae.interop.imports.open import open_model

TOLD = WeightMetadata(num_heads=3, trained_size=(32, 48))


def trained_like(model: nn.Module) -> Any:
    """The model with weights of every kind that training leaves."""
    torch.manual_seed(0)
    for name, weight in model.named_parameters():
        if name.endswith(("gamma", "lambda1")):
            nn.init.uniform_(weight, 0.01, 1)
        else:
            nn.init.normal_(weight, mean=float("norm" in name and name.endswith("weight")), std=0.1)
    return model.eval()


@pytest.fixture
def theirs() -> Any:
    return trained_like(VisionTransformer(**TIMM_VIT, num_classes=0, init_values=1e-5))


def test_timms_model_is_the_same_without_it(theirs: Any, tmp_path: Path):
    model, report = load_external(saved(tmp_path / "w.pth", theirs.state_dict()), metadata=TOLD)
    assert "LayerScale folded" in report.line() and "same outputs as timm" in report.line()
    images = torch.randn(2, 3, 32, 48)
    assert_close(model.encode(images).patches, theirs.forward_features(images)[:, 1:], rtol=1e-4, atol=1e-5)


def test_dinov2_of_transformers_is_the_same_without_it(tmp_path: Path):
    sizes = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 3, "image_size": 28, "patch_size": 14}
    theirs = trained_like(Dinov2Model(Dinov2Config(**sizes)))
    theirs.save_pretrained(tmp_path)
    model, report = open_model(tmp_path)
    assert "LayerScale folded" in report.line() and "same outputs as transformers" in report.line()
    images = torch.randn(2, 3, 28, 28)
    assert_close(model.encode(images).patches, theirs(images).last_hidden_state[:, 1:], rtol=1e-4, atol=1e-5)


def test_a_swiglu_model_is_refused(tmp_path: Path):
    sizes = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 3, "image_size": 28, "patch_size": 14}
    Dinov2Model(Dinov2Config(**sizes, use_swiglu_ffn=True)).save_pretrained(tmp_path)
    with pytest.raises(UsageError, match="use_swiglu_ffn is True; expected False"):
        open_model(tmp_path)


def test_each_product_is_that_of_a_loop(theirs: Any):
    tensors = theirs.state_dict()
    folded = fold_layer_scale(tensors)
    assert not any("gamma" in name for name in folded)
    for block in range(TIMM_VIT["depth"]):
        for scale, layer in (("ls1", "attn.proj"), ("ls2", "mlp.fc2")):
            gamma = tensors[f"blocks.{block}.{scale}.gamma"]
            for row in range(len(gamma)):
                weight, bias = (f"blocks.{block}.{layer}.{part}" for part in ("weight", "bias"))
                assert torch.equal(folded[weight][row], gamma[row] * tensors[weight][row])
                assert torch.equal(folded[bias][row], gamma[row] * tensors[bias][row])


def test_factors_that_are_left_out_are_found(theirs: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(
        "mae.interop.imports.convert.fold_layer_scale",
        lambda tensors: {name: tensor for name, tensor in tensors.items() if "gamma" not in name},
    )
    with pytest.raises(MAEError, match="outputs differ from those of timm by"):
        load_external(saved(tmp_path / "w.pth", theirs.state_dict()), metadata=TOLD)


@pytest.mark.parametrize("fault", ["layer", "width"])
def test_a_factor_without_its_layer_is_refused(fault: str, theirs: Any, tmp_path: Path):
    tensors = dict(theirs.state_dict())
    if fault == "layer":
        del tensors["blocks.1.attn.proj.bias"]
    else:
        tensors["blocks.1.ls1.gamma"] = torch.ones(47)
    with pytest.raises(MAEError, match=r"blocks.1.ls1.gamma has no blocks.1.attn.proj.(weight|bias) of its width"):
        load_external(saved(tmp_path / "w.pth", tensors), metadata=TOLD)
