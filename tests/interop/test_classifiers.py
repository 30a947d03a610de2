"""Fine-tuned classifiers: head and names come in and go out with the encoder, and answer as timm's model does."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from foreign import TIMM_VIT, as_checkpoint, saved
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny import tiny_config
from torch import Tensor
from torch.testing import assert_close

from mae.cli import main
from mae.errors import MAEError, UsageError
from mae.interop.adapt import resized, with_channels
from mae.interop.exports import export
from mae.interop.exports.card import model_card
from mae.interop.exports.formats import FORMATS, OFFICIAL_FILE
from mae.interop.exports.roundtrip import READERS, model_outputs
from mae.interop.imports.convert import WeightMetadata
from mae.interop.imports.load import load_external
from mae.interop.imports.open import open_model
from mae.models.classifier import ImageClassifier, build_classifier
from mae.models.file import load_with_report, model_metadata, save_model
from mae.models.fingerprint import output_fingerprint

NAMES = ("cat", "dog", "a | b", "Weißstorch")
STATISTICS: dict[str, Any] = {"mean": (0.5, 0.4, 0.3), "std": (0.2, 0.2, 0.1)}


def classifier(**options: Any) -> ImageClassifier:
    """Every weight random, so that none can hide behind a zero or a one."""
    torch.manual_seed(1)
    config = tiny_config(**{"img_size": 16, **STATISTICS, **options})
    model = build_classifier(
        config, num_classes=4, class_names=NAMES, drop_path=0.0, label_smoothing=0.0, pretrained=None
    )
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.2)
    return model.eval()


def stored(path: Path, model: ImageClassifier, **metadata: Any) -> Path:
    save_model(model, path, model_metadata(model, probe=output_fingerprint(model), **metadata))
    return path


def theirs() -> Any:
    """timm's model as the official code builds it for fine-tuning: the mean of the patches, a norm, a head."""
    torch.manual_seed(0)
    vit = timm.models.vision_transformer.VisionTransformer(**TIMM_VIT, global_pool="avg", num_classes=4).eval()
    for weight in vit.parameters():
        torch.nn.init.normal_(weight, std=0.1)
    return vit


def test_the_official_codes_classifier_comes_in_whole(tmp_path: Path) -> None:
    vit = theirs()
    path = saved(tmp_path / "w.pth", as_checkpoint(vit.state_dict(), nb_classes=4))
    model, report = load_external(path, metadata=WeightMetadata(num_heads=3, trained_size=(32, 48)))
    assert isinstance(model, ImageClassifier) and (model.num_classes, model.class_names) == (4, ())
    images = torch.randn(2, 3, 32, 48)
    with torch.no_grad():
        assert_close(model(images), vit(images), rtol=1e-5, atol=1e-5)
    assert "head of 4 classes" in report.line() and "same outputs as timm" in report.line()
    assert not report.ignored


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"global_pool": "max"}, "global_pool 'max'"),
        ({"global_pool": "avgmax"}, "global_pool 'avgmax'"),
        ({"global_pool": "token", "fc_norm": True}, "global_pool 'token'"),
        ({"pool_include_prefix": True}, "pool_include_prefix"),
    ],
    ids=str,
)
def test_a_head_on_another_pooling_than_the_mean_of_patches_is_refused(
    options: dict[str, Any], says: str, tmp_path: Path
) -> None:
    vit = timm.create_model("vit_tiny_patch16_224", **TIMM_VIT, num_classes=4, **{"global_pool": "avg", **options})
    timm.models.save_for_hf(vit, tmp_path, safe_serialization=True)
    with pytest.raises(UsageError, match=f"classifier with {says}; expected one on the mean of the patch tokens"):
        open_model(tmp_path)


def test_the_pooling_that_older_timm_writes_beside_the_architecture_is_read_too(tmp_path: Path) -> None:
    FORMATS["timm"].write(classifier(), tmp_path, None)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["model_args"]["global_pool"]
    (tmp_path / "config.json").write_text(json.dumps(config | {"global_pool": "max"}))
    with pytest.raises(UsageError, match="classifier with global_pool 'max'"):
        open_model(tmp_path)


def test_a_head_on_the_class_token_is_left_behind_and_named(tmp_path: Path) -> None:
    vit = timm.models.vision_transformer.VisionTransformer(**TIMM_VIT, num_classes=4)
    path = saved(tmp_path / "w.pth", vit.state_dict())
    model, report = load_external(path, metadata=WeightMetadata(num_heads=3, trained_size=(32, 48)))
    assert not isinstance(model, ImageClassifier)
    assert report.ignored == ("head.bias", "head.weight") and "head of" not in report.line()


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("head", r"its norm behind the mean of the patch tokens \(fc_norm\).*whole head"),  # as num_classes=0 leaves it
        ("head.bias", "whole head"),
        ("fc_norm.weight", r"are missing \(encoder.norm.bias, encoder.norm.weight\)"),
    ],
)
def test_a_head_that_lost_a_part_is_no_classifier(name: str, says: str, tmp_path: Path) -> None:
    tensors = {key: tensor for key, tensor in theirs().state_dict().items() if not key.startswith(name)}
    with pytest.raises(MAEError, match=says):
        load_external(saved(tmp_path / "w.pth", tensors), metadata=WeightMetadata(num_heads=3, trained_size=(32, 48)))


@pytest.mark.parametrize("form", ["timm", "official", "safetensors"])
@pytest.mark.parametrize(
    "options", [{}, {"in_chans": 13, "mean": None, "std": None}, {"cls_token": False}, {"cls_tokens": 3}], ids=str
)
def test_it_goes_out_and_comes_back_bit_by_bit(form: str, options: dict[str, Any], tmp_path: Path) -> None:
    model = classifier(**options)
    if form == "official" and {"cls_token", "cls_tokens"} & options.keys():
        with pytest.raises(UsageError, match="models with one class token"):
            FORMATS[form].check(model)
        return
    FORMATS[form].check(model)
    FORMATS[form].write(model, tmp_path, "MIT")
    inputs = export._inputs(model)
    found, expected = READERS[form](tmp_path, inputs), model_outputs(model, inputs)
    assert {"tokens", "logits"} <= found.keys() <= expected.keys()
    for name, answer in found.items():
        assert export._difference(answer, expected[name]) < export.TOLERANCE
    if form == "timm" and "cls_tokens" in options:  # what it calls registers may be anything in weights of others
        with pytest.raises(UsageError, match="timm's with 'reg_tokens'"):
            open_model(tmp_path)
        return
    for path in [tmp_path, *([tmp_path / OFFICIAL_FILE] if form == "official" else [])]:
        back, _ = open_model(path)
        assert isinstance(back, ImageClassifier) and back.class_names == NAMES
        assert all(torch.equal(back.state_dict()[name], tensor) for name, tensor in model.state_dict().items())


def test_timm_is_told_the_names(tmp_path: Path) -> None:
    FORMATS["timm"].write(classifier(), tmp_path, None)
    model = timm.create_model(f"local-dir:{tmp_path}", pretrained=True)
    assert tuple(model.pretrained_cfg["label_names"]) == NAMES and model.num_classes == 4


def test_other_names_than_there_are_classes_are_refused(tmp_path: Path) -> None:
    FORMATS["timm"].write(classifier(), tmp_path, None)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"label_names": ["cat"]}))
    with pytest.raises(UsageError, match="its head has 4 classes, but 1 class names"):
        open_model(tmp_path)


@pytest.mark.parametrize("form", ["hf-vit", "hf-vitmae"])
def test_transformers_has_no_such_classifier(form: str) -> None:
    with pytest.raises(UsageError, match="holds only classifiers on the class token"):
        FORMATS[form].check(classifier())


@pytest.mark.slow
def test_the_command_exports_it_with_card_and_proof(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = stored(tmp_path / "classifier.safetensors", classifier(), licence="CC-BY-4.0")
    assert main(["export", str(path), "--to", "timm", "--out", str(tmp_path / "out")]) == 0
    assert "logits  " in capsys.readouterr().out
    card = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert "image-classification" in card and "| class names | cat, dog, a \\| b, Weißstorch |" in card
    assert set(json.loads((tmp_path / "out" / "proof.json").read_text())["differences"]) == {"tokens", "logits"}


def test_its_file_says_what_it_is_and_proves_the_head(tmp_path: Path) -> None:
    model = classifier()
    path = stored(tmp_path / "c.safetensors", model)
    loaded, report = load_with_report(path)
    assert isinstance(loaded, ImageClassifier) and loaded.class_names == NAMES and report.classes == 4
    assert report.probe is not None and report.probe < 1e-12 and "head of 4 classes" in report.line()
    with safe_open(path, framework="pt") as file:
        header = file.metadata()
    tensors: dict[str, Tensor] = load_file(path)
    tensors["head.weight"] = tensors["head.weight"].roll(1, dims=0)  # every class under another name
    save_file(tensors, path, header)
    with pytest.raises(MAEError, match="does not reproduce the probe"):
        load_with_report(path)


@pytest.mark.parametrize(
    "classes",
    [None, {}, {"count": 1}, {"count": 1 << 40}, {"count": 4, "names": ["a"]}, {"count": "4"}, {"count": 5}],
    ids=str,
)
def test_a_header_that_says_nothing_valid_of_the_classes_is_refused(classes: Any, tmp_path: Path) -> None:
    path = stored(tmp_path / "c.safetensors", classifier())
    with safe_open(path, framework="pt") as file:
        record = json.loads(file.metadata()["mae"])
    save_file(load_file(path), path, {"mae": json.dumps(record | {"classes": classes})})
    with pytest.raises((MAEError, UsageError)):
        load_with_report(path)


def test_another_size_and_other_channels_keep_the_head(tmp_path: Path) -> None:
    model = classifier()
    larger, _ = resized(model, (24, 32))
    other, _ = with_channels(model, 1, "mean")
    for changed in (larger, other):
        assert isinstance(changed, ImageClassifier) and changed.class_names == NAMES
    grey = torch.randn(2, 1, 16, 16)
    assert isinstance(other, ImageClassifier)
    with torch.no_grad():
        assert_close(other(grey), model(grey.expand(-1, 3, -1, -1)), rtol=1e-4, atol=1e-4)


def test_the_card_of_others_weights_claims_no_masked_autoencoder(tmp_path: Path) -> None:
    vit = timm.models.vision_transformer.VisionTransformer(**TIMM_VIT, num_classes=4)
    path = saved(tmp_path / "w.pth", vit.state_dict())
    model, report = load_external(path, metadata=WeightMetadata(num_heads=3, trained_size=(32, 48)))
    told: dict[str, Any] = {"path": path, "licence": None, "library": "timm", "usage": "read(it)", "whole": False}
    card = model_card(model, report, **told)
    assert "# A vision transformer's encoder" in card and "How it was trained is unknown." in card
    assert "masked" not in card and "without labels" not in card
    public = replace(report, origin={**report.origin, "imported_from": "official/base, https://, SHA-256 0"})
    known = model_card(model, public, **told)
    assert "# The encoder of a masked autoencoder" in known and "trained without labels" in known
    whole, of_whole = load_external(
        saved(tmp_path / "c.pth", as_checkpoint(theirs().state_dict())),
        metadata=WeightMetadata(num_heads=3, trained_size=(32, 48)),
    )
    parameters = sum(weight.numel() for weight in whole.encoder.parameters())
    assert f"| encoder parameters | {parameters:,} |" in model_card(whole, of_whole, **told)
    assert f"({parameters:,} parameters)" in of_whole.line()
