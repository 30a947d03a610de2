"""Metadata from the files beside external weights: heads, epsilon, sizes, target, statistics."""

import re
from collections.abc import Mapping
from dataclasses import fields, replace
from importlib.util import find_spec
from typing import Any

from mae import records
from mae.errors import UsageError
from mae.interop.imports.convert import WeightMetadata
from mae.interop.imports.reading import ExternalWeights

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
STATISTICS_UNKNOWN = "statistics_unknown"
"""An entry that exports write where mean and std stand for unknown ones; other libraries ignore it."""


def sidecar_metadata(external: ExternalWeights) -> WeightMetadata:
    """What the options, `config.json` and `preprocessor_config.json` state; each value is checked.

    Raises:
        UsageError: a value of the wrong kind.
    """
    # The file's own options take precedence over files that happen to be beside it.
    parts = _from_config(external.config), _from_preprocessing(external.preprocessing), _from_options(external.options)
    stated = {name: value for part in parts for name, value in part.items() if value is not None}
    return records.from_json(WeightMetadata, stated, what=f"entry beside {external.path}:")


def check_sidecar(external: ExternalWeights) -> None:
    """Refuse a model whose configuration names an architecture that tensor names do not reveal and this package lacks.

    Raises:
        UsageError: another kind of model, another activation, or timm options that change the architecture.
    """
    config = external.config
    if "pretrained_cfg" in config:
        arguments = config.get("model_args")
        strange = sorted((arguments if isinstance(arguments, dict) else {}).keys() - _TIMM_ARGUMENTS)
        if not str(config.get("architecture")).startswith("vit_") or strange:
            what = f"with {records.shown(strange[0])}" if strange else records.shown(config.get("architecture"))
            raise UsageError(f"{external.path} is timm's {what}; expected a plain vision transformer (vit_*)")
        if not _PLAIN.match(str(config.get("architecture"))) and find_spec("timm") is None:
            named = records.shown(config["architecture"])
            raise UsageError(f"{external.path} is timm's {named}, which only timm can build: pip install timm")
    elif config:
        if "quantization_config" in config:
            raise UsageError(f"{external.path} is quantised; expected floating-point weights")
        for name, known in _HF_KNOWN.items():
            if (value := config.get(name, known[0])) not in known:
                raise UsageError(
                    f"{external.path}: {name} is {records.shown(value)}; expected {' or '.join(map(repr, known))}"
                )


def check_pooling(external: ExternalWeights) -> None:
    """Refuse a classifier of timm's whose configuration names another pooling than the mean of the patch tokens.

    No tensor tells what its head is given.

    Raises:
        UsageError: the class token, a maximum, or a mean of class and patch tokens.
    """
    arguments = external.config.get("model_args")
    own = arguments if isinstance(arguments, dict) else {}
    pooling = own.get("global_pool", external.config.get("global_pool", "avg"))
    if pooling != "avg" or own.get("pool_include_prefix", False):
        stated = f"global_pool {records.shown(pooling)}" if pooling != "avg" else "pool_include_prefix"
        raise UsageError(
            f"{external.path} is timm's classifier with {stated}; expected one on the mean of the patch tokens "
            "(global_pool 'avg'), the only one that this package has"
        )


_PLAIN = re.compile(r"vit_(tiny|small|base|large|huge)_patch\d+_\d+$")
"""The vision transformers of timm that have the usual heads and activation."""
_TIMM_ARGUMENTS = {
    "img_size", "patch_size", "in_chans", "embed_dim", "depth", "num_heads", "mlp_ratio", "class_token", "global_pool",
    "fc_norm", "num_classes", "no_embed_class", "drop_rate", "drop_path_rate", "proj_drop_rate", "attn_drop_rate",
    "pos_drop_rate", "patch_drop_rate", "dynamic_img_size", "weight_init", "qkv_bias", "pool_include_prefix",
    "init_values",
}  # fmt: skip
"""Arguments that do not change the encoder's outputs, or that its tensors reveal."""
_LONGEST_LICENCE = 1000
_HF_KNOWN = {"model_type": ("vit_mae", "vit", "dinov2"), "hidden_act": ("gelu",), "use_swiglu_ffn": (False,)}


def sidecar_licence(external: ExternalWeights) -> str | None:
    """The licence that timm's `config.json` names, in one line.

    Raises:
        UsageError: too long for a name.
    """
    described = external.config.get("pretrained_cfg")
    licence = described.get("license") if isinstance(described, dict) else None
    if not isinstance(licence, str):
        return None
    if len(licence) > _LONGEST_LICENCE:
        raise UsageError(
            f"{external.path}: license in config.json has {len(licence):,} characters; expected a licence's name of "
            f"at most {_LONGEST_LICENCE:,}"
        )
    return " ".join(licence.split())


def merged(metadata: WeightMetadata, override: WeightMetadata) -> WeightMetadata:
    """`metadata` with every value that `override` states."""
    stated = {field.name: getattr(override, field.name) for field in fields(override)}
    return replace(metadata, **{name: value for name, value in stated.items() if value is not None})


def _from_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """From the official code's command line, which may hold anything: only numbers are taken."""
    names = ("norm_pix_loss", "mask_ratio", "input_size")
    plain = {name: options[name] for name in names if type(options.get(name)) in (bool, int, float)}
    side = plain.pop("input_size", None)
    return plain | ({} if side is None else {"trained_size": [side, side]})


def _from_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """From the `config.json` of transformers or of timm."""
    if isinstance(arguments := config.get("pretrained_cfg"), dict):
        size = arguments.get("input_size")
        model = config.get("model_args")
        own = model if isinstance(model, dict) else {}
        usual = size[1:] if isinstance(size, list) else None
        unknown = config.get(STATISTICS_UNKNOWN)
        return {
            "mean": None if unknown is True else arguments.get("mean"),
            "std": None if unknown is True else arguments.get("std"),
            STATISTICS_UNKNOWN: unknown,
            "pixel_dtype": config.get("pixel_dtype"),
            "trained_size": _both_sides(own.get("img_size") or usual),  # timm before 1.0.31 leaves input_size as usual
            "num_heads": own.get("num_heads"),
            "qkv_bias": own.get("qkv_bias"),
            "class_names": config.get("label_names", arguments.get("label_names")),
        }
    return {
        "num_heads": config.get("num_attention_heads"),
        "decoder_num_heads": config.get("decoder_num_attention_heads"),
        "trained_size": _both_sides(config.get("image_size")),
        "norm_pix_loss": config.get("norm_pix_loss"),
        "mask_ratio": config.get("mask_ratio"),
        "norm_eps": config.get("layer_norm_eps"),
        "qkv_bias": config.get("qkv_bias"),
        "class_names": config.get("label_names"),
    }


def _both_sides(size: Any) -> Any:
    """Height and width where one number stands for both; anything else as it is, to be checked."""
    return [size, size] if isinstance(size, int) else size


def _from_preprocessing(preprocessing: Mapping[str, Any]) -> dict[str, Any]:
    if (unknown := preprocessing.get(STATISTICS_UNKNOWN)) is True:
        return {STATISTICS_UNKNOWN: unknown, "pixel_dtype": _pixel_dtype(preprocessing)}
    mean, std = preprocessing.get("image_mean"), preprocessing.get("image_std")
    if preprocessing.get("do_normalize") is False:
        channels = len(mean) if isinstance(mean, list) else 3
        mean, std = [0.0] * channels, [1.0] * channels
    return {"mean": mean, "std": std, "pixel_dtype": _pixel_dtype(preprocessing)}


def _pixel_dtype(preprocessing: Mapping[str, Any]) -> str | None:
    """What transformers scales to [0, 1]; None: it does not say, or 8 bits, which scale so everywhere.

    Raises:
        UsageError: scaled to another range.
    """
    if preprocessing.get("do_rescale") is False:
        return "float32"
    factor = preprocessing.get("rescale_factor")
    if factor == 1 / 65535:
        return "uint16"
    if factor not in (None, 1 / 255):
        raise UsageError(
            f"rescale_factor in preprocessor_config.json is {records.shown(factor)}; expected 1/255 or 1/65535: give "
            "image_mean and image_std there for values in [0, 1], and leave the factor out"
        )
    return None
