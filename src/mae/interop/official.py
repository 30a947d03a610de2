"""From official names and shapes to a configuration and weights of this package."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf, nextafter
from typing import Any

import torch
from torch import Tensor

from mae import records
from mae.errors import MAEError, UsageError
from mae.interop.positions import StoredPositions, understand_positions
from mae.layers.patch_embed import patch_grid
from mae.models.config import ModelConfig
from mae.models.storage import Classes
from mae.models.zoo import list_models, model_config
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
_HEADS = ("head.", "fc_norm.", "pooler.", "embeddings.mask_token")
"""What may stand on an encoder and is no part of it."""

_CLASSIFIER = (("fc_norm.", "fc_norm."), ("head.", "head."))


@dataclass(frozen=True, kw_only=True)
class Told:
    """What shapes do not tell of a model; None where nobody says.

    Attributes:
        num_heads: attention heads of the encoder.
        decoder_num_heads: attention heads of the decoder.
        trained_size: height and width of the images that the positions were made for.
        norm_pix_loss: whether the target standardises each patch.
        mask_ratio: share of patches hidden.
        norm_eps: in every layer norm.
        qkv_bias: whether queries, keys and values have biases.
        rows_first: whether the positions' sines of the row come before those of the column.
        mean: per-channel mean of the images, in the unit that `pixel_dtype` tells.
        std: per-channel deviation.
        pixel_dtype: see `ModelConfig`.
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
    pixel_dtype: PixelDtype | None = None
    class_names: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if (self.mean is None) != (self.std is None):
            raise UsageError("a mean and a standard deviation go together; give both --mean and --std, or neither")


@dataclass(frozen=True, kw_only=True, eq=False)
class Converted:
    """Weights under the names of this package, and what was understood of them.

    Attributes:
        config: of the model; of an encoder alone its decoder's sizes mean nothing.
        weights: float32.
        positions: what the encoder's are, see `StoredPositions.kind`.
        decoder_positions: likewise of the decoder; None without one.
        unknown: names of tensors that no such model has.
        classes: of a head behind a norm of the mean token, as fine-tuning makes it; None without one.
        ignored: names of what stands on the encoder and is no part of it.
        notes: what a reader must know.
    """

    config: ModelConfig
    weights: Mapping[str, Tensor]
    positions: str
    decoder_positions: str | None
    classes: Classes | None
    unknown: tuple[str, ...]
    ignored: tuple[str, ...]
    notes: tuple[str, ...]


def convert(encoder: Mapping[str, Tensor], decoder: Mapping[str, Tensor], told: Told) -> Converted:
    """Weights under official names as weights of this package.

    A class token's own position is added to the token: only their sum counts. Positions that are not the paper's sines
    are kept as a learned table, the decoder's too.

    Args:
        encoder: the encoder's tensors, `patch_embed.proj.weight` among them, and those of heads on it.
        decoder: the decoder's; empty for an encoder alone.
        told: what shapes do not tell.

    Raises:
        UsageError: something that neither shapes nor `told` say; the option to give is named.
        MAEError: tensors that are of no such model, or whose shapes do not fit each other.
    """
    notes: list[str] = []
    num_prefix = int("cls_token" in encoder)
    rows, columns = _shape(encoder, "patch_embed.proj.weight", 4)[2:]
    places = _places(encoder, "pos_embed", num_prefix, told, (rows, columns))
    theirs = _places(decoder, "decoder_pos_embed", num_prefix, told, (rows, columns)) if decoder else None
    config = _config(encoder, decoder, places, theirs, told, notes)
    weights = _under(encoder, _ENCODER) | _under(decoder, _DECODER)
    weights["encoder.patch_embed.proj.weight"] = weights["encoder.patch_embed.proj.weight"].flatten(1)
    width = config.embed_dim
    if num_prefix and _shape(encoder, "cls_token", 3) != (1, 1, width):
        raise MAEError(f"cls_token has shape {tuple(encoder['cls_token'].shape)}; expected {(1, 1, width)}")
    if places.table.shape[1] != width:
        raise MAEError(f"pos_embed has a width of {places.table.shape[1]}; expected {width}")
    if num_prefix and bool(places.cls.any()):
        weights["encoder.cls_token"] = weights["encoder.cls_token"].float() + places.cls
    if theirs is not None and bool(theirs.cls.any()):
        raise MAEError("the decoder's class token has a position of its own, which this package's decoder has not")
    classes = _classes(encoder, told)
    if classes is not None:
        weights |= _under(encoder, _CLASSIFIER)
        config = replace(config, pos_embed="learned")  # they were trained with the rest
    if config.pos_embed == "learned":
        weights["encoder.pos_embed.table"] = places.table
        if theirs is not None:
            weights["decoder.pos_embed.table"] = theirs.table
        notes.append(f"positions are a table ({places.kind}), kept as a learned one for {_by(config.img_size)} pixels")
    if told.qkv_bias is False:
        _add_no_bias(weights)
    ignored = tuple(name for name in encoder if name.startswith(_HEADS) and name not in weights)
    unknown = {*encoder, *decoder} - {*ignored, *weights, "pos_embed", "decoder_pos_embed"}
    unknown = {name for name in unknown if not name.startswith(tuple(theirs for theirs, _ in (*_ENCODER, *_DECODER)))}
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


def _classes(encoder: Mapping[str, Tensor], told: Told) -> Classes | None:
    """What the head tells apart, if it is one that this package's classifier has: on the mean of the patch tokens.

    Raises:
        UsageError: fewer than two classes, or other names than there are classes.
    """
    names = [f"{part}.{kind}" for part in ("fc_norm", "head") for kind in ("weight", "bias")]
    if not encoder.keys() >= {*names} or "norm.weight" in encoder:
        return None
    count = _shape(encoder, "head.weight", 2)[0]
    if told.class_names is not None and len(told.class_names) != count:
        raise UsageError(f"its head has {count} classes, and beside it {len(told.class_names)} names are told")
    return Classes(count=count, names=told.class_names or ())


def _places(
    tensors: Mapping[str, Tensor], name: str, num_prefix: int, told: Told, patch: tuple[int, int]
) -> StoredPositions:
    if name not in tensors:
        raise MAEError(f"it holds no {name}, so where its patches stand is not known")
    grid = None if told.trained_size is None else patch_grid(*told.trained_size, patch)
    return understand_positions(tensors[name], name=name, num_prefix=num_prefix, grid=grid)


def _config(
    encoder: Mapping[str, Tensor],
    decoder: Mapping[str, Tensor],
    places: StoredPositions,
    theirs: StoredPositions | None,
    told: Told,
    notes: list[str],
) -> ModelConfig:
    """The configuration that these shapes have."""
    if theirs is not None and theirs.grid != places.grid:
        raise MAEError(
            f"its encoder has positions for a grid of {_by(places.grid)}, its decoder for {_by(theirs.grid)}"
        )
    width, channels, *patch = encoder["patch_embed.proj.weight"].shape
    depth, ratio = _depth(encoder, "blocks."), _mlp_ratio(encoder, decoder)
    options: dict[str, Any] = {
        "img_size": [side * p for side, p in zip(places.grid, patch, strict=True)],
        "patch_size": patch,
        "in_chans": channels,
        "embed_dim": width,
        "depth": depth,
        "num_heads": _heads("num_heads", told.num_heads, width, depth, notes),
        "mlp_ratio": ratio,
        "cls_token": "cls_token" in encoder,
        "pos_embed": "sincos2d" if {places.kind, (theirs or places).kind} == {"sincos2d"} else "learned",
    }
    if decoder:
        options |= _decoder_options(decoder, told, notes)
    names = ("norm_pix_loss", "mask_ratio", "norm_eps", "mean", "std", "pixel_dtype")
    given = {name: getattr(told, name) for name in names}
    return ModelConfig.from_json(options | {name: value for name, value in given.items() if value is not None})


def _decoder_options(decoder: Mapping[str, Tensor], told: Told, notes: list[str]) -> dict[str, Any]:
    width = _shape(decoder, "decoder_embed.weight", 2)[0]
    depth = _depth(decoder, "decoder_blocks.")
    heads = _heads("decoder_num_heads", told.decoder_num_heads, width, depth, notes)
    return {"decoder_embed_dim": width, "decoder_depth": depth, "decoder_num_heads": heads}


def _depth(tensors: Mapping[str, Tensor], prefix: str) -> int:
    numbers = {name.removeprefix(prefix).partition(".")[0] for name in tensors if name.startswith(prefix)}
    if numbers != {str(number) for number in range(len(numbers))}:
        shown = [records.shown(number) for number in sorted(numbers)[:_NUM_NAMED]]
        raise MAEError(f"its blocks are not numbered from 0 on without a gap ({', '.join(shown)})")
    return len(numbers)


def _mlp_ratio(encoder: Mapping[str, Tensor], decoder: Mapping[str, Tensor]) -> float:
    """How many times MLPs are wider than tokens, in both: the least that gives these widths, rounded down."""
    sizes = [_shape(encoder, "blocks.0.mlp.fc1.weight", 2)]
    if decoder:
        sizes.append(_shape(decoder, "decoder_blocks.0.mlp.fc1.weight", 2))
    ratio = max(hidden / width for hidden, width in sizes)
    while any(int(width * ratio) < hidden for hidden, width in sizes):  # what a division rounded off
        ratio = nextafter(ratio, inf)
    if any(int(width * ratio) != hidden for hidden, width in sizes):
        (hidden, width), (own_hidden, own_width) = sizes
        raise MAEError(
            f"its decoder's MLPs are {own_hidden / own_width:g} times as wide as its tokens, its encoder's "
            f"{hidden / width:g} times"
        )
    return ratio


def _shape(tensors: Mapping[str, Tensor], name: str, rank: int) -> tuple[int, ...]:
    if name not in tensors or tensors[name].ndim != rank:
        there = f"has shape {tuple(tensors[name].shape)}" if name in tensors else "is missing"
        raise MAEError(f"{name} {there}; expected a tensor of rank {rank}, by which the model's sizes are told")
    return tuple(tensors[name].shape)


def _heads(kind: str, told: int | None, width: int, depth: int, notes: list[str]) -> int:
    """Those that are told, else those of the named models of that width and depth, where they agree.

    Raises:
        UsageError: no model is so, or they do not agree.
    """
    if told is not None:
        return told
    part = "decoder_" if kind.startswith("decoder_") else ""
    sizes = [model_config(name) for name in list_models()]
    fitting = [
        size for size in sizes if (getattr(size, f"{part}embed_dim"), getattr(size, f"{part}depth")) == (width, depth)
    ]
    heads = {getattr(size, kind) for size in fitting}
    if len(heads) != 1:
        flag = "--" + kind.replace("_", "-")
        raise UsageError(f"nothing tells how many attention heads {depth} blocks of width {width} have; give {flag}")
    (number,) = heads
    notes.append(f"{number} {'decoder ' if part else ''}heads, as is usual for {depth} blocks of width {width}")
    return number


def _under(tensors: Mapping[str, Tensor], names: Sequence[tuple[str, str]]) -> dict[str, Tensor]:
    """The tensors that have a place, under our names."""
    return {
        ours + name.removeprefix(theirs): tensor
        for name, tensor in tensors.items()
        for theirs, ours in names
        if name.startswith(theirs)
    }


def _add_no_bias(weights: dict[str, Tensor]) -> None:
    """Zeros for the biases of queries, keys and values of a model that is told to have none."""
    for name in [name for name in weights if name.endswith(".attn.qkv.weight")]:
        weights.setdefault(name.replace(".weight", ".bias"), torch.zeros(len(weights[name])))


def _by(size: Sequence[int]) -> str:
    return "x".join(map(str, size))
