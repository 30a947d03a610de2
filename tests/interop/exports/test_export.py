"""Models that go out: what the library answers is what the model answers, and what would not is never written."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from shutil import disk_usage
from typing import Any

import numpy as np
import pytest
import torch
from drawn_masks import drawn_masks
from drawn_objects import drawn_objects
from light import few_looks, without_pictures
from PIL import Image
from safetensors.torch import load_file, save_file
from tiny import tiny_model
from torch import nn
from transformers import AutoImageProcessor

import mae
from mae.cli import main
from mae.errors import MAEError, UsageError
from mae.interop.exports import export
from mae.interop.exports.card import model_card
from mae.interop.exports.export import TOLERANCE, export_model
from mae.interop.exports.formats import FORMATS, OFFICIAL_FILE
from mae.interop.exports.roundtrip import READERS, model_outputs
from mae.interop.imports.convert import WeightMetadata
from mae.interop.imports.load import load_external
from mae.interop.imports.open import open_model
from mae.modalities.images.crop import central_crop
from mae.models.file import model_metadata, save_model
from mae.models.fingerprint import output_fingerprint
from mae.models.preprocess import preprocessing_of
from mae.models.presets import create_model
from mae.models.pretrained import PretrainedEncoder

STATISTICS: dict[str, Any] = {"mean": (0.1, 0.2, 0.3), "std": (0.4, 0.5, 0.6)}
SQUARE: dict[str, Any] = {"img_size": 16, **STATISTICS}
SHORT: dict[str, Any] = {
    "iterations": 1, "batch_size": 2, "channels": 8, "beside": (), "pictures": 0, "device": "cpu", "quiet": True
}  # fmt: skip
READ = ("timm", "hf-vit", "hf-vitmae", "official", "safetensors")
"""Forms that some package reads as a model; the graphs are in test_graphs.py."""

SIZES: dict[str, tuple[dict[str, Any], set[str]]] = {
    "square": (SQUARE, set(READ)),
    "wide": ({"img_size": (8, 24)}, {"timm", "hf-vit", "official", "safetensors"}),
    "tall patch": ({"img_size": (16, 24), "patch_size": (8, 4)}, {"timm", "hf-vit", "official", "safetensors"}),
    "one channel": ({"img_size": 16, "in_chans": 1}, set(READ)),
    "13 channels": ({"img_size": 8, "in_chans": 13, "mask_ratio": 0.5}, set(READ)),
    "learned positions": ({"img_size": 16, "pos_embed": "learned"}, set(READ)),
    "plain pixels": ({"img_size": 16, "norm_pix_loss": False, "mask_ratio": 0.6}, set(READ)),
    "absolute error": ({"img_size": 16, "loss": "l1"}, set(READ) - {"hf-vitmae"}),
    "low pass": ({"img_size": 16, "target": "low_pass", "target_cutoff": 0.5}, set(READ) - {"hf-vitmae"}),
    "eps": ({"img_size": 16, "norm_eps": 1e-3}, {"hf-vit", "hf-vitmae", "safetensors"}),
    "no class token": ({"img_size": 16, "cls_token": False}, {"timm", "safetensors"}),
    "four class tokens": ({"img_size": 16, "cls_tokens": 4}, {"timm", "safetensors"}),
    "cross decoder": ({"img_size": 16, "decoder": "cross"}, {"timm", "hf-vit", "safetensors"}),
    "gaps": ({"img_size": 16, "nodata": "nan"}, {"safetensors"}),
}


def written(folder: Path, model: PretrainedEncoder, licence: str | None = None) -> Path:
    path = folder / "mine.safetensors"
    save_model(model, path, model_metadata(model, probe=output_fingerprint(model), licence=licence))
    return path


@pytest.mark.parametrize("form", READ)
@pytest.mark.parametrize("size", SIZES)
def test_each_form_answers_as_the_model_or_refuses_it(size: str, form: str, tmp_path: Path) -> None:
    changes, forms = SIZES[size]
    model = tiny_model(**changes).eval()
    if form not in forms:
        with pytest.raises(UsageError, match=f"--to {form}"):
            FORMATS[form].check(model)
        return
    FORMATS[form].check(model)
    FORMATS[form].write(model, tmp_path, None)
    inputs = export._inputs(model)
    theirs, ours = READERS[form](tmp_path, inputs), model_outputs(model, inputs)
    compared = {"timm": {"tokens"}, "hf-vit": {"tokens"}, "official": set(ours) - {"loss", "gradient"}}
    assert set(theirs) == compared.get(form, set(ours) - ({"mean", "cls"} if form == "hf-vitmae" else set()))
    for name, answer in theirs.items():
        assert export._difference(answer, ours[name]) < TOLERANCE, name


def test_the_processor_of_hf_vit_makes_the_images_that_features_are_computed_of(tmp_path: Path) -> None:
    model = tiny_model(**SQUARE).eval()
    FORMATS["hf-vit"].write(model, tmp_path, None)
    pixels = smooth(40, 80)
    theirs = AutoImageProcessor.from_pretrained(tmp_path)(Image.fromarray(pixels), return_tensors="pt")["pixel_values"]
    mean, std = (torch.tensor(STATISTICS[name])[:, None, None] for name in ("mean", "std"))
    ours, squeezed = (
        (central_crop(torch.from_numpy(pixels).movedim(-1, 0), (16, 16), share) / 255 - mean) / std
        for share in (0.875, None)
    )
    assert (theirs[0] - ours).abs().max() < 2 / 255 / 0.4  # rounding; 36 columns are left to cut evenly
    assert (theirs[0] - squeezed).abs().max() > 0.1


def smooth(height: int, width: int) -> np.ndarray:
    """An image that hardly differs from pixel to pixel, `[h, w, 3]`."""
    rows, columns = np.mgrid[:height, :width]
    return np.stack([rows * 6, columns * 3, rows * 2 + columns], axis=-1).astype(np.uint8)


COMPONENTS: dict[str, tuple[dict[str, Any], str, str]] = {
    "hog": ({"target": "hog", "target_cell": 4}, "target hog", "| decoder | 16 wide, 2 blocks, 2 heads |"),
    "linear": ({"decoder": "linear", "encoder_mask_tokens": True}, "this model has linear", "| decoder | linear |"),
}
"""Of kinds that other libraries lack: the options, what refuses their decoder, and the card's line on it."""


@pytest.mark.parametrize("kind", COMPONENTS)
def test_only_the_encoder_of_kinds_others_lack_is_held(kind: str, tmp_path: Path) -> None:
    options, lacks, line = COMPONENTS[kind]
    model = tiny_model(img_size=8, **STATISTICS, **options).eval()
    inputs = export._inputs(model)
    expected = model_outputs(model, inputs)
    for form in ("timm", "hf-vit"):
        FORMATS[form].check(model)
        (tmp_path / form).mkdir()
        FORMATS[form].write(model, tmp_path / form, None)
        found = READERS[form](tmp_path / form, inputs)["tokens"]
        assert export._difference(found, expected["tokens"]) < TOLERANCE
    for form in ("hf-vitmae", "official"):
        with pytest.raises(UsageError, match=f"--to {form} holds only .*{lacks}; use"):
            FORMATS[form].check(model)
    alone = PretrainedEncoder(encoder=model.encoder, config=model.config)
    (tmp_path / "official").mkdir()
    FORMATS["official"].check(alone)
    FORMATS["official"].write(alone, tmp_path / "official", None)
    back, _ = open_model(tmp_path / "official" / OFFICIAL_FILE)
    for name, tensor in back.encoder.state_dict().items():
        assert torch.equal(model.encoder.state_dict()[name], tensor), name
    path = written(tmp_path, model)
    card = model_card(*open_model(path), path=path, licence=None, library=None, usage="", whole=True)
    assert line in card and f"| predicts | {kind if kind == 'hog' else 'per-patch normalised pixels'}, 75%" in card


@pytest.mark.parametrize("form", ["hf-vitmae", "official", "safetensors"])
@pytest.mark.parametrize("size", ["square", "learned positions", "13 channels", "plain pixels"])
def test_a_round_trip_is_bit_identical(size: str, form: str, tmp_path: Path) -> None:
    model = tiny_model(**SIZES[size][0]).eval()
    FORMATS[form].write(model, tmp_path, None)
    path = tmp_path / OFFICIAL_FILE if form == "official" else tmp_path
    back, _ = open_model(path, photo_check=False)
    assert model.config is not None and back.config is not None
    left_out = {} if size == "square" or form == "safetensors" else {"mean": None, "std": None}
    assert back.config.override(left_out) == model.config.override(left_out)
    for name, tensor in model.state_dict().items():
        assert torch.equal(back.state_dict()[name], tensor), name


@pytest.mark.parametrize("form", ["timm", "hf-vit"])
def test_an_encoder_comes_back_bit_by_bit(form: str, tmp_path: Path) -> None:
    model = tiny_model(**SQUARE).eval()
    FORMATS[form].write(model, tmp_path, "MIT")
    back, report = open_model(tmp_path)
    assert back.config is not None and back.config.tokenizer.mean == STATISTICS["mean"]
    assert report.origin["licence"] == ("MIT" if form == "timm" else None)
    for name, tensor in model.encoder.state_dict().items():
        assert torch.equal(back.encoder.state_dict()[name], tensor), name


@pytest.mark.parametrize("form", READ)
@pytest.mark.parametrize("pixel_dtype", [None, "uint16", "float32"])
def test_the_unit_of_its_pixels_comes_back(form: str, pixel_dtype: str | None, tmp_path: Path) -> None:
    """Of 8 bits a package's own rule holds, which weights from elsewhere follow too."""
    model = tiny_model(**SQUARE, pixel_dtype=pixel_dtype).eval()
    FORMATS[form].write(model, tmp_path, None)
    path = tmp_path / OFFICIAL_FILE if form == "official" else tmp_path
    back, report = open_model(path, photo_check=False)
    assert back.config is not None and back.config.tokenizer.pixel_dtype == pixel_dtype
    card = model_card(model, report, path=path, licence=None, library=None, usage="", whole=True)
    told = {
        None: "in [0, 1]; type",
        "uint16": "uint16 files; value / 65535",
        "float32": "float32 files; the value itself",
    }
    assert told[pixel_dtype] in card


def test_the_card_says_what_is_no_data(tmp_path: Path) -> None:
    FORMATS["safetensors"].write(tiny_model(**SQUARE, nodata="-9999").eval(), tmp_path, None)
    model, report = open_model(tmp_path, photo_check=False)
    card = model_card(model, report, path=tmp_path, licence=None, library=None, usage="", whole=True)
    assert "| no data | -9999" in card and "NaN in what the model is given |" in card


@pytest.mark.slow
@pytest.mark.parametrize("form", [*READ, "onnx", "torch-export"])
def test_a_fresh_process_reads_the_export(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    written(tmp_path, tiny_model(**SQUARE), licence="CC-BY-4.0")
    assert main(["export", "mine.safetensors", "--to", form, "--out", "out"]) == 0
    told = capsys.readouterr().out
    assert "differs by at most" in told and "Export in out; load it with:" in told
    proof = json.loads((tmp_path / "out" / "proof.json").read_text())
    assert proof["format"] == form and 0 <= proof["differences"]["tokens"] < TOLERANCE and proof["versions"]["torch"]
    assert "# " in (tmp_path / "out" / "README.md").read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine.safetensors", "out"]
    usage = told.strip().splitlines()[-1]
    scope: dict[str, Any] = {name: __import__(name) for name in ("timm", "transformers", "torch", "onnxruntime", "mae")}
    assert eval(usage, scope) is not None  # what is printed is what a user types
    assert main(["export", "mine.safetensors", "--to", form, "--out", "out"]) == 2
    assert "out exists and is not overwritten" in capsys.readouterr().err


def test_a_named_size_goes_out_as_it_is(tmp_path: Path) -> None:
    torch.manual_seed(0)  # benchmarks/exports.py does it with every one, and takes them in again
    model = create_model("mae_vit_tiny_patch16", **STATISTICS).eval()
    for form in ("timm", "hf-vitmae"):
        folder = tmp_path / form
        folder.mkdir()
        FORMATS[form].write(model, folder, None)
        inputs = export._inputs(model)
        for answer, found in READERS[form](folder, inputs).items():
            assert export._difference(found, model_outputs(model, inputs)[answer]) < TOLERANCE, answer


def without_biases(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    save_file(
        {n: torch.zeros_like(t) if "query.bias" in n else t for n, t in tensors.items()}, folder / "model.safetensors"
    )


def other_eps(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"layer_norm_eps": 1e-2}))


def no_json(folder: Path) -> None:
    (folder / "config.json").write_text("{")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (without_biases, "the hf-vit export differs from the model: tokens by"),
        (other_eps, "export differs from the model: tokens by"),
        (no_json, "cannot be loaded by its library"),
    ],
)
def test_an_export_that_answers_otherwise_is_never_left(
    damage: Callable[[Path], None], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    form = FORMATS["hf-vit"]

    def write(model: PretrainedEncoder, folder: Path, licence: str | None) -> None:
        form.write(model, folder, licence)
        damage(folder)

    monkeypatch.setattr(export, "FORMATS", {**FORMATS, "hf-vit": replace(form, write=write)})
    path = written(tmp_path, tiny_model(**SQUARE))
    with pytest.raises(MAEError, match=says):
        export_model(path, to="hf-vit", out=tmp_path / "out")
    assert [found.name for found in tmp_path.iterdir()] == ["mine.safetensors"]


def test_what_cannot_be_proved_is_not_exported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path, tiny_model(**SQUARE))
    with pytest.raises(UsageError, match="unknown export format 'tim'; did you mean timm"):
        export_model(path, to="tim", out=tmp_path / "out")
    monkeypatch.setattr(export, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match="--to timm needs timm: pip install timm"):
        export_model(path, to="timm", out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("form", ["timm", "official", "onnx", "torch-export"])  # each written by another library
def test_a_full_disk_is_said_and_nothing_is_left(form: str, disk: Path, tmp_path: Path) -> None:
    path = written(tmp_path, tiny_model(**SQUARE))
    (disk / "wall").write_bytes(bytes(disk_usage(disk).free - 20_000))
    with pytest.raises(MAEError, match=r"out cannot be written: .*No space left on device"):
        export_model(path, to=form, out=disk / "out")
    assert [found.name for found in disk.iterdir()] == ["wall"]


def test_an_encoder_alone_has_no_decoder_to_export(tmp_path: Path) -> None:
    model = tiny_model(**SQUARE)
    alone = PretrainedEncoder(encoder=model.encoder, config=model.config)
    with pytest.raises(UsageError, match="needs a decoder, which this model does not have"):
        FORMATS["hf-vitmae"].check(alone)
    FORMATS["official"].write(alone, tmp_path, None)
    back, _ = open_model(tmp_path / OFFICIAL_FILE)
    assert type(back) is PretrainedEncoder and isinstance(mae.load(tmp_path / OFFICIAL_FILE).encoder, nn.Module)


def test_card_holds_what_the_run_recorded_and_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    few_looks(monkeypatch)
    without_pictures(monkeypatch)
    words = (
        "pretrain builtin:digits --model mae_vit_lesson_patch4 --img-size 8 --patch-size 2 --mlp-ratio 0.5 --steps 2"
    )
    assert main([*words.split(), *"--batch-size 4 --out run --no-doctor --device cpu --workers 0".split()]) == 0
    told: dict[str, Any] = {
        "path": Path("run"),
        "licence": None,
        "library": "timm",
        "usage": "read(it)",
        "whole": False,
    }
    model, report = open_model(Path("run"))
    before = model_card(model, report, **told)
    assert "None are recorded" in before and "| images from | builtin:digits |" in before and "decoder" not in before
    assert (
        "| images seen | 8 in 2 steps |" in before
        and "license:" not in before
        and "Licence of the weights: unknown" in before
    )
    assert main("evaluate knn run --data builtin:digits --device cpu".split()) == 0
    record = json.loads((tmp_path / "run" / "evaluation" / "knn.json").read_text())
    after = model_card(model, report, **{**told, "whole": True, "licence": "CC-BY-4.0"})
    top1 = record["result"]["this model"]["mean"]["20"]["top1"]
    assert f"| knn, builtin:digits, mean 20 | top-1 {top1:.1%} |" in after and "| decoder | 128 wide" in after
    assert "license: cc-by-4.0\nlibrary_name: timm" in after
    other = create_model("mae_vit_lesson_patch4", **STATISTICS)
    assert "None are recorded" in model_card(other, report, **told)  # those of other weights are not its own
    hostile = model_card(model, report, **{**told, "licence": "MIT\nlibrary_name: evil | <b>"})
    assert "Licence of the weights: MIT library_name: evil \\| &lt;b>." in hostile
    assert "license: other\n" in hostile and "library_name: evil" not in hostile.split("# ")[0]


def results_told(path: Path, *, run: Path | None = None) -> list[str]:
    """The rows of the results in the card of a model's file, or of a run with these weights."""
    model, report = open_model(path)
    card = model_card(model, report, path=run or path, licence=None, library=None, usage="read(it)", whole=False)
    return [
        line for line in card.partition("## Results")[2].partition("##")[0].splitlines() if line.startswith("| fine")
    ]


def test_the_card_of_a_segmenter_tells_its_mean_iou(tmp_path: Path) -> None:
    data, start = drawn_masks(tmp_path / "masks", train=4, test=2), tmp_path / "start.safetensors"
    mae.save(tiny_model(img_size=16, in_chans=1, mean=(0.5,), std=(0.25,)), start)
    record = mae.evaluate("finetune_segmentation", start, data=data, out=tmp_path / "run", **SHORT)
    share = record.result["this model"]["mean_iou"]
    told = results_told(Path(record.result["training"]["folder"]) / "segmenter.safetensors")
    assert told == [f"| finetune_segmentation, masks, whole model | mean IoU {share:.1%} |"]


def test_the_card_of_a_detector_tells_its_precision_of_boxes_and_of_masks(tmp_path: Path) -> None:
    data, start = drawn_objects(tmp_path / "objects", train=2, test=2), tmp_path / "start.safetensors"
    for path in data.rglob("*.json"):
        path.write_text(path.read_text().replace('"disc"', '"ap"'))  # no class is taken for the number of that name
    mae.save(tiny_model(img_size=16, **STATISTICS), start)
    record = mae.evaluate("finetune_instances", start, data=data, out=tmp_path / "run", size=32, **SHORT)
    boxes, masks = (record.result["this model"][area]["ap"] for area in ("boxes", "masks"))
    assert results_told(Path(record.result["training"]["folder"]) / "detector.safetensors") == [
        f"| finetune_instances, objects, boxes | AP {boxes:.1%} |",
        f"| finetune_instances, objects, masks | AP {masks:.1%} |",
    ]


def test_the_card_tells_ways_of_fine_tuning_apart_and_leaves_training_from_scratch_out(tmp_path: Path) -> None:
    start, run = tmp_path / "start.safetensors", tmp_path / "run"
    mae.save(tiny_model(img_size=8, patch_size=4, **STATISTICS), start)
    few: dict[str, Any] = {"epochs": 0.01, "batch_size": 100, "warmup_epochs": 0, "augment": False}
    told: dict[str, Any] = {"data": "builtin:digits", "out": run, "device": "cpu", "quiet": True, **few}
    top1, last = (mae.evaluate("finetune", start, **told, **way).result["top1"] for way in ({}, {"blocks": 0}))
    scratch = mae.evaluate("finetune", start, from_scratch=True, **told).result
    assert sorted(results_told(start, run=run)) == [
        f"| finetune, builtin:digits, whole model | top-1 {top1:.1%} |",
        f"| finetune-blocks0, builtin:digits, whole model | top-1 {last:.1%} |",
    ]
    assert results_told(Path(scratch["training"]["folder"]) / "classifier.safetensors") == [
        f"| finetune-from-scratch, builtin:digits, whole model | top-1 {scratch['top1']:.1%} |"
    ]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="there processes are ended without being asked")
def test_an_export_that_is_told_to_end_leaves_nothing(tmp_path: Path) -> None:
    path, out = written(tmp_path, tiny_model(**SQUARE)), tmp_path / "folder" / "out"
    words = ["export", str(path), "--to", "timm", "--out", str(out)]
    started = subprocess.Popen([sys.executable, "-m", "mae", *words], stdout=subprocess.DEVNULL)
    until = time.monotonic() + 60
    while not (out.parent.exists() and any(out.parent.glob(".out.*/config.json"))) and time.monotonic() < until:
        time.sleep(0.02)
    started.send_signal(signal.SIGTERM)
    assert started.wait(timeout=60) == 75
    assert list(out.parent.iterdir()) == []


@pytest.mark.parametrize("name", ["timm", "hf-vit", "hf-vitmae", "official"])
def test_statistics_that_are_unknown_stay_so(name: str, tmp_path: Path):
    """Libraries need numbers, and 0 and 1 are written for them."""
    FORMATS[name].write(tiny_model(img_size=16, **{**STATISTICS, "mean": None, "std": None}).eval(), tmp_path, None)
    folder = tmp_path / OFFICIAL_FILE if name == "official" else tmp_path
    model, report = open_model(folder, photo_check=False)
    assert model.config is not None and model.config.tokenizer.mean is model.config.tokenizer.std is None
    assert "channel statistics are unknown" in report.notes
    given = WeightMetadata(mean=(0.1, 0.2, 0.3), std=(0.3, 0.2, 0.1))
    model, _ = load_external(folder, metadata=given, photo_check=False)
    assert model.config is not None and model.config.tokenizer.mean == (0.1, 0.2, 0.3)


@pytest.mark.parametrize(("size", "share"), [(16, 0.875), (256, 1.0)])
def test_timm_is_told_the_crop_that_the_model_is_evaluated_on(size: int, share: float, tmp_path: Path):
    model = tiny_model(img_size=size, patch_size=size // 2, **STATISTICS).eval()
    FORMATS["timm"].write(model, tmp_path, None)
    described = json.loads((tmp_path / "config.json").read_text())
    assert described["pretrained_cfg"]["crop_pct"] == share == preprocessing_of(model.config).crop_share


def test_a_library_is_loaded_without_the_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A file there that is called as a module of the standard library must not be run."""
    model = tiny_model(img_size=16, **STATISTICS).eval()
    (tmp_path / "queue.py").write_text("raise RuntimeError('a file of the working folder was imported')")
    monkeypatch.chdir(tmp_path)
    export_model(written(tmp_path, model), to="timm", out=tmp_path / "exported")
    assert (tmp_path / "exported" / "config.json").is_file()
