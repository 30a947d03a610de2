"""Export formats: the models each can hold, what is written, and how it is loaded."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from mae.core.method import MethodConfig
from mae.errors import UsageError
from mae.interop.exports.graphs import (
    TRACED_BATCH,
    FeatureGraph,
    PredictionGraph,
    num_visible,
    write_by_memory,
    write_onnx,
    write_program,
)
from mae.interop.exports.naming import hf_tensors, official_tensors
from mae.interop.imports.sidecar import STATISTICS_UNKNOWN
from mae.models.classifier import Classifier, ImageClassifier
from mae.models.detector import Detector
from mae.models.file import model_metadata, save_model
from mae.models.fingerprint import output_fingerprint
from mae.models.masked_autoencoder import MaskedAutoencoder
from mae.models.preprocess import official_crop_share
from mae.models.pretrained import PretrainedEncoder
from mae.models.segmenter import Segmenter
from mae.records import write_json

_WEIGHTS = "model.safetensors"
OFFICIAL_FILE, ONNX_FILE, PROGRAM_FILE = "model.pth", "model.onnx", "model.pt2"
_BICUBIC = 3  # Pillow's number


@dataclass(frozen=True, kw_only=True)
class ExportFormat:
    """An export format.

    Attributes:
        name: as given to --to.
        needs: packages that write and load it, the library first; none for this package's own.
        check: refuses a model that the format cannot hold.
        write: writes a model into a folder; the last argument is the licence, if known.
        usage: Python that loads the folder.
        any_head: whether it holds every head that names classes, not only that of a fine-tuned encoder.
    """

    name: str
    needs: tuple[str, ...]
    check: Callable[[PretrainedEncoder], None]
    write: Callable[[PretrainedEncoder, Path, str | None], None]
    usage: Callable[[Path], str]
    any_head: bool = False


def _config_of(model: PretrainedEncoder) -> MethodConfig:
    assert model.config is not None  # it was loaded by one
    return model.config


def _without_decoder(model: PretrainedEncoder) -> PretrainedEncoder:
    if not isinstance(model, MaskedAutoencoder):
        return model
    return PretrainedEncoder(encoder=model.encoder, config=model.config)


def _statistics(config: MethodConfig) -> tuple[list[float], list[float]]:
    """Mean and std; 0 and 1 for a model without statistics."""
    if config.tokenizer.mean is None or config.tokenizer.std is None:
        return [0.0] * config.layout.channels, [1.0] * config.layout.channels
    return list(config.tokenizer.mean), list(config.tokenizer.std)


def _marked(config: MethodConfig) -> dict[str, bool]:
    """That the statistics written stand for unknown ones, for an import of this package."""
    return {STATISTICS_UNKNOWN: True} if config.tokenizer.mean is None else {}


def _check_encoder(config: MethodConfig, name: str) -> None:
    if (kind := config.encoder.kind) != "vit":
        raise UsageError(f"--to {name} holds only vision transformers, this model has encoder {kind}; use onnx")
    if config.tokenizer.nodata is not None:
        raise UsageError(f"--to {name} cannot hold a model of images with nodata: it would read nodata as values")


def _check_one_class_token(config: MethodConfig, name: str) -> None:
    if (count := config.encoder.num_prefix) != 1:
        option = f"--cls-tokens {count}" if count else "--no-cls-token"
        raise UsageError(f"--to {name} holds only models with one class token, this one is of {option}; use timm")


def check_timm(model: PretrainedEncoder) -> None:
    """timm's norms have an epsilon of 1e-6, whatever its configuration says."""
    config = _config_of(model)
    _check_encoder(config, "timm")
    if config.encoder.norm_eps != MethodConfig().encoder.norm_eps:
        raise UsageError(
            f"--to timm holds only norms with an epsilon of 1e-6, this model has {config.encoder.norm_eps:g}; use "
            "hf-vit"
        )


def write_timm(model: PretrainedEncoder, folder: Path, licence: str | None) -> None:
    """Write the encoder as a folder of timm's hub format.

    timm before 1.0.31 drops a first convolution of other than one or three channels where it is named.
    """
    config = _config_of(model)
    save_file(official_tensors(_without_decoder(model)), folder / _WEIGHTS, {"format": "pt"})
    mean, std = _statistics(config)
    classes, prefix = model.num_classes if isinstance(model, ImageClassifier) else 0, config.encoder.num_prefix
    sizes = {
        "img_size": list(config.layout.size),
        "patch_size": list(config.layout.patch),
        "in_chans": config.layout.channels,
        "embed_dim": config.encoder.embed_dim,
        "depth": config.encoder.depth,
        "num_heads": config.encoder.num_heads,
        "mlp_ratio": config.encoder.mlp_ratio,
        "class_token": config.encoder.cls_token,
        **({"reg_tokens": prefix - 1} if prefix > 1 else {}),
        "global_pool": "token" if prefix == 1 and not classes else "avg",  # timm has no mean of class tokens
        "fc_norm": bool(classes),
    }
    described: dict[str, Any] = {
        "architecture": "vit_base_patch16_224",  # model_args state the actual sizes
        "num_classes": classes,
        "num_features": config.encoder.embed_dim,
        "model_args": sizes,
        "pretrained_cfg": {
            "input_size": [config.layout.channels, *config.layout.size],
            "fixed_input_size": True,
            "interpolation": "bicubic",
            "crop_pct": official_crop_share(config.layout.size),
            "mean": mean,
            "std": std,
            "num_classes": classes,
            **({"first_conv": "patch_embed.proj"} if config.layout.channels in (1, 3) else {}),
            "classifier": "head",
        },
    }
    described |= _marked(config)
    if config.tokenizer.pixel_dtype is not None:  # timm ignores it
        described["pixel_dtype"] = config.tokenizer.pixel_dtype
    if isinstance(model, ImageClassifier) and model.class_names:
        described["label_names"] = list(model.class_names)
    if licence is not None:
        described["pretrained_cfg"]["license"] = licence
    write_json(folder / "config.json", described)


def _check_hf(model: PretrainedEncoder, name: str) -> MethodConfig:
    config = _config_of(model)
    _check_encoder(config, name)
    if isinstance(model, ImageClassifier):
        raise UsageError(
            f"--to {name} holds only classifiers on the class token, this one uses the mean token; use timm"
        )
    _check_one_class_token(config, name)
    return config


def _hf_config(config: MethodConfig) -> dict[str, Any]:
    """The entries that the configurations of ViT and ViTMAE share."""
    square = config.layout.size[0] == config.layout.size[1]
    return {
        "hidden_size": config.encoder.embed_dim,
        "num_hidden_layers": config.encoder.depth,
        "num_attention_heads": config.encoder.num_heads,
        "intermediate_size": int(config.encoder.embed_dim * config.encoder.mlp_ratio),
        "hidden_act": "gelu",
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "layer_norm_eps": config.encoder.norm_eps,
        "image_size": config.layout.size[0] if square else list(config.layout.size),
        "patch_size": config.layout.patch[0]
        if config.layout.patch[0] == config.layout.patch[1]
        else list(config.layout.patch),
        "num_channels": config.layout.channels,
        "qkv_bias": True,
        "dtype": "float32",
    }


def _write_preprocessing(config: MethodConfig, folder: Path, *, evaluated: bool = False) -> None:
    """Write transformers' description of the images a model is given.

    Args:
        config: the model's.
        folder: of the export.
        evaluated: describe the central crop that features are computed of, where it is square, for which transformers
            has a processor; otherwise images take the size's shape.
    """
    mean, std = _statistics(config)
    height, width = config.layout.size
    cropped = {
        "image_processor_type": "BitImageProcessor",
        "size": {"shortest_edge": int(height / official_crop_share(config.layout.size))},
        "do_center_crop": True,
        "crop_size": {"height": height, "width": width},
        "do_convert_rgb": config.layout.channels == 3,
    }
    squeezed = {"image_processor_type": "ViTImageProcessor", "size": {"height": height, "width": width}}
    described = {
        **(cropped if evaluated and height == width else squeezed),
        "do_resize": True,
        "resample": _BICUBIC,
        "do_rescale": config.tokenizer.pixel_dtype != "float32",
        "rescale_factor": 1 / 65535 if config.tokenizer.pixel_dtype == "uint16" else 1 / 255,
        "do_normalize": True,
        "image_mean": mean,
        "image_std": std,
        **_marked(config),
    }
    write_json(folder / "preprocessor_config.json", described)


def check_hf_vit(model: PretrainedEncoder) -> None:
    """ViT of transformers always has one class token."""
    _check_hf(model, "hf-vit")


def write_hf_vit(model: PretrainedEncoder, folder: Path, licence: str | None) -> None:
    """Write the encoder as `ViTModel` of transformers."""
    config = _config_of(model)
    tensors = hf_tensors(official_tensors(_without_decoder(model)), prefix="")
    save_file(tensors, folder / _WEIGHTS, {"format": "pt"})
    write_json(folder / "config.json", {"architectures": ["ViTModel"], "model_type": "vit", **_hf_config(config)})
    _write_preprocessing(config, folder, evaluated=True)


def check_hf_vitmae(model: PretrainedEncoder) -> None:
    """ViTMAE of transformers has the paper's decoder, and square images in square patches."""
    config = _check_hf(model, "hf-vitmae")
    if not isinstance(model, MaskedAutoencoder):
        raise UsageError("--to hf-vitmae needs a decoder, which this model does not have; use hf-vit")
    if (kind := config.decoder.kind) != "self":
        raise UsageError(f"--to hf-vitmae holds only the paper's decoder, this model has {kind}; use hf-vit")
    if config.loss.kind != "mse" or config.target.kind != "pixels":
        what = f"loss {config.loss.kind}" if config.target.kind == "pixels" else f"target {config.target.kind}"
        raise UsageError(
            f"--to hf-vitmae holds only the mean squared error of pixels, this model has {what}; use hf-vit"
        )
    if config.decoder.norm_eps != config.encoder.norm_eps:
        raise UsageError("--to hf-vitmae holds only one epsilon for all norms; use hf-vit")
    if len(set(config.layout.size)) > 1 or len(set(config.layout.patch)) > 1:
        raise UsageError("--to hf-vitmae holds only square images in square patches; use hf-vit")


def write_hf_vitmae(model: PretrainedEncoder, folder: Path, licence: str | None) -> None:
    """Write encoder and decoder as `ViTMAEForPreTraining` of transformers."""
    config = _config_of(model)
    save_file(hf_tensors(official_tensors(model), prefix="vit."), folder / _WEIGHTS, {"format": "pt"})
    described = {
        "architectures": ["ViTMAEForPreTraining"],
        "model_type": "vit_mae",
        **_hf_config(config),
        "decoder_hidden_size": config.decoder.embed_dim,
        "decoder_num_hidden_layers": config.decoder.depth,
        "decoder_num_attention_heads": config.decoder.num_heads,
        "decoder_intermediate_size": int(config.decoder.embed_dim * config.decoder.mlp_ratio),
        "mask_ratio": config.mask.ratio,
        "norm_pix_loss": config.target.norm,
    }
    write_json(folder / "config.json", described)
    _write_preprocessing(config, folder)


def check_official(model: PretrainedEncoder) -> None:
    """The official code has only the paper's models."""
    config = _config_of(model)
    _check_encoder(config, "official")
    parts = [config.encoder]
    if isinstance(model, MaskedAutoencoder):
        if (kind := config.decoder.kind) != "self":
            raise UsageError(f"--to official holds only the paper's decoder, this model has {kind}; use timm")
        if config.target.to_pixels is None:
            kind = config.target.kind
            raise UsageError(
                f"--to official holds only models that predict pixels, this one has target {kind}; use timm"
            )
        parts.append(config.decoder)
    _check_one_class_token(config, "official")
    if any(part.norm_eps != MethodConfig().encoder.norm_eps for part in parts):
        raise UsageError("--to official holds only norms with an epsilon of 1e-6; use hf-vit")


def write_official(model: PretrainedEncoder, folder: Path, licence: str | None) -> None:
    """Write what the official code loads with --finetune, and beside it sizes and statistics, which it ignores."""
    config = _config_of(model)
    tensors = {"model": official_tensors(model)}
    write_by_memory(folder / OFFICIAL_FILE, lambda held: torch.save(tensors, held))
    described: dict[str, Any] = {
        "image_size": list(config.layout.size),
        "num_attention_heads": config.encoder.num_heads,
    }
    if isinstance(model, MaskedAutoencoder):
        described |= {
            "decoder_num_attention_heads": config.decoder.num_heads,
            "mask_ratio": config.mask.ratio,
            "norm_pix_loss": getattr(config.target, "norm", False),
        }
    if isinstance(model, ImageClassifier) and model.class_names:
        described["label_names"] = list(model.class_names)
    write_json(folder / "config.json", described)
    _write_preprocessing(config, folder, evaluated=True)


def write_own(model: PretrainedEncoder, folder: Path, licence: str | None) -> None:
    """Write the model as a file of this package."""
    save_model(model, folder / _WEIGHTS, model_metadata(model, licence=licence, probe=output_fingerprint(model)))


def _example(config: MethodConfig) -> dict[str, Tensor]:
    return {"images": torch.zeros(TRACED_BATCH, config.layout.channels, *config.layout.size)}


def _facts(model: PretrainedEncoder, licence: str | None) -> dict[str, str]:
    """Metadata of a graph's file: normalisation of images or their size, their channels, class names, licence."""
    config = _config_of(model)
    mean, std = _statistics(config)
    facts = {"mean": json.dumps(mean), "std": json.dumps(std)}
    if isinstance(model, Detector):  # it normalises images itself
        facts = {"size": str(model.described.size)}
    if config.tokenizer.pixel_dtype is not None:
        facts["pixel_dtype"] = config.tokenizer.pixel_dtype
    if config.tokenizer.nodata is not None:  # which the graph expects as NaN
        facts["nodata"] = str(config.tokenizer.nodata)
    if config.tokenizer.channels is not None:
        facts["channels"] = json.dumps(config.tokenizer.channels)
    if isinstance(model, Classifier | Segmenter | Detector) and model.class_names:
        facts["class_names"] = json.dumps(model.class_names)
    return facts | ({} if licence is None else {"licence": licence})


def write_onnx_features(model: PretrainedEncoder, folder: Path, licence: str | None) -> None:
    """Write the encoder, or the model with its head, as an ONNX graph."""
    if isinstance(model, Detector):
        from mae.interop.exports.detection_graph import write_detector  # torchvision's detectors are slow to import

        write_detector(model, folder / ONNX_FILE, _facts(model, licence))
        return
    config = _config_of(model)
    write_onnx(FeatureGraph(_without_decoder(model)), _example(config), folder / ONNX_FILE, _facts(model, licence))
    _write_preprocessing(config, folder, evaluated=not isinstance(model, Segmenter))


def check_torch_export(model: PretrainedEncoder) -> None:
    """A detector's operators are those of torchvision, which such a file does not bring along."""
    if isinstance(model, Detector):
        raise UsageError("--to torch-export holds no detectors; use onnx or safetensors")


def check_onnx_mae(model: PretrainedEncoder) -> None:
    """The graph of the whole model needs a decoder."""
    if not isinstance(model, MaskedAutoencoder):
        raise UsageError("--to onnx-mae needs a decoder, which this model does not have; use onnx")


def write_onnx_predictions(model: PretrainedEncoder, folder: Path, licence: str | None) -> None:
    """Write encoder and decoder as an ONNX graph that predicts every patch."""
    assert isinstance(model, MaskedAutoencoder)
    config = _config_of(model)
    order = torch.arange(config.layout.num_tokens).expand(TRACED_BATCH, -1).contiguous()
    facts = _facts(model, licence) | {"visible": str(num_visible(model))}
    write_onnx(PredictionGraph(model), _example(config) | {"order": order}, folder / ONNX_FILE, facts)
    _write_preprocessing(config, folder)


def write_torch_export(model: PretrainedEncoder, folder: Path, licence: str | None) -> None:
    """Write the encoder, or the classifier, as a program of `torch.export`."""
    config = _config_of(model)
    write_program(FeatureGraph(_without_decoder(model)), _example(config), folder / PROGRAM_FILE)
    _write_preprocessing(config, folder, evaluated=not isinstance(model, Segmenter))


FORMATS: Mapping[str, ExportFormat] = {
    entry.name: entry
    for entry in (
        ExportFormat(
            name="timm",
            needs=("timm",),
            check=check_timm,
            write=write_timm,
            usage=lambda folder: f"timm.create_model({f'local-dir:{folder}'!r}, pretrained=True)",
        ),
        ExportFormat(
            name="hf-vit",
            needs=("transformers",),
            check=check_hf_vit,
            write=write_hf_vit,
            usage=lambda folder: f"transformers.ViTModel.from_pretrained({str(folder)!r}, add_pooling_layer=False)",
        ),
        ExportFormat(
            name="hf-vitmae",
            needs=("transformers",),
            check=check_hf_vitmae,
            write=write_hf_vitmae,
            usage=lambda folder: f"transformers.ViTMAEForPreTraining.from_pretrained({str(folder)!r})",
        ),
        ExportFormat(
            name="official",
            needs=(),
            check=check_official,
            write=write_official,
            usage=lambda folder: f"torch.load({str(folder / OFFICIAL_FILE)!r})['model']",
        ),
        ExportFormat(
            name="onnx",
            needs=("onnx", "onnxruntime", "onnxscript"),
            check=lambda model: None,
            write=write_onnx_features,
            usage=lambda folder: f"onnxruntime.InferenceSession({str(folder / ONNX_FILE)!r})",
            any_head=True,
        ),
        ExportFormat(
            name="onnx-mae",
            needs=("onnx", "onnxruntime", "onnxscript"),
            check=check_onnx_mae,
            write=write_onnx_predictions,
            usage=lambda folder: f"onnxruntime.InferenceSession({str(folder / ONNX_FILE)!r})",
        ),
        ExportFormat(
            name="torch-export",
            needs=("torch",),
            check=check_torch_export,
            write=write_torch_export,
            usage=lambda folder: f"torch.export.load({str(folder / PROGRAM_FILE)!r}).module()",
            any_head=True,
        ),
        ExportFormat(
            name="safetensors",
            needs=(),
            check=lambda model: None,
            write=write_own,
            usage=lambda folder: f"mae.load({str(folder)!r})",
            any_head=True,
        ),
    )
}
"""By name."""
