"""Graphs of ONNX and torch.export: batches of any size, the same answers, and what the file says of itself."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from PIL import Image
from tiny import tiny_model
from torch import Tensor
from transformers import AutoImageProcessor

from mae.errors import UsageError
from mae.interop.exports import export
from mae.interop.exports.formats import FORMATS, ONNX_FILE, PROGRAM_FILE
from mae.interop.exports.graphs import PredictionGraph
from mae.interop.exports.roundtrip import READERS, model_outputs
from mae.models.classifier import AttentiveProbe, LinearProbe, PooledProbe, build_classifier
from mae.models.file import save
from mae.models.pretrained import PretrainedEncoder

STATISTICS: dict[str, Any] = {"mean": (0.5, 0.4, 0.3), "std": (0.2, 0.2, 0.1)}
SHALLOW: dict[str, Any] = {"depth": 1, "decoder_depth": 1}  # a block more adds nothing but time
SIZES: dict[str, dict[str, Any]] = {
    "wide, 13 channels, no class token": {**SHALLOW, "img_size": (8, 24), "in_chans": 13, "cls_token": False},
    "three class tokens": {**SHALLOW, "img_size": 16, "cls_tokens": 3},
    "square, one channel, gaps": {**SHALLOW, "img_size": 16, "in_chans": 1, "nodata": "nan"},
}


def shapes(values: list[Any]) -> dict[str, list[Any]]:
    return {
        value.name: [axis.dim_param or axis.dim_value for axis in value.type.tensor_type.shape.dim] for value in values
    }


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, answer in found.items():
        ours = expected[name.partition(",")[0]]
        assert answer.shape == ours.shape and export._difference(answer, ours) < export.TOLERANCE, name


@pytest.mark.parametrize("form", ["onnx", "torch-export"])
@pytest.mark.parametrize("size", SIZES)
def test_an_encoder_answers_batches_of_any_size(size: str, form: str, tmp_path: Path) -> None:
    model = tiny_model(**SIZES[size]).eval()
    alone = PretrainedEncoder(encoder=model.encoder, config=model.config)
    FORMATS[form].write(model, tmp_path, None)
    for count in (1, 5):  # it was traced with two
        assert model.config is not None
        images = torch.randn(count, model.config.layout.channels, *model.config.layout.size)
        if model.config.tokenizer.nodata is not None:
            images[:, :, :5, :3] = float("nan")
        found = READERS[form](tmp_path, {"images": images})
        assert_same(found, model_outputs(alone, {"images": images}))
        if "cls" in found:
            assert_same({"cls": found["cls"]}, {"cls": model.encode(images).cls})
        assert ("cls" in found) == model.config.encoder.cls_token and all(
            answer.isfinite().all() for answer in found.values()
        )


def test_a_program_is_called_as_the_model_is(tmp_path: Path) -> None:
    model = tiny_model(**SHALLOW, img_size=16, **STATISTICS).eval()
    FORMATS["torch-export"].write(model, tmp_path, None)
    images = torch.randn(3, 3, 16, 16)
    found = torch.export.load(tmp_path / PROGRAM_FILE).module()(images)
    torch.testing.assert_close(found["mean"], model.encode(images).mean)


def test_an_onnx_file_says_what_it_takes_and_gives(tmp_path: Path) -> None:
    config = tiny_model(**SHALLOW, img_size=16, **STATISTICS).config
    assert config is not None
    names = ("cat", "Weißstorch", "none")
    model = build_classifier(
        config, num_classes=3, class_names=names, drop_path=0.0, label_smoothing=0.0, pretrained=None
    ).eval()
    torch.nn.init.normal_(model.head.weight)
    FORMATS["onnx"].write(model, tmp_path, "CC-BY-NC-4.0")
    file = onnx.load(str(tmp_path / ONNX_FILE))
    assert shapes(list(file.graph.input)) == {"images": ["batch", 3, 16, 16]}
    assert shapes(list(file.graph.output)) == {
        "tokens": ["batch", 17, 24], "mean": ["batch", 24], "cls": ["batch", 24], "logits": ["batch", 3]
    }  # fmt: skip
    said = onnxruntime.InferenceSession(str(tmp_path / ONNX_FILE)).get_modelmeta().custom_metadata_map
    assert json.loads(said["mean"]) == [0.5, 0.4, 0.3] and json.loads(said["std"]) == [0.2, 0.2, 0.1]
    assert tuple(json.loads(said["class_names"])) == names and said["licence"] == "CC-BY-NC-4.0"
    inputs = export._inputs(model)
    assert_same(READERS["onnx"](tmp_path, inputs), model_outputs(model, inputs))
    described = json.loads((tmp_path / "preprocessor_config.json").read_text())
    assert described["image_mean"] == [0.5, 0.4, 0.3] and described["size"] == {"shortest_edge": 18}


@pytest.mark.parametrize("form", ["onnx", "torch-export", "official"])
def test_its_processor_crops_as_the_model_does(form: str, tmp_path: Path) -> None:
    model = tiny_model(**SHALLOW, img_size=16, **STATISTICS).eval()
    FORMATS[form].write(model, tmp_path, None)
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 256, (18, 40, 3), dtype=np.uint8))
    theirs = AutoImageProcessor.from_pretrained(tmp_path)(picture, return_tensors="pt")["pixel_values"]
    assert theirs.shape == (1, 3, 16, 16)
    assert (theirs - model.preprocess(picture)).abs().max() < 2 / 255 / 0.1


def test_an_onnx_file_says_what_is_no_data_and_which_channels_it_takes(tmp_path: Path) -> None:
    model = tiny_model(**SIZES["square, one channel, gaps"] | {"nodata": "-9999", "channels": ["B08"]}).eval()
    FORMATS["onnx"].write(model, tmp_path, None)
    said = onnxruntime.InferenceSession(str(tmp_path / ONNX_FILE)).get_modelmeta().custom_metadata_map
    assert float(said["nodata"]) == -9999 and json.loads(said["channels"]) == ["B08"]


WHOLE: dict[str, dict[str, Any]] = {
    "self": {**SHALLOW, "target": "hog", "target_cell": 4},
    "cross": {**SHALLOW, "decoder": "cross", "cls_tokens": 3},
    "linear": {"depth": 1, "decoder": "linear", "encoder_mask_tokens": True},
}


@pytest.mark.parametrize("decoder", WHOLE)
def test_the_whole_predicts_what_an_order_hides(decoder: str, tmp_path: Path) -> None:
    model = tiny_model(**WHOLE[decoder], img_size=16, **STATISTICS).eval()
    FORMATS["onnx-mae"].check(model)
    FORMATS["onnx-mae"].write(model, tmp_path, None)
    inputs = dict(export._inputs(model))
    assert_same(READERS["onnx-mae"](tmp_path, inputs), model_outputs(model, inputs))
    other = {**inputs, "order": inputs["order"].flip(1)}
    assert_same(READERS["onnx-mae"](tmp_path, other), model_outputs(model, other))  # nor is the order a constant
    assert (
        export._difference(model_outputs(model, other)["prediction"], model_outputs(model, inputs)["prediction"]) > 1e-3
    )


@pytest.mark.parametrize("form", ["onnx-mae", "hf-vitmae"])
def test_as_many_patches_are_seen_as_in_pretraining(form: str, tmp_path: Path) -> None:
    model = tiny_model(**SHALLOW, img_size=20, mask_ratio=0.8, **STATISTICS).eval()  # 25 * (1 - 0.8) is below 5
    FORMATS[form].write(model, tmp_path, None)
    inputs = export._inputs(model)
    assert inputs["num_visible"] == 5
    found = READERS[form](tmp_path, inputs)["prediction"]
    mask = torch.ones(inputs["order"].shape).scatter(1, inputs["order"][:, :5], 0)
    assert model.plan(inputs["images"]).visible.shape[1] == 5
    with torch.no_grad():
        assert_same({"prediction": found}, {"prediction": model(inputs["images"], mask=mask).pred})
    if form == "onnx-mae":
        assert (
            onnxruntime.InferenceSession(str(tmp_path / ONNX_FILE)).get_modelmeta().custom_metadata_map["visible"]
            == "5"
        )


def test_visible_count_is_that_of_the_models_own_mask() -> None:
    model = tiny_model(**SHALLOW, img_size=16, **STATISTICS).eval()
    model.masking = SimpleNamespace(num_visible=lambda grid: 3)  # whatever the ratio
    inputs = export._inputs(model)
    assert inputs["num_visible"] == 3
    mask = torch.ones(inputs["order"].shape).scatter(1, inputs["order"][:, :3], 0)
    with torch.no_grad():
        found, expected = PredictionGraph(model)(inputs["images"], inputs["order"]), model(inputs["images"], mask=mask)
    assert_same(found, {"prediction": expected.pred})


def test_weights_of_many_bytes_lie_beside_the_graph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mae.interop.exports.graphs._LARGE", 1000)
    model = tiny_model(**SHALLOW, img_size=16).eval()
    FORMATS["onnx"].write(model, tmp_path, None)
    assert {path.name for path in tmp_path.iterdir()} == {ONNX_FILE, f"{ONNX_FILE}.data", "preprocessor_config.json"}
    inputs = {"images": torch.randn(2, 3, 16, 16)}
    expected = model_outputs(PretrainedEncoder(encoder=model.encoder, config=model.config), inputs)
    assert_same(READERS["onnx"](tmp_path, inputs), expected)
    (tmp_path / f"{ONNX_FILE}.data").rename(tmp_path / "away")
    with pytest.raises(Exception, match="data"):  # what it answers with lies there and nowhere else
        READERS["onnx"](tmp_path, inputs)


def test_an_encoder_alone_predicts_nothing() -> None:
    model = tiny_model(img_size=16)
    with pytest.raises(UsageError, match="--to onnx-mae needs a decoder, which this model does not have; use onnx"):
        FORMATS["onnx-mae"].check(PretrainedEncoder(encoder=model.encoder, config=model.config))


@pytest.mark.parametrize(("form", "lacking"), [("onnx", "onnxscript"), ("timm", "timm")])
def test_what_is_not_installed_is_named(
    form: str, lacking: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export, "find_spec", lambda name: None if name == lacking else object())
    with pytest.raises(UsageError, match=f"--to {form} needs {lacking}: pip install {lacking}"):
        export.export_model(tmp_path / "none", to=form, out=tmp_path / "out")
    assert not (tmp_path / PROGRAM_FILE).exists() and not (tmp_path / "out").exists()


@pytest.mark.parametrize("form", ["onnx", "torch-export", "safetensors"])
@pytest.mark.parametrize("kind", ["linear", "attentive", "pooled"])
def test_probes_are_held_with_their_heads(kind: str, form: str, tmp_path: Path) -> None:
    model = tiny_model(**SHALLOW, img_size=16, **STATISTICS)
    head: dict[str, Any] = {"encoder": model.encoder, "num_classes": 3, "config": model.config}
    probe = {
        "linear": lambda: LinearProbe(feature="cls+mean", **head),
        "attentive": lambda: AttentiveProbe(**head),
        "pooled": lambda: PooledProbe(**head),
    }[kind]().eval()
    if isinstance(probe, PooledProbe):
        torch.nn.init.normal_(probe.pooling.score)
    assert FORMATS[form].any_head
    FORMATS[form].write(probe, tmp_path, None)
    inputs = export._inputs(probe)
    found = READERS[form](tmp_path, inputs)
    assert "logits" in found and ("learned" in found) == (kind == "pooled")
    assert_same(found, model_outputs(probe, inputs))
    with torch.no_grad():
        assert export._difference(found["logits"], probe(inputs["images"])) < export.TOLERANCE
        if isinstance(probe, PooledProbe):
            pooled = probe.pooling(probe.encode(inputs["images"]).patches)
            assert export._difference(found["learned"], pooled) < export.TOLERANCE


@pytest.mark.parametrize("form", [name for name, form in FORMATS.items() if not form.any_head])
def test_other_forms_refuse_a_probe(form: str, tmp_path: Path) -> None:
    pytest.importorskip(FORMATS[form].needs[0] if FORMATS[form].needs else "torch")
    model = tiny_model(**SHALLOW, img_size=16, **STATISTICS)
    save(PooledProbe(encoder=model.encoder, num_classes=3, config=model.config), tmp_path / "p.safetensors")
    with pytest.raises(UsageError, match=f"^--to {form} has no place for the head .*; use onnx, torch-export, safet"):
        export.export_model(tmp_path / "p.safetensors", to=form, out=tmp_path / "out")


def test_a_pooled_probe_is_exported_with_proof(tmp_path: Path) -> None:
    model = tiny_model(**SHALLOW, img_size=16, **STATISTICS)
    probe = PooledProbe(encoder=model.encoder, num_classes=2, class_names=("cat", "dog"), config=model.config)
    save(probe, tmp_path / "p.safetensors")
    done = export.export_model(tmp_path / "p.safetensors", to="onnx", out=tmp_path / "out")
    assert {"learned", "logits", "learned, one by one"} <= set(done.differences)
    assert max(done.differences.values()) <= export.TOLERANCE
    said = onnx.load(str(tmp_path / "out" / ONNX_FILE)).metadata_props
    assert json.loads(next(entry.value for entry in said if entry.key == "class_names")) == ["cat", "dog"]
