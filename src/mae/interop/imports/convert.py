"""Convert tensors under official names to a configuration and weights of this package."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf, nextafter
from typing import Any

import torch
from torch import Tensor

from mae import records
from mae.core.method import MethodConfig
from mae.errors import MAEError, UsageError
from mae.interop.imports.layer_scale import fold_layer_scale, has_layer_scale
from mae.interop.imports.positions import StoredPositions, understand_positions
from mae.modalities.images.patches import patch_grid
from mae.models.kinds import Classes
from mae.models.presets import list_models, model_config
from mae.records import PixelDtype

_ENCODER = (
    ("patch_embed.proj.", "encoder.patch_embed.proj."),
    ("cls_token", "encoder.cls_token"),
    ("blocks.", "encoder.blocks."),
    ("norm.", "encoder.norm."),
)
_DECODER = (
    ("decoder_embed.", "decoder.embed."),
    ("decoder_blocks.", "decoder.blocks."),
    ("decoder_norm.", "decoder.norm."),
    ("decoder_pred.", "decoder.pred."),
    ("mask_token", "decoder.mask_token"),
)
_NUM_NAMED = 3
_HEADS = ("head.", "fc_norm.", "pooler.", "embeddings.mask_token", "mask_token")
"""Modules on top of an encoder, and mask tokens of encoders that whole images do not need, which are ignored."""

_CLASSIFIER = (("fc_norm.", "fc_norm."), ("head.", "head."))


@dataclass(frozen=True, kw_only=True)
class WeightMetadata:
    """What the shapes of the tensors do not reveal; None: not stated.

    Attributes:
        num_heads: attention heads of the encoder.
        decoder_num_heads: attention heads of the decoder.
        trained_size: height and width of the images that the position embedding is for.
        norm_pix_loss: whether the target is per-patch normalised.
        mask_ratio: share of patches masked.
        norm_eps: epsilon of every layer norm.
        qkv_bias: whether queries, keys and values have biases.
        rows_first: whether the position embedding encodes rows before columns.
        mean: per-channel mean of the images, in the unit that `pixel_dtype` implies.
        std: per-channel std, likewise.
        statistics_unknown: that nobody knows mean and std, whatever stands for them where a library needs numbers.
        pixel_dtype: see `MethodConfig`.
        class_names: of a classifier, in the order of its logits.
    """

    num_heads: int | None = None
    decoder_num_heads: int | None = None
    trained_size: tuple[int, int] | None = None
    norm_pix_loss: bool | None = None
    mask_ratio: float | None = None
    norm_eps: float | None = None
    qkv_bias: bool | None = None
    rows_first: bool | None = None
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    statistics_unknown: bool | None = None
    pixel_dtype: PixelDtype | None = None
    class_names: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if (self.mean is None) != (self.std is None):
            raise UsageError("--mean and --std go together; give both, or neither")


@dataclass(frozen=True, kw_only=True, eq=False)
class Converted:
    """Weights under the names of this package, and the configuration they imply.

    Attributes:
        config: of the model; for an encoder alone the decoder's sizes are meaningless.
        weights: float32.
        positions: kind of the encoder's position embedding, see `StoredPositions.kind`.
        decoder_positions: kind of the decoder's; None without one.
        unknown: names of tensors that no such model has.
        classes: of a classification head on the normalised mean token, as fine-tuning makes it; None without one.
        ignored: names of tensors on top of the encoder that are left out.
        notes: remarks for the report.
    """

    config: MethodConfig
    weights: Mapping[str, Tensor]
    positions: str
    decoder_positions: str | None
    classes: Classes | None
    unknown: tuple[str, ...]
    ignored: tuple[str, ...]
    notes: tuple[str, ...]


def convert(encoder: Mapping[str, Tensor], decoder: Mapping[str, Tensor], metadata: WeightMetadata) -> Converted:
    """Convert weights under official names to weights of this package.

    The class token's position embedding is added to the token: only their sum matters. Position embeddings other than
    the paper's sine-cosine table are kept as learned tables, the decoder's too. LayerScale is folded into the layers
    before it.

    Args:
        encoder: the encoder's tensors, including `patch_embed.proj.weight`, and those of heads on top.
        decoder: the decoder's; empty for an encoder alone.
        metadata: what shapes do not reveal.

    Raises:
        UsageError: missing metadata; the message names the option to give.
        MAEError: tensors of another kind of model, or whose shapes do not fit together.
    """
    notes: list[str] = []
    if has_layer_scale(encoder):
        encoder = fold_layer_scale(encoder)
        notes.append("LayerScale folded into the layers before it")
    num_prefix = int("cls_token" in encoder)
    rows, columns = _shape(encoder, "patch_embed.proj.weight", 4)[2:]
    places = _places(encoder, "pos_embed", num_prefix, metadata, (rows, columns))
    theirs = _places(decoder, "decoder_pos_embed", num_prefix, metadata, (rows, columns)) if decoder else None
    config = _config(encoder, decoder, places, theirs, metadata, notes)
    weights = _under(encoder, _ENCODER) | _under(decoder, _DECODER)
    weights["encoder.patch_embed.proj.weight"] = weights["encoder.patch_embed.proj.weight"].flatten(1)
    width = config.encoder.embed_dim
    if num_prefix and _shape(encoder, "cls_token", 3) != (1, 1, width):
        raise MAEError(f"cls_token has shape {tuple(encoder['cls_token'].shape)}; expected {(1, 1, width)}")
    if places.table.shape[1] != width:
        raise MAEError(f"pos_embed has a width of {places.table.shape[1]}; expected {width}")
    if num_prefix and bool(places.cls.any()):
        weights["encoder.cls_token"] = weights["encoder.cls_token"].float() + places.cls
    if theirs is not None and bool(theirs.cls.any()):
        raise MAEError(
            "the decoder's class token has a position embedding, which this package's decoder does not support"
        )
    classes = _classes(encoder, metadata)
    if classes is not None:
        weights |= _under(encoder, _CLASSIFIER)
        config = config.override({"pos_embed": "learned"})  # fine-tuning trains them
    if config.encoder.pos_embed == "learned":
        weights["encoder.pos_embed.table"] = places.table
        if theirs is not None:
            weights["decoder.pos_embed.table"] = theirs.table
        notes.append(f"position embedding ({places.kind}) kept as a learned table for {_by(config.layout.size)} pixels")
    if metadata.qkv_bias is False:
        _add_zero_biases(weights)
    ignored = tuple(name for name in encoder if name.startswith(_HEADS) and name not in weights)
    known = {*ignored, *weights, "pos_embed", "decoder_pos_embed"}
    unknown = {*_beside(encoder, _ENCODER), *_beside(decoder, _DECODER)} - known
    return Converted(
        config=config,
        weights={name: tensor.float().contiguous() for name, tensor in weights.items()},
        classes=classes,
        positions=places.kind,
        decoder_positions=None if theirs is None else theirs.kind,
        unknown=tuple(sorted(unknown)),
        ignored=ignored,
        notes=tuple(notes),
    )


def _classes(encoder: Mapping[str, Tensor], metadata: WeightMetadata) -> Classes | None:
    """The classes of the head, if it is like that of this package's classifier: on the mean of the patch tokens.

    Raises:
        UsageError: fewer than two classes, or another number of class names.
    """
    names = [f"{part}.{kind}" for part in ("fc_norm", "head") for kind in ("weight", "bias")]
    if not encoder.keys() >= {*names} or "norm.weight" in encoder:
        return None
    count = _shape(encoder, "head.weight", 2)[0]
    if metadata.class_names is not None and len(metadata.class_names) != count:
        raise UsageError(
            f"its head has {count} classes, but {len(metadata.class_names)} class names are stated beside it"
        )
    return Classes(count=count, names=metadata.class_names or ())


def _places(
    tensors: Mapping[str, Tensor], name: str, num_prefix: int, metadata: WeightMetadata, patch: tuple[int, int]
) -> StoredPositions:
    if name not in tensors:
        raise MAEError(f"it holds no {name}, so the positions of its patches are unknown")
    grid = None if metadata.trained_size is None else patch_grid(*metadata.trained_size, patch)
    return understand_positions(tensors[name], name=name, num_prefix=num_prefix, grid=grid)


def _config(
    encoder: Mapping[str, Tensor],
    decoder: Mapping[str, Tensor],
    places: StoredPositions,
    theirs: StoredPositions | None,
    metadata: WeightMetadata,
    notes: list[str],
) -> MethodConfig:
    """The configuration that these shapes imply."""
    if theirs is not None and theirs.grid != places.grid:
        raise MAEError(
            f"its encoder has a position embedding for a grid of {_by(places.grid)}, its decoder for {_by(theirs.grid)}"
        )
    width, channels, *patch = encoder["patch_embed.proj.weight"].shape
    depth, ratio = _depth(encoder, "blocks."), _mlp_ratio(encoder, decoder)
    options: dict[str, Any] = {
        "img_size": [side * p for side, p in zip(places.grid, patch, strict=True)],
        "patch_size": patch,
        "in_chans": channels,
        "embed_dim": width,
        "depth": depth,
        "num_heads": _heads("num_heads", metadata.num_heads, width, depth, notes),
        "mlp_ratio": ratio,
        "cls_token": "cls_token" in encoder,
        "pos_embed": "sincos2d" if {places.kind, (theirs or places).kind} == {"sincos2d"} else "learned",
    }
    if decoder:
        options |= _decoder_options(decoder, metadata, notes)
    names = ("norm_pix_loss", "mask_ratio", "norm_eps", "mean", "std", "pixel_dtype")
    given = {name: getattr(metadata, name) for name in names}
    return MethodConfig().override(options | {name: value for name, value in given.items() if value is not None})


def _decoder_options(decoder: Mapping[str, Tensor], metadata: WeightMetadata, notes: list[str]) -> dict[str, Any]:
    width = _shape(decoder, "decoder_embed.weight", 2)[0]
    depth = _depth(decoder, "decoder_blocks.")
    heads = _heads("decoder_num_heads", metadata.decoder_num_heads, width, depth, notes)
    return {"decoder_embed_dim": width, "decoder_depth": depth, "decoder_num_heads": heads}


def _depth(tensors: Mapping[str, Tensor], prefix: str) -> int:
    numbers = {name.removeprefix(prefix).partition(".")[0] for name in tensors if name.startswith(prefix)}
    if numbers != {str(number) for number in range(len(numbers))}:
        shown = [records.shown(number) for number in sorted(numbers)[:_NUM_NAMED]]
        raise MAEError(f"its blocks are not numbered from 0 without a gap ({', '.join(shown)})")
    return len(numbers)


def _mlp_ratio(encoder: Mapping[str, Tensor], decoder: Mapping[str, Tensor]) -> float:
    """MLP width over token width, for both parts: the smallest ratio that gives these widths, rounded down."""
    sizes = [_shape(encoder, "blocks.0.mlp.fc1.weight", 2)]
    if decoder:
        sizes.append(_shape(decoder, "decoder_blocks.0.mlp.fc1.weight", 2))
    ratio = max(hidden / width for hidden, width in sizes)
    while any(int(width * ratio) < hidden for hidden, width in sizes):  # the division was rounded down
        ratio = nextafter(ratio, inf)
    if any(int(width * ratio) != hidden for hidden, width in sizes):
        (hidden, width), (own_hidden, own_width) = sizes
        raise MAEError(
            f"its decoder has an MLP ratio of {own_hidden / own_width:g}, its encoder of {hidden / width:g}; "
            "expected the same"
        )
    return ratio


def _shape(tensors: Mapping[str, Tensor], name: str, rank: int) -> tuple[int, ...]:
    if name not in tensors or tensors[name].ndim != rank:
        problem = f"has shape {tuple(tensors[name].shape)}" if name in tensors else "is missing"
        raise MAEError(f"{name} {problem}; expected a tensor of rank {rank}, which sets the model's sizes")
    return tuple(tensors[name].shape)


def _heads(kind: str, stated: int | None, width: int, depth: int, notes: list[str]) -> int:
    """The stated number, else that of the presets of this width and depth, if they agree.

    Raises:
        UsageError: no preset has these sizes, or they disagree.
    """
    if stated is not None:
        return stated
    part = "decoder_" if kind.startswith("decoder_") else ""
    sizes = [model_config(name).flat() for name in list_models()]
    heads = {size[kind] for size in sizes if (size[f"{part}embed_dim"], size[f"{part}depth"]) == (width, depth)}
    if len(heads) != 1:
        flag = "--" + kind.replace("_", "-")
        raise UsageError(f"the number of attention heads is unknown for {depth} blocks of width {width}; give {flag}")
    (number,) = heads
    notes.append(f"{number} {'decoder ' if part else ''}heads, the usual number for {depth} blocks of width {width}")
    return number


def _under(tensors: Mapping[str, Tensor], names: Sequence[tuple[str, str]]) -> dict[str, Tensor]:
    """The known tensors, under our names."""
    return {
        ours + name.removeprefix(theirs): tensor
        for name, tensor in tensors.items()
        for theirs, ours in names
        if name.startswith(theirs)
    }


def _beside(tensors: Mapping[str, Tensor], names: Sequence[tuple[str, str]]) -> list[str]:
    """The names of the others."""
    return [name for name in tensors if not name.startswith(tuple(theirs for theirs, _ in names))]


def _add_zero_biases(weights: dict[str, Tensor]) -> None:
    """Add zero biases to the queries, keys and values of a model without any."""
    for name in [name for name in weights if name.endswith(".attn.qkv.weight")]:
        weights.setdefault(name.replace(".weight", ".bias"), torch.zeros(len(weights[name])))


def _by(size: Sequence[int]) -> str:
    return "x".join(map(str, size))
