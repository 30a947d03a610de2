"""Other projects' models as extractors: timm and Hugging Face, each with its own preprocessing.

Neither package is needed by `mae`; they are imported when a model of theirs is asked for. Weights are read from
safetensors alone, and no code comes out of a model's repository.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from importlib import import_module
from math import ceil, floor, prod
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from mae.errors import MAEError, UsageError
from mae.evaluation.extractors.extractor import PATCHES, Blocks, Extractor, weights_digest
from mae.models.preprocess import Preprocessing

_WEIGHTS = "model.safetensors"  # what both hubs call them
_CONVNEXT_WHOLE = 384  # from this side on the processor of ConvNeXt leaves nothing out


def timm_extractor(name: str, *, device: torch.device) -> Extractor:
    """A pre-trained timm model, its images made as its own configuration says.

    `pooled` is timm's own feature, what its classifier would be given (`forward_head(pre_logits=True)`). A
    transformer's class token and patch tokens come as `cls`, `mean` and `patches`, after its final norm; of a
    convolutional net the cells of the last feature map are the patches.

    Args:
        name: a name of timm's with pre-trained weights, `hf-hub:NAME`, or `local-dir:FOLDER`.
        device: where it computes.

    Raises:
        UsageError: timm is not installed, knows no such model, or there are no weights of it as safetensors.
        MAEError: its weights cannot be had.
    """
    return wrap_timm(load_timm(name).to(device), name=f"timm:{name}")


def load_timm(name: str) -> Any:
    """A pre-trained timm model without its head, on the CPU; see `timm_extractor`.

    Raises:
        UsageError: see `timm_extractor`.
        MAEError: see `timm_extractor`.
    """
    timm = package("timm")
    source = _safe_source(timm, name)
    try:
        with torch.random.fork_rng(devices=[]):  # it draws weights before it loads them
            return timm.create_model(name, pretrained=True, num_classes=0, pretrained_cfg_overlay=source)
    except Exception as error:  # timm, the hub and the file raise errors of many kinds
        raise MAEError(f"timm:{name} cannot be loaded: {first_line(error)}") from error


def _safe_source(timm: Any, name: str) -> dict[str, str]:
    """What makes timm read the safetensors file and no other, since it would fall back to a pickle.

    Raises:
        UsageError: there is no such model, or no such file.
    """
    kind, _, place = name.partition(":")
    if kind == "local-dir":
        if not (Path(place) / _WEIGHTS).is_file():  # where there is one timm prefers it
            raise UsageError(
                f"timm:{name}: {place} holds no {_WEIGHTS}; expected a folder that "
                "'timm.models.save_for_hf(model, folder, safe_serialization=True)' wrote"
            )
        return {}
    if not place:
        try:
            known = bool(timm.get_pretrained_cfg(name, allow_unregistered=False).hf_hub_id)
        except RuntimeError:
            known = False
        if not known:
            near = get_close_matches(name, timm.list_pretrained(), n=3, cutoff=0.5)
            hint = f"did you mean {' or '.join(near)}?" if near else "'timm.list_pretrained()' names those there are"
            raise UsageError(f"timm:{name}: timm has no such model with weights as safetensors; {hint}")
    return {"source": "hf-hub", "hf_hub_filename": _WEIGHTS}


def wrap_timm(model: Any, *, name: str) -> Extractor:
    """A timm model that is loaded already, see `timm_extractor`."""
    config = import_module("timm").data.resolve_model_data_config(model)
    model.eval()
    has_cls = getattr(model, "cls_token", None) is not None
    # Where it does not say how many tokens lead and there is a class token, nobody knows which are patches.
    prefix = getattr(model, "num_prefix_tokens", None if has_cls else 0)

    def encode(images: Tensor) -> Mapping[str, Tensor]:
        tokens = model.forward_features(images)
        named = {"pooled": model.forward_head(tokens, pre_logits=True)}
        if not isinstance(tokens, Tensor) or prefix is None:
            return named
        if tokens.ndim == 4:  # a map: [B, C, h, w], or [B, h, w, C] in timm's hierarchical transformers
            last = getattr(model, "output_fmt", "NCHW") == "NHWC"
            return {**named, PATCHES: tokens.flatten(1, 2) if last else tokens.flatten(2).transpose(1, 2)}
        return {**named, **_of_sequence(tokens, prefix, has_cls=has_cls)} if tokens.ndim == 3 else named

    channels, *size = config["input_size"]
    return Extractor(
        name=name,
        encode=encode,
        preprocessing=Preprocessing(
            img_size=(size[0], size[1]),
            in_chans=channels,
            mean=tuple(config["mean"]),
            std=tuple(config["std"]),
            crop_share=None if config["crop_mode"] == "squash" and config["crop_pct"] == 1 else config["crop_pct"],
            interpolation="bilinear" if config["interpolation"] == "bilinear" else "bicubic",
        ),
        identity=f"{weights_digest(model)} timm {_architecture(model)} {_pooling(model)}",
        blocks=None if prefix is None else _timm_blocks(model, prefix, name=name),
    )


def _pooling(model: Any) -> str:
    """What decides timm's own feature beside the weights and the layers."""
    leading = " of leading tokens too" if getattr(model, "pool_include_prefix", False) else ""
    return f"{getattr(model, 'global_pool', '')}{leading}"


def _timm_blocks(model: Any, prefix: int, *, name: str) -> Blocks | None:
    """The blocks of a transformer of timm, the stages of a convolutional net; None where timm does not give them.

    Its maps cannot be given where branches have patches of different sizes, as in CrossViT: that is a UsageError.
    """
    if not hasattr(model, "forward_intermediates"):
        return None
    depth, last_axis = len(model.feature_info), getattr(model, "output_fmt", "NCHW") == "NHWC"
    weights = next(model.parameters())

    def maps(images: Tensor, numbers: Sequence[int]) -> list[Tensor]:
        tokens, found = model.forward_intermediates(images.to(weights), indices=list(numbers))
        if not isinstance(tokens, Tensor):
            raise UsageError(
                f"{name} gives its tokens as a {type(tokens).__name__} of several, not as one map of patches; give a "
                "model that does, such as a ViT"
            )
        if depth - 1 not in numbers:
            return list(found)
        if tokens.ndim == 3:  # after the final norm, which intermediate ones do not pass
            return [*found[:-1], tokens[:, prefix:].mT.unflatten(2, found[-1].shape[2:])]
        return [*found[:-1], tokens.permute(0, 3, 1, 2) if last_axis else tokens]

    return Blocks(depth=depth, maps=maps)


def hf_extractor(path: str, *, device: torch.device) -> Extractor:
    """A vision model of the Hugging Face hub, or of a folder in its form.

    `cls`, `mean` and `patches` of the last hidden state; `pooled` is the model's own pooled output where it has
    one. ViTMAE, which masks patches whenever it is called, is made to mask none and to keep their order.
    An image that is not as wide as high is squeezed where the processor does so, but cropped where that crops what it
    has squeezed.

    Args:
        path: a name on the hub, or a folder.
        device: where it computes.

    Raises:
        UsageError: transformers is not installed, or the model is not one of images.
        MAEError: it cannot be had, or lacks weights.
    """
    transformers = package("transformers")
    try:
        with torch.random.fork_rng(devices=[]):  # weights that a file lacks are drawn
            model, told = transformers.AutoModel.from_pretrained(
                path, use_safetensors=True, trust_remote_code=False, output_loading_info=True
            )
        processor = transformers.AutoImageProcessor.from_pretrained(path, trust_remote_code=False)
    except Exception as error:  # transformers, the hub and the file raise errors of many kinds
        raise MAEError(f"hf:{path} cannot be loaded: {first_line(error)}") from error
    # A checkpoint with a head of its own has no pooler, and mask tokens are of no use here.
    lacks = sorted(name for name in told["missing_keys"] if not name.endswith("mask_token"))
    if beside := [name for name in lacks if "pooler" not in name]:
        raise MAEError(
            f"hf:{path} lacks {len(beside)} of the weights of {type(model).__name__}, such as {beside[0]}: random ones "
            "would stand for them; give a whole checkpoint"
        )
    return wrap_hf(model.to(device), processor, name=f"hf:{path}", pools=not lacks)


def wrap_hf(model: Any, processor: Any, *, name: str, pools: bool = True) -> Extractor:
    """A Hugging Face model that is loaded already, with its image processor; see `hf_extractor`.

    Args:
        model: it.
        processor: its image processor.
        name: what the user calls it.
        pools: whether the pooled output, where it has one, is of weights that were loaded.

    Raises:
        UsageError: the model is not one of images, answers with other tokens than patches, or its processor has
            statistics of other channels.
    """
    if not hasattr(model.config, "num_channels"):
        raise UsageError(f"{name} is a {type(model).__name__}; expected a model that takes images and nothing else")
    if getattr(model.config, "is_encoder_decoder", False):  # as DETR
        raise UsageError(
            f"{name} is a {type(model).__name__}, whose decoder answers with tokens of objects, not of patches; give a "
            "model without a decoder, such as its backbone"
        )
    size, crop_share = _hf_crop(processor)
    channels = model.config.num_channels
    mean, std = _hf_statistics(processor, channels)
    if {len(mean), len(std)} != {channels}:
        raise UsageError(
            f"{name} takes images of {channels} channel(s), and its preprocessor_config.json has an image_mean of "
            f"{len(mean)} values and an image_std of {len(std)}; give one value a channel there"
        )
    model.eval()
    has_cls = any(part.endswith("cls_token") for part, _ in model.named_parameters())
    hides = model.config.model_type == "vit_mae"
    if hides:
        model.config.mask_ratio = 0.0
    weights = next(model.parameters())  # whose type is that of the checkpoint, and few models bring images to it

    def run(images: Tensor, **asked: bool) -> Any:
        order = torch.linspace(0, 1, prod(_grid(model.config, images)), device=images.device).expand(len(images), -1)
        try:
            return model(pixel_values=images.to(weights), **({"noise": order} if hides else {}), **asked)
        except ValueError as error:  # by which transformers refuses images
            made = " x ".join(map(str, images.shape[1:]))
            raise UsageError(
                f"{name} does not take images of {made} (channels, height, width), as its preprocessor_config.json "
                f"asks for: {first_line(error)}"
            ) from error

    def encode(images: Tensor) -> Mapping[str, Tensor]:
        output = run(images)
        pooled = getattr(output, "pooler_output", None) if pools else None
        named = {} if pooled is None else {"pooled": pooled.flatten(1)}
        tokens = output.last_hidden_state
        if tokens.ndim == 4:
            return {**named, "mean": tokens.mean(dim=(2, 3)), PATCHES: tokens.flatten(2).transpose(1, 2)}
        tokens = _without_detections(tokens, model.config)
        prefix = _leading(tokens.shape[1], model.config, images)
        return {**named, **_of_sequence(tokens, prefix, has_cls=has_cls)}

    return Extractor(
        name=name,
        encode=encode,
        preprocessing=Preprocessing(
            img_size=size,
            in_chans=channels,
            mean=mean,
            std=std,
            crop_share=crop_share,
            interpolation=_interpolation(processor.resample),
        ),
        identity=f"{weights_digest(model)} {_architecture(model)}",
        blocks=_hf_blocks(model, run),
    )


def _hf_blocks(model: Any, run: Callable[..., Any]) -> Blocks:
    """The blocks of a transformer of Hugging Face, the last map of a convolutional net as that of one block.

    Its maps cannot be given where patches were merged: that is a UsageError.
    """
    depth = getattr(model.config, "num_hidden_layers", None) or 1

    def maps(images: Tensor, numbers: Sequence[int]) -> list[Tensor]:
        inner = [number for number in numbers if number < depth - 1]
        output = run(images, output_hidden_states=bool(inner))
        found = _of_inner_blocks(output, inner, depth, type(model).__name__) if inner else []
        found += [output.last_hidden_state] if depth - 1 in numbers else []
        grid = _grid(model.config, images)
        if found[0].ndim == 3 and found[0].shape[1] < prod(grid):
            raise UsageError(f"{type(model).__name__} merges patches and does not say where its tokens lie")
        return [_as_map(each, model.config, grid) for each in found]

    return Blocks(depth=depth, maps=maps)


def _of_inner_blocks(output: Any, numbers: Sequence[int], depth: int, kind: str) -> list[Tensor]:
    """What leaves some of the blocks; what entered the first one leads it, but not in SegFormer.

    Raises:
        UsageError: nobody says of which blocks these are.
    """
    hidden = getattr(output, "hidden_states", None) or ()
    if len(hidden) not in (depth, depth + 1):
        raise UsageError(f"{kind} does not give what leaves each of its {depth} blocks; expected its last block alone")
    return [hidden[len(hidden) - depth + number] for number in numbers]


def _as_map(tokens: Tensor, config: Any, grid: tuple[int, int]) -> Tensor:
    """Tokens, or a map that may have its channels last as between the blocks of SAM, as `[B, D, rows, columns]`."""
    if tokens.ndim == 4:
        width = getattr(config, "hidden_size", None)
        return tokens.permute(0, 3, 1, 2) if tokens.shape[1] != width == tokens.shape[3] else tokens
    return _without_detections(tokens, config)[:, -prod(grid) :].mT.unflatten(2, grid)


def _without_detections(tokens: Tensor, config: Any) -> Tensor:
    """The tokens without those of YOLOS that find objects, which lie behind the patches."""
    return tokens[:, : tokens.shape[1] - getattr(config, "num_detection_tokens", 0)]


def _of_sequence(tokens: Tensor, prefix: int, *, has_cls: bool) -> dict[str, Tensor]:
    """Class token (the first of those that lead), and the patches: other leading tokens are registers."""
    patches = tokens[:, prefix:]
    named = {"mean": patches.mean(dim=1), PATCHES: patches}
    return {"cls": tokens[:, 0], **named} if prefix and has_cls else named


def _leading(count: int, config: Any, images: Tensor) -> int:
    """How many of so many tokens lead those of the patches; where these were merged, one if that leaves a grid."""
    if (more := count - prod(_grid(config, images))) >= 0:
        return more
    height, width = images.shape[2:]
    strides = range(1, max(height, width) + 1)
    grids = {way(height / stride) * way(width / stride) for stride in strides for way in (floor, ceil)}
    return int(count not in grids and count - 1 in grids)


def _grid(config: Any, images: Tensor) -> tuple[int, int]:
    patch = getattr(config, "patch_size", None) or 1
    height, width = (patch, patch) if isinstance(patch, int) else patch
    return images.shape[2] // height, images.shape[3] // width


def _architecture(model: Any) -> str:
    """A digest of what decides a model's outputs beside its weights: layers, activations, epsilons, heads."""
    heads = [getattr(part, "num_heads", getattr(part, "num_attention_heads", None)) for part in model.modules()]
    return hashlib.sha256(f"{model!r} {heads}".encode()).hexdigest()[:16]


def _hf_crop(processor: Any) -> tuple[tuple[int, int], float | None]:
    """The size of the crop, and its share of the side that the image is resized to before it; None: it is squeezed."""
    size: dict[str, int] = dict(processor.size)
    resized = size.get("shortest_edge") or size["height"]
    cropped = getattr(processor, "do_center_crop", False) and getattr(processor, "crop_size", None)
    crop: dict[str, int] = dict(processor.crop_size) if cropped else {}
    height, width = (crop.get(side, size.get(side, resized)) for side in ("height", "width"))
    if getattr(processor, "crop_pct", None) and resized < _CONVNEXT_WHOLE:
        return (height, width), processor.crop_pct
    if not cropped and "shortest_edge" not in size:
        return (height, width), None
    return (height, width), min(1.0, height / resized)


def _hf_statistics(processor: Any, channels: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and std of 8-bit pixels scaled to [0, 1], which a processor may scale to more."""
    normalises = processor.do_normalize
    mean = tuple(processor.image_mean) if normalises else (0.0,) * channels
    std = tuple(processor.image_std) if normalises else (1.0,) * channels
    factor = getattr(processor, "rescale_factor", None) if getattr(processor, "do_rescale", False) else None
    if factor is None or factor in (1 / 255, 1 / 65535):  # the latter of 16 bits, which are scaled to [0, 1] too
        return mean, std
    most = 255 * factor
    return tuple(each / most for each in mean), tuple(each / most for each in std)


def _interpolation(resample: Any) -> Literal["bicubic", "bilinear"]:
    """Of Pillow's number."""
    return "bilinear" if resample == 2 else "bicubic"


def package(name: str) -> Any:
    """A package that `mae` does without.

    Raises:
        UsageError: it is not installed.
    """
    try:
        return import_module(name)
    except ImportError as error:
        raise UsageError(f"this model needs the package {name}, which is not installed: pip install {name}") from error


def first_line(error: Exception) -> str:
    """What an error says, without the rest of its lines."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
