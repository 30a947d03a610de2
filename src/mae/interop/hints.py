"""What the files beside foreign weights say of the model: heads, eps, sizes, target, statistics."""

import re
from collections.abc import Mapping
from dataclasses import fields, replace
from importlib.util import find_spec
from typing import Any

from mae import records
from mae.errors import UsageError
from mae.interop.official import Told
from mae.interop.reading import Foreign

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def told_beside(foreign: Foreign) -> Told:
    """What options, `config.json` and `preprocessor_config.json` tell; their values are checked one by one.

    Raises:
        UsageError: a value of the wrong kind.
    """
    # What the file itself says counts before what happens to lie beside it.
    parts = _of_config(foreign.config), _of_preprocessing(foreign.preprocessing), _of_options(foreign.options)
    there = {name: value for part in parts for name, value in part.items() if value is not None}
    return records.from_json(Told, there, what=f"entry beside {foreign.path}:")


def check_described(foreign: Foreign) -> None:
    """Refuse a model whose configuration names mathematics that this package has not, and names do not show.

    Raises:
        UsageError: another kind of model, another activation, or options of timm's that change it.
    """
    config = foreign.config
    if "pretrained_cfg" in config:
        arguments = config.get("model_args")
        strange = sorted((arguments if isinstance(arguments, dict) else {}).keys() - _TIMM_ARGUMENTS)
        if not str(config.get("architecture")).startswith("vit_") or strange:
            what = f"with {records.shown(strange[0])}" if strange else records.shown(config.get("architecture"))
            raise UsageError(f"{foreign.path} is timm's {what}; expected a plain vision transformer (vit_*)")
        if not _PLAIN.match(str(config.get("architecture"))) and find_spec("timm") is None:
            named = records.shown(config["architecture"])
            raise UsageError(f"{foreign.path} is timm's {named}, which timm alone knows: pip install timm")
    elif config:
        if "quantization_config" in config:
            raise UsageError(f"{foreign.path} is quantised; expected weights of floating point")
        for name, known in _HF_KNOWN.items():
            if (value := config.get(name, known[0])) not in known:
                raise UsageError(
                    f"{foreign.path}: {name} is {records.shown(value)}; expected {' or '.join(map(repr, known))}"
                )


_PLAIN = re.compile(r"vit_(tiny|small|base|large|huge)_patch\d+_\d+$")
"""Of timm's vision transformers those with the usual heads and activation."""
_TIMM_ARGUMENTS = {
    "img_size", "patch_size", "in_chans", "embed_dim", "depth", "num_heads", "mlp_ratio", "class_token", "global_pool",
    "fc_norm", "num_classes", "no_embed_class", "drop_rate", "drop_path_rate", "proj_drop_rate", "attn_drop_rate",
    "pos_drop_rate", "patch_drop_rate", "dynamic_img_size", "weight_init", "qkv_bias", "pool_include_prefix",
}  # fmt: skip
"""Arguments that change no number of the encoder, or that its tensors show."""
_LONGEST_LICENCE = 1000
_HF_KNOWN = {"model_type": ("vit_mae", "vit"), "hidden_act": ("gelu",)}


def licence_beside(foreign: Foreign) -> str | None:
    """The terms that timm's `config.json` names, in one line.

    Raises:
        UsageError: they are too long for a name.
    """
    described = foreign.config.get("pretrained_cfg")
    licence = described.get("license") if isinstance(described, dict) else None
    if not isinstance(licence, str):
        return None
    if len(licence) > _LONGEST_LICENCE:
        raise UsageError(
            f"{foreign.path}: license in config.json has {len(licence):,} letters; expected the name of one, at most "
            f"{_LONGEST_LICENCE:,} letters"
        )
    return " ".join(licence.split())


def overridden(told: Told, by: Told) -> Told:
    """The first, with what the second says instead."""
    said = {field.name: getattr(by, field.name) for field in fields(by)}
    return replace(told, **{name: value for name, value in said.items() if value is not None})


def _of_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Of the official code's command line; it may hold anything, so numbers alone are taken."""
    names = ("norm_pix_loss", "mask_ratio", "input_size")
    plain = {name: options[name] for name in names if type(options.get(name)) in (bool, int, float)}
    side = plain.pop("input_size", None)
    return plain | ({} if side is None else {"trained_size": [side, side]})


def _of_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Of transformers' `config.json`, or of timm's."""
    if isinstance(arguments := config.get("pretrained_cfg"), dict):
        size = arguments.get("input_size")
        model = config.get("model_args")
        own = model if isinstance(model, dict) else {}
        img_size = size[1:] if isinstance(size, list) else None
        return {
            "mean": arguments.get("mean"),
            "std": arguments.get("std"),
            "pixel_dtype": config.get("pixel_dtype"),
            "trained_size": img_size,
            "num_heads": own.get("num_heads"),
            "qkv_bias": own.get("qkv_bias"),
            "class_names": config.get("label_names", arguments.get("label_names")),
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
        "class_names": config.get("label_names"),
    }


def _of_preprocessing(preprocessing: Mapping[str, Any]) -> dict[str, Any]:
    if preprocessing.get("do_normalize") is False:
        return {}
    factor = preprocessing.get("rescale_factor")
    pixel_dtype = "uint16" if factor == 1 / 65535 else None
    return {
        "mean": preprocessing.get("image_mean"),
        "std": preprocessing.get("image_std"),
        "pixel_dtype": "float32" if preprocessing.get("do_rescale") is False else pixel_dtype,
    }
