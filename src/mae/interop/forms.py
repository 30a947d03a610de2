"""How each library wants a model: what it can hold, what is written, and how it is read."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from mae.errors import UsageError
from mae.interop.graphs import (
    TRACED_BATCH,
    FeatureGraph,
    PredictionGraph,
    num_visible,
    write_by_memory,
    write_onnx,
    write_program,
)
from mae.interop.outgoing import hf_tensors, official_tensors
from mae.models.classifier import ImageClassifier
from mae.models.config import ModelConfig
from mae.models.masked_autoencoder import MaskedAutoencoder
from mae.models.pretrained import PretrainedEncoder
from mae.models.probe import probe_of
from mae.models.storage import model_metadata, save_model
from mae.records import write_json

_WEIGHTS = "model.safetensors"
OFFICIAL_FILE, ONNX_FILE, PROGRAM_FILE = "model.pth", "model.onnx", "model.pt2"
_BICUBIC = 3  # Pillow's number


@dataclass(frozen=True, kw_only=True)
class Form:
    """A form to export to.

    Attributes:
        name: what the user calls it.
        needs: packages that write and read it, the library first; none for this package's own.
        check: refuses a model that it cannot hold.
        write: writes a model into a folder; the last argument is the licence, where one is known.
        usage: Python that reads the folder.
    """

    name: str
    needs: tuple[str, ...]
    check: Callable[[PretrainedEncoder], None]
    write: Callable[[PretrainedEncoder, Path, str | None], None]
    usage: Callable[[Path], str]


def _config_of(model: PretrainedEncoder) -> ModelConfig:
    assert model.config is not None  # it was loaded by one
    return model.config


def _without_decoder(model: PretrainedEncoder) -> PretrainedEncoder:
    if not isinstance(model, MaskedAutoencoder):
        return model
    return PretrainedEncoder(encoder=model.encoder, config=model.config)


def _statistics(config: ModelConfig) -> tuple[list[float], list[float]]:
    """Means and deviations; of a model that does not say them those by which pixels stay what they are."""
    if config.mean is None or config.std is None:
        return [0.0] * config.in_chans, [1.0] * config.in_chans
    return list(config.mean), list(config.std)


def _check_gaps(config: ModelConfig, name: str) -> None:
    if config.no_data is not None:
        raise UsageError(f"--to {name} holds no model of images with gaps: it would read them as values")


def check_timm(model: PretrainedEncoder) -> None:
    """timm's norms have an eps of 1e-6, whatever its configuration says."""
    config = _config_of(model)
    _check_gaps(config, "timm")
    if config.norm_eps != ModelConfig().norm_eps:
        raise UsageError(f"--to timm: its norms have an eps of 1e-6, this model's {config.norm_eps:g}; use hf-vit")


def write_timm(model: PretrainedEncoder, folder: Path, licence: str | None) -> None:
    """The encoder as timm's hub folders hold one."""
    config = _config_of(model)
    save_file(official_tensors(_without_decoder(model)), folder / _WEIGHTS, {"format": "pt"})
    mean, std = _statistics(config)
    classes = model.num_classes if isinstance(model, ImageClassifier) else 0
    sizes = {
        "img_size": list(config.img_size),
        "patch_size": list(config.patch_size),
        "in_chans": config.in_chans,
        "embed_dim": config.embed_dim,
        "depth": config.depth,
        "num_heads": config.num_heads,
        "mlp_ratio": config.mlp_ratio,
        "class_token": config.cls_token,
        "global_pool": "avg" if classes or not config.cls_token else "token",
        "fc_norm": bool(classes),
    }
    described: dict[str, Any] = {
        "architecture": "vit_base_patch16_224",  # the arguments say which sizes it really has
        "num_classes": classes,
        "num_features": config.embed_dim,
        "model_args": sizes,
        "pretrained_cfg": {
            "input_size": [config.in_chans, *config.img_size],
            "fixed_input_size": True,
            "interpolation": "bicubic",
            "crop_pct": 0.875,
            "mean": mean,
            "std": std,
            "num_classes": classes,
            "first_conv": "patch_embed.proj",
            "classifier": "head",
        },
    }
    if config.pixel_dtype is not None:  # timm passes it over
        described["pixel_dtype"] = config.pixel_dtype
    if isinstance(model, ImageClassifier) and model.class_names:
        described["label_names"] = list(model.class_names)
    if licence is not None:
        described["pretrained_cfg"]["license"] = licence
    write_json(folder / "config.json", described)


def _check_hf(model: PretrainedEncoder, name: str) -> ModelConfig:
    config = _config_of(model)
    _check_gaps(config, name)
    if isinstance(model, ImageClassifier):
        raise UsageError(f"--to {name} holds classifiers of the class token, and this is one of the mean: use timm")
    if not config.cls_token:
        raise UsageError(f"--to {name} holds models with a class token alone; this one has none: use timm")
    return config


def _hf_config(config: ModelConfig) -> dict[str, Any]:
    """What the configurations of transformers' ViT and ViTMAE share."""
    square = config.img_size[0] == config.img_size[1]
    return {
        "hidden_size": config.embed_dim,
        "num_hidden_layers": config.depth,
        "num_attention_heads": config.num_heads,
        "intermediate_size": int(config.embed_dim * config.mlp_ratio),
        "hidden_act": "gelu",
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "layer_norm_eps": config.norm_eps,
        "image_size": config.img_size[0] if square else list(config.img_size),
        "patch_size": config.patch_size[0] if config.patch_size[0] == config.patch_size[1] else list(config.patch_size),
        "num_channels": config.in_chans,
        "qkv_bias": True,
        "dtype": "float32",
    }


def _write_preprocessing(config: ModelConfig, folder: Path) -> None:
    mean, std = _statistics(config)
    described = {
        "image_processor_type": "ViTImageProcessor",
        "do_resize": True,
        "size": {"height": config.img_size[0], "width": config.img_size[1]},
        "resample": _BICUBIC,
        "do_rescale": config.pixel_dtype != "float32",
        "rescale_factor": 1 / 65535 if config.pixel_dtype == "uint16" else 1 / 255,
        "do_normalize": True,
        "image_mean": mean,
        "image_std": std,
    }
    write_json(folder / "preprocessor_config.json", described)


def check_hf_vit(model: PretrainedEncoder) -> None:
    """transformers' ViT always has a class token."""
    _check_hf(model, "hf-vit")


def write_hf_vit(model: PretrainedEncoder, folder: Path, licence: str | None) -> None:
    """The encoder as transformers' `ViTModel`."""
    config = _config_of(model)
    tensors = hf_tensors(official_tensors(_without_decoder(model)), prefix="")
    save_file(tensors, folder / _WEIGHTS, {"format": "pt"})
    write_json(folder / "config.json", {"architectures": ["ViTModel"], "model_type": "vit", **_hf_config(config)})
    _write_preprocessing(config, folder)


def check_hf_vitmae(model: PretrainedEncoder) -> None:
    """transformers' ViTMAE has the paper's decoder, and square images in square patches."""
    config = _check_hf(model, "hf-vitmae")
    if not isinstance(model, MaskedAutoencoder):
        raise UsageError("--to hf-vitmae holds a decoder, which this model has not; use hf-vit")
    if config.decoder != "self":
        raise UsageError(
            f"--to hf-vitmae holds the paper's decoder alone, and this is decoder {config.decoder}; use hf-vit"
        )
    if config.loss != "mse" or config.low_pass is not None:
        what = f"loss {config.loss}" if config.low_pass is None else "a low-pass target"
        raise UsageError(f"--to hf-vitmae judges by the squared error of pixels, this model by {what}; use hf-vit")
    if len(set(config.img_size)) > 1 or len(set(config.patch_size)) > 1:
        raise UsageError("--to hf-vitmae holds square images in square patches alone; use hf-vit")


def write_hf_vitmae(model: PretrainedEncoder, folder: Path, licence: str | None) -> None:
    """Encoder and decoder as transformers' `ViTMAEForPreTraining`."""
    config = _config_of(model)
    save_file(hf_tensors(official_tensors(model), prefix="vit."), folder / _WEIGHTS, {"format": "pt"})
    described = {
        "architectures": ["ViTMAEForPreTraining"],
        "model_type": "vit_mae",
        **_hf_config(config),
        "decoder_hidden_size": config.decoder_embed_dim,
        "decoder_num_hidden_layers": config.decoder_depth,
        "decoder_num_attention_heads": config.decoder_num_heads,
        "decoder_intermediate_size": int(config.decoder_embed_dim * config.mlp_ratio),
        "mask_ratio": config.mask_ratio,
        "norm_pix_loss": config.norm_pix_loss,
    }
    write_json(folder / "config.json", described)
    _write_preprocessing(config, folder)


def check_official(model: PretrainedEncoder) -> None:
    """The official code knows the paper's models alone."""
    config = _config_of(model)
    _check_gaps(config, "official")
    if not config.cls_token or config.norm_eps != ModelConfig().norm_eps:
        raise UsageError("--to official holds models with a class token and an eps of 1e-6 in their norms; use timm")
    if isinstance(model, MaskedAutoencoder) and config.decoder != "self":
        raise UsageError(
            f"--to official holds the paper's decoder alone, and this is decoder {config.decoder}; use timm"
        )


def write_official(model: PretrainedEncoder, folder: Path, licence: str | None) -> None:
    """What the official code reads with --finetune; sizes and statistics, which it does not read, lie beside it."""
    config = _config_of(model)
    tensors = {"model": official_tensors(model)}
    write_by_memory(folder / OFFICIAL_FILE, lambda held: torch.save(tensors, held))
    told: dict[str, Any] = {
        "image_size": list(config.img_size),
        "num_attention_heads": config.num_heads,
        "decoder_num_attention_heads": config.decoder_num_heads,
        "mask_ratio": config.mask_ratio,
        "norm_pix_loss": config.norm_pix_loss,
    }
    if isinstance(model, ImageClassifier) and model.class_names:
        told["label_names"] = list(model.class_names)
    write_json(folder / "config.json", told)
    _write_preprocessing(config, folder)


def write_own(model: PretrainedEncoder, folder: Path, licence: str | None) -> None:
    """The model as a file of this package."""
    save_model(model, folder / _WEIGHTS, model_metadata(model, licence=licence, probe=probe_of(model)))


def _example(config: ModelConfig) -> dict[str, Tensor]:
    return {"images": torch.zeros(TRACED_BATCH, config.in_chans, *config.img_size)}


def _facts(model: PretrainedEncoder, licence: str | None) -> dict[str, str]:
    """What a graph's file says of itself: how images are normalised, the names of classes, its terms."""
    config = _config_of(model)
    mean, std = _statistics(config)
    facts = {"mean": json.dumps(mean), "std": json.dumps(std)}
    if config.pixel_dtype is not None:
        facts["pixel_dtype"] = config.pixel_dtype
    if isinstance(model, ImageClassifier) and model.class_names:
        facts["class_names"] = json.dumps(model.class_names)
    return facts | ({} if licence is None else {"licence": licence})


def write_onnx_features(model: PretrainedEncoder, folder: Path, licence: str | None) -> None:
    """The encoder, or the classifier, as an ONNX graph."""
    config = _config_of(model)
    write_onnx(FeatureGraph(_without_decoder(model)), _example(config), folder / ONNX_FILE, _facts(model, licence))
    _write_preprocessing(config, folder)


def check_onnx_mae(model: PretrainedEncoder) -> None:
    """A graph of the whole needs a decoder."""
    if not isinstance(model, MaskedAutoencoder):
        raise UsageError("--to onnx-mae holds a decoder, which this model has not; use onnx")


def write_onnx_predictions(model: PretrainedEncoder, folder: Path, licence: str | None) -> None:
    """Encoder and decoder as an ONNX graph that predicts every patch."""
    assert isinstance(model, MaskedAutoencoder)
    config = _config_of(model)
    order = torch.arange(config.num_tokens).expand(TRACED_BATCH, -1).contiguous()
    facts = _facts(model, licence) | {"visible": str(num_visible(config.mask_ratio, config.num_tokens))}
    write_onnx(PredictionGraph(model), _example(config) | {"order": order}, folder / ONNX_FILE, facts)
    _write_preprocessing(config, folder)


def write_torch_export(model: PretrainedEncoder, folder: Path, licence: str | None) -> None:
    """The encoder, or the classifier, as a program of `torch.export`."""
    config = _config_of(model)
    write_program(FeatureGraph(_without_decoder(model)), _example(config), folder / PROGRAM_FILE)
    _write_preprocessing(config, folder)


FORMS: Mapping[str, Form] = {
    form.name: form
    for form in (
        Form(
            name="timm",
            needs=("timm",),
            check=check_timm,
            write=write_timm,
            usage=lambda folder: f"timm.create_model({f'local-dir:{folder}'!r}, pretrained=True)",
        ),
        Form(
            name="hf-vit",
            needs=("transformers",),
            check=check_hf_vit,
            write=write_hf_vit,
            usage=lambda folder: f"transformers.ViTModel.from_pretrained({str(folder)!r}, add_pooling_layer=False)",
        ),
        Form(
            name="hf-vitmae",
            needs=("transformers",),
            check=check_hf_vitmae,
            write=write_hf_vitmae,
            usage=lambda folder: f"transformers.ViTMAEForPreTraining.from_pretrained({str(folder)!r})",
        ),
        Form(
            name="official",
            needs=(),
            check=check_official,
            write=write_official,
            usage=lambda folder: f"torch.load({str(folder / OFFICIAL_FILE)!r})['model']",
        ),
        Form(
            name="onnx",
            needs=("onnx", "onnxruntime", "onnxscript"),
            check=lambda model: None,
            write=write_onnx_features,
            usage=lambda folder: f"onnxruntime.InferenceSession({str(folder / ONNX_FILE)!r})",
        ),
        Form(
            name="onnx-mae",
            needs=("onnx", "onnxruntime", "onnxscript"),
            check=check_onnx_mae,
            write=write_onnx_predictions,
            usage=lambda folder: f"onnxruntime.InferenceSession({str(folder / ONNX_FILE)!r})",
        ),
        Form(
            name="torch-export",
            needs=("torch",),
            check=lambda model: None,
            write=write_torch_export,
            usage=lambda folder: f"torch.export.load({str(folder / PROGRAM_FILE)!r}).module()",
        ),
        Form(
            name="safetensors",
            needs=(),
            check=lambda model: None,
            write=write_own,
            usage=lambda folder: f"mae.load({str(folder)!r})",
        ),
    )
}
"""By name."""
