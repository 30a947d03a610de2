"""What the files beside foreign weights say of the model: heads, eps, sizes, target, statistics."""

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from mae import records
from mae.interop.official import Told
from mae.interop.reading import Foreign

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def told_beside(foreign: Foreign) -> Told:
    """What options, `config.json` and `preprocessor_config.json` tell; their values are checked one by one.

    Raises:
        UsageError: a value of the wrong kind.
    """
    parts = _of_options(foreign.options), _of_config(foreign.config), _of_preprocessing(foreign.preprocessing)
    there = {name: value for part in parts for name, value in part.items() if value is not None}
    return records.from_json(Told, there, what=f"entry beside {foreign.path}:")


def licence_beside(foreign: Foreign) -> str | None:
    """The terms that timm's `config.json` names."""
    described = foreign.config.get("pretrained_cfg")
    licence = described.get("license") if isinstance(described, dict) else None
    return licence if isinstance(licence, str) else None


def overridden(told: Told, by: Told) -> Told:
    """The first, with what the second says instead."""
    said = {field.name: getattr(by, field.name) for field in fields(by)}
    return replace(told, **{name: value for name, value in said.items() if value is not None})


def _of_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Of the official code's command line."""
    side = options.get("input_size")
    return {
        "norm_pix_loss": options.get("norm_pix_loss"),
        "mask_ratio": options.get("mask_ratio"),
        "trained_size": None if side is None else [side, side],
    }


def _of_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Of transformers' `config.json`, or of timm's."""
    if isinstance(arguments := config.get("pretrained_cfg"), dict):
        size = arguments.get("input_size")
        model = config.get("model_args") if isinstance(config.get("model_args"), dict) else {}
        heads = model.get("num_heads") if isinstance(model, dict) else None
        img_size = size[1:] if isinstance(size, list) else None
        return {
            "mean": arguments.get("mean"),
            "std": arguments.get("std"),
            "trained_size": img_size,
            "num_heads": heads,
        }
    side = config.get("image_size")
    return {
        "num_heads": config.get("num_attention_heads"),
        "decoder_num_heads": config.get("decoder_num_attention_heads"),
        "trained_size": [side, side] if isinstance(side, int) else side,
        "norm_pix_loss": config.get("norm_pix_loss"),
        "mask_ratio": config.get("mask_ratio"),
        "norm_eps": config.get("layer_norm_eps"),
        "qkv_bias": config.get("qkv_bias"),
    }


def _of_preprocessing(preprocessing: Mapping[str, Any]) -> dict[str, Any]:
    if preprocessing.get("do_normalize") is False:
        return {}
    return {"mean": preprocessing.get("image_mean"), "std": preprocessing.get("image_std")}
