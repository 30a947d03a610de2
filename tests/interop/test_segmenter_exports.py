"""Segmenters as graphs of others, and formats without a place for their heads."""

import json
from pathlib import Path

import pytest
import torch
from tiny import images_for, tiny_config, tiny_model

import mae
from mae.errors import UsageError
from mae.interop.exports.export import export_model
from mae.models.segmenter import MapHead, build_segmenter, linear_head, upernet_head


def saved(path: Path, head: MapHead) -> Path:
    """A segmenter whose norms have seen images, in a file."""
    torch.manual_seed(0)
    statistics = {"mean": (0.5,) * 3, "std": (0.2,) * 3}
    model = build_segmenter(
        tiny_config(**statistics), head=head, num_classes=3, class_names=("a", "b", "c"), drop_path=0.0, pretrained=None
    )
    model.train()(images_for(tiny_model(**statistics)))
    mae.save(model.eval(), path)
    return path


@pytest.mark.slow
@pytest.mark.parametrize("head", [linear_head(2), upernet_head(2, 6)])
def test_onnxruntime_gives_the_logits_of_the_pixels(head: MapHead, tmp_path: Path):
    done = export_model(saved(tmp_path / "s.safetensors", head), to="onnx", out=tmp_path / "onnx")
    assert done.differences["logits"] <= 1e-5
    assert json.loads((tmp_path / "onnx" / "proof.json").read_text())["differences"]["logits"] <= 1e-5
    card = (tmp_path / "onnx" / "README.md").read_text()
    assert "image-segmentation" in card and "for every pixel" in card


def test_a_format_without_a_place_for_the_head_is_refused(tmp_path: Path):
    file = saved(tmp_path / "s.safetensors", linear_head(2))
    with pytest.raises(UsageError, match="--to timm has no place for the head"):
        export_model(file, to="timm", out=tmp_path / "timm")
