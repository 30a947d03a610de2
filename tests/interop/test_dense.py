"""Dense features for other people's heads: maps of blocks, and a backbone that a detector takes."""

from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from tiny import images_for, tiny_model
from torch.testing import assert_close
from torchvision.models.detection import FasterRCNN
from torchvision.models.detection.rpn import AnchorGenerator
from torchvision.ops import MultiScaleRoIAlign

import mae
from mae.errors import UsageError
from mae.interop.exports.formats import write_timm
from mae.models.presets import create_model

SIZES: dict[str, dict[str, Any]] = {
    "wide": {"depth": 4},
    "no class token": {"depth": 4, "cls_token": False},
    "tall patch": {"depth": 4, "img_size": (16, 24), "patch_size": (8, 4)},
}


@pytest.mark.parametrize("size", SIZES)
def test_layers_are_those_of_timm(size: str, tmp_path: Path) -> None:
    model = tiny_model(**SIZES[size]).eval()
    write_timm(model, tmp_path, None)
    theirs = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    images = images_for(model)
    expected = theirs.forward_intermediates(images, indices=[0, 2, 3], intermediates_only=True)
    found = model.encode(images, layers=[0, 2, -1], as_map=True)
    for layer, other in zip(found.layers, expected, strict=True):
        assert_close(layer, other, rtol=1e-5, atol=1e-5)
    tokens = model.encode(images, layers=[2]).layers
    assert torch.equal(tokens[0].mT.unflatten(2, found.grid), found.layers[1])
    plain = model.encode(images)
    assert plain.layers == () and torch.equal(plain.patches, found.patches) and torch.equal(plain.mean, found.mean)


def test_layers_come_in_the_order_asked_for_and_may_be_asked_for_twice() -> None:
    model = tiny_model(depth=3).eval()
    images = images_for(model)
    third, first, again = model.encode(images, layers=[2, 0, 2]).layers
    assert torch.equal(third, again) and not torch.equal(third, first)


@pytest.mark.parametrize("number", [2, -3, 12])
def test_a_block_that_is_not_there_is_named(number: int) -> None:
    model = tiny_model()
    with pytest.raises(UsageError, match=f"layer {number} is asked for; this encoder has blocks 0 to 1"):
        model.encode(images_for(model), layers=[number])
    with pytest.raises(UsageError, match="needs layers"):
        mae.MapBackbone(model, layers=[])


@pytest.mark.slow
def test_a_torchvision_detector_takes_the_backbone_and_trains_it() -> None:
    torch.manual_seed(0)
    model = create_model("mae_vit_tiny_patch16", depth=4, mean=(0.5,) * 3, std=(0.2,) * 3)
    backbone = mae.MapBackbone(model, layers=[1, 3])
    detector = FasterRCNN(
        backbone,
        num_classes=3,
        min_size=128,
        max_size=160,
        image_mean=list(model.config.tokenizer.mean),
        image_std=list(model.config.tokenizer.std),
        rpn_anchor_generator=AnchorGenerator(sizes=((32,), (64,)), aspect_ratios=((0.5, 1.0, 2.0),) * 2),
        box_roi_pool=MultiScaleRoIAlign(featmap_names=["0", "1"], output_size=7, sampling_ratio=2),
    )
    targets = [{"boxes": torch.tensor([[10.0, 10.0, 80.0, 90.0]]), "labels": torch.tensor([1])}]
    losses = detector.train()([torch.rand(3, 120, 150)], targets)
    sum(losses.values()).backward()
    assert model.encoder.patch_embed.proj.weight.grad.abs().sum() > 0
    detector.eval()
    (found,) = detector([torch.rand(3, 140, 100)])
    assert set(found) == {"boxes", "labels", "scores"}
    assert list(backbone(torch.zeros(1, 3, 64, 96))) == ["0", "1"] and backbone.out_channels == 192
    assert backbone(torch.zeros(1, 3, 64, 96))["1"].shape == (1, 192, 4, 6)
