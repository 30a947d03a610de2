"""Detectors as ONNX graphs, and formats without a place for their heads."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import tiny_config
from torch.testing import assert_close

import mae
from mae.errors import MAEError, UsageError
from mae.interop.exports.detection_graph import DetectionGraph
from mae.interop.exports.export import _in_order, export_model
from mae.models.detector import DetectionHead, Detector, build_detector, fitted_size

SIZE = 32
SHAPES = ((3, 32, 20), (3, 16, 32), (3, 32, 32), (3, 1, 32))
"""Of images; the graph is traced with none of them."""


def make(*, masks: bool, classes: int = 2) -> Detector:
    torch.manual_seed(0)
    config = tiny_config(mean=(0.4, 0.5, 0.6), std=(0.2, 0.25, 0.3))
    head = DetectionHead(size=SIZE, window=3, channels=8, masks=masks)
    names = tuple(f"kind {number}" for number in range(classes))
    detector = build_detector(config, head, class_names=names, pretrained=None)
    with torch.no_grad():  # fresh heads find all kinds of objects alike; these tell them apart
        detector.roi_heads.box_predictor.cls_score.weight.mul_(10)
        detector.roi_heads.box_predictor.bbox_pred.weight.mul_(10)
    return detector.eval()


def images() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.rand(shape, generator=generator) for shape in SHAPES]


@pytest.mark.parametrize("masks", [False, True])
@pytest.mark.parametrize("classes", [1, 2, 5])
def test_the_graph_finds_what_torchvisions_own_code_finds(masks: bool, classes: int) -> None:
    detector = make(masks=masks, classes=classes)
    graph = DetectionGraph(detector)
    for threshold in (0.0, 0.1, 1.0):
        detector.roi_heads.score_thresh = threshold
        for image in images():
            with torch.no_grad():
                expected, found = detector([image])[0], graph(image, torch.tensor(threshold))
            assert bool(len(expected["boxes"])) == (threshold < 1)
            assert_close(found["boxes"], expected["boxes"], atol=1e-4, rtol=0)
            assert_close(found["scores"], expected["scores"])
            assert found["labels"].equal(expected["labels"] - 1)
            if masks:
                assert_close(found["masks"], expected["masks"][:, 0])


@pytest.mark.slow
@pytest.mark.parametrize("masks", [False, True])
def test_onnxruntime_finds_what_predict_finds(masks: bool, tmp_path: Path) -> None:
    onnxruntime: Any = pytest.importorskip("onnxruntime")
    detector = make(masks=masks)
    mae.save(detector, tmp_path / "d.safetensors")
    done = export_model(tmp_path / "d.safetensors", to="onnx", out=tmp_path / "onnx")
    assert set(done.differences) == {"boxes", "labels", "scores", *(["masks"] if masks else [])}
    session = onnxruntime.InferenceSession(str(tmp_path / "onnx" / "model.onnx"))
    facts = session.get_modelmeta().custom_metadata_map
    assert json.loads(facts["class_names"]) == list(detector.class_names) and facts["size"] == str(SIZE)
    assert "mean" not in facts  # the graph normalises
    names = [output.name for output in session.get_outputs()]
    counts = dict.fromkeys((0.06, 0.5, 1.0), 0)
    for threshold in counts:
        for image in images():
            fed = {"image": image.numpy(), "threshold": torch.tensor(threshold).numpy()}
            found = {name: torch.from_numpy(value) for name, value in zip(names, session.run(names, fed), strict=True)}
            (expected,) = detector.detect([image], threshold=threshold)
            counts[threshold] += len(expected.boxes)
            assert fitted_size((image.shape[1], image.shape[2]), SIZE) == image.shape[1:]  # none was resized
            assert_close(found["boxes"], expected.boxes, atol=1e-3, rtol=0)
            assert_close(found["scores"], expected.scores, atol=1e-5, rtol=0)
            assert found["labels"].equal(expected.labels)
            if masks:
                assert found["masks"].shape == (len(expected.boxes), 28, 28)
                pasted = detector.transform.postprocess(
                    [{"boxes": found["boxes"], "masks": found["masks"][:, None]}],
                    [(image.shape[1], image.shape[2])],
                    [(image.shape[1], image.shape[2])],
                )[0]["masks"]
                assert expected.masks is not None
                assert (pasted[:, 0] >= 0.5).ne(expected.masks).sum() <= 1e-3 * expected.masks.numel()
    assert counts[0.06] > 50 and counts[1.0] == 0  # nothing found is an answer too
    card = (tmp_path / "onnx" / "README.md").read_text()
    assert "object-detection" in card and "An object detector on" in card and "kind 0, kind 1" in card


@pytest.mark.slow
def test_a_graph_that_finds_other_objects_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mae.save(make(masks=False), tmp_path / "d.safetensors")
    usual = DetectionGraph._unlike

    def other(self: DetectionGraph, boxes: Any, scores: Any, groups: Any, wanted: Any, overlap: float) -> Any:
        return usual(self, boxes, scores, torch.zeros_like(groups), wanted, overlap)

    monkeypatch.setattr(DetectionGraph, "_unlike", other)
    with pytest.raises(MAEError, match="the onnx export differs from the model"):
        export_model(tmp_path / "d.safetensors", to="onnx", out=tmp_path / "onnx")
    assert not (tmp_path / "onnx").exists()


def test_this_packages_own_format_holds_a_detector(tmp_path: Path) -> None:
    mae.save(make(masks=True), tmp_path / "d.safetensors")
    done = export_model(tmp_path / "d.safetensors", to="safetensors", out=tmp_path / "own")
    assert max(done.differences.values()) == 0


def test_objects_of_equal_scores_may_come_in_any_order() -> None:
    """So many and so near each other that distances by products would mix up neighbours."""
    generator = torch.Generator().manual_seed(0)
    corners = 200 + 2 * torch.rand(100, 2, generator=generator)
    ours = {
        "boxes": torch.cat([corners, corners + 20], dim=1),
        "labels": torch.arange(100) % 3,
        "scores": torch.full((100,), 0.5),
    }
    order = torch.randperm(100, generator=generator)
    for name, tensor in _in_order({name: tensor[order] for name, tensor in ours.items()}, ours).items():
        assert tensor.equal(ours[name])


@pytest.mark.parametrize("to", ["timm", "hf-vit", "official", "onnx-mae", "torch-export"])
def test_a_format_without_a_place_for_the_head_is_refused(to: str, tmp_path: Path) -> None:
    mae.save(make(masks=False), tmp_path / "d.safetensors")
    with pytest.raises(UsageError, match=rf"--to {to} (has no place for the head|holds no detectors)"):
        export_model(tmp_path / "d.safetensors", to=to, out=tmp_path / "out")
