"""How other libraries name the tensors of a masked autoencoder, and the renaming to the official names.

Every scheme is mapped to the names of the official repository, which are timm's for the encoder:
`blocks.0.attn.qkv.weight`, with the prefix `decoder_` for the decoder. A file is recognised by its tensor names;
what a wrapper adds to them is removed.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from mae import records
from mae.errors import MAEError, UsageError

Renames = tuple[tuple[str, str], ...]
"""Patterns and their replacements, applied in order."""

_WRAPPERS = re.compile(r"(?:(?<=\.)|^)(?:module|_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
"""Of data-parallel training, torch.compile, FSDP and activation checkpointing; anywhere in a name."""

_DECODER_SIGN = "decoder_embed.weight"
_OF_DECODER = ("decoder_", "decoder.", "prediction_head.")
_NUM_NAMED = 3


@dataclass(frozen=True, kw_only=True)
class NamingScheme:
    """One library's tensor names.

    Attributes:
        name: as printed in reports.
        sign: the encoder tensor that identifies it: of rank 4, the patch embedding's kernel.
        encoder: renames of the encoder's tensors to official names.
        decoder: likewise of the decoder's.
        library: that loads these names, for comparison.
        norm_eps: epsilon of its layer norms; None: stated in its `config.json`.
        rows_first: whether its position embedding encodes rows before columns.
    """

    name: str
    sign: str
    encoder: Renames = ()
    decoder: Renames = ()
    library: str = "timm"
    norm_eps: float | None = 1e-6
    rows_first: bool = False


_HF_BLOCK: Renames = (
    (r"\.attention\.attention\.query\.", ".attn.q."),
    (r"\.attention\.attention\.key\.", ".attn.k."),
    (r"\.attention\.attention\.value\.", ".attn.v."),
    (r"\.attention\.([qkv])_proj\.", r".attn.\1."),
    (r"\.attention\.(?:output\.dense|o_proj)\.", ".attn.proj."),
    (r"\.intermediate\.dense\.", ".mlp.fc1."),
    (r"\.output\.dense\.", ".mlp.fc2."),
    (r"\.layernorm_before\.", ".norm1."),
    (r"\.layernorm_after\.", ".norm2."),
    (r"\.layer_scale([12])\.lambda1$", r".ls\1.gamma"),  # of DINOv2
)
_MM_BLOCK: Renames = (
    (r"(blocks\.\d+)\.ln([12])\.", r"\1.norm\2."),
    (r"\.ffn\.layers\.0\.0\.", ".mlp.fc1."),
    (r"\.ffn\.layers\.1\.", ".mlp.fc2."),
)

_LIGHTLY_DECODER: Renames = (  # since 1.6
    (r"^decoder\.mask_token$", "mask_token"),
    (r"^decoder\.(pos_embed$|blocks\.|norm\.)", r"decoder_\1"),
    (r"^prediction_head\.", "decoder_pred."),
)

SCHEMES = (
    NamingScheme(name="official MAE, timm or lightly", sign="patch_embed.proj.weight", decoder=_LIGHTLY_DECODER),
    NamingScheme(
        name="Hugging Face",
        sign="embeddings.patch_embeddings.projection.weight",
        encoder=(
            (r"^embeddings\.position_embeddings$", "pos_embed"),
            (r"^embeddings\.cls_token$", "cls_token"),
            (r"^embeddings\.patch_embeddings\.projection\.", "patch_embed.proj."),
            (r"^(?:encoder\.layer|layers)\.", "blocks."),
            (r"^layernorm\.", "norm."),
            *_HF_BLOCK,
        ),
        decoder=((r"^decoder_(?:layers|encoder\.layer)\.", "decoder_blocks."), *_HF_BLOCK),
        library="transformers",
        norm_eps=None,
    ),
    NamingScheme(
        name="mmpretrain",
        sign="patch_embed.projection.weight",
        encoder=(
            (r"^patch_embed\.projection\.", "patch_embed.proj."),
            (r"^layers\.", "blocks."),
            (r"^ln1\.", "norm."),
            *_MM_BLOCK,
        ),
        decoder=((r"^ln1\.", "decoder_norm."), *_MM_BLOCK),
        rows_first=True,
    ),
)


@dataclass(frozen=True, kw_only=True)
class RenamedTensors:
    """The tensors of a file under official names.

    Attributes:
        scheme: the names in the file.
        encoder: the encoder's, and those of heads on top.
        decoder: the decoder's, including `mask_token`; empty for an encoder alone.
        elsewhere: names in the file that belong to neither.
    """

    scheme: NamingScheme
    encoder: Mapping[str, Tensor]
    decoder: Mapping[str, Tensor]
    elsewhere: tuple[str, ...]


def to_official_names(path: Path, tensors: Mapping[str, Tensor]) -> RenamedTensors:
    """Recognise the naming scheme and rename the tensors.

    Args:
        path: of the file, for messages.
        tensors: as named in it.

    Raises:
        UsageError: no known naming scheme, or several encoders.
        MAEError: two tensors that get the same name.
    """
    plain = _renamed(path, tensors, lambda name: _WRAPPERS.sub("", name))
    scheme, prefix = _recognise(path, plain)
    decoders = _prefixes(plain, _DECODER_SIGN)
    if len(decoders) > 1:
        raise UsageError(
            f"{path} holds {len(decoders)} decoders ({', '.join(map(records.shown, decoders))}); save one of them alone"
        )
    encoder, decoder, elsewhere = {}, {}, []
    for name, tensor in plain.items():
        if decoders and (inner := _of_decoder(name, decoders[0], encoder=prefix)):
            decoder[inner] = tensor
        elif name.startswith(prefix):
            encoder[name.removeprefix(prefix)] = tensor
        else:
            elsewhere.append(name)
    return RenamedTensors(
        scheme=scheme,
        encoder=_fused(path, _renamed(path, encoder, lambda name: _apply(scheme.encoder, name))),
        decoder=_fused(path, _renamed(path, decoder, lambda name: _apply(scheme.decoder, name))),
        elsewhere=tuple(elsewhere),
    )


def _recognise(path: Path, tensors: Mapping[str, Tensor]) -> tuple[NamingScheme, str]:
    """The naming scheme, and the prefix of its encoder's names."""
    found = [(scheme, prefix) for scheme in SCHEMES for prefix in _prefixes(tensors, scheme.sign)]
    found = [(scheme, prefix) for scheme, prefix in found if tensors[prefix + scheme.sign].ndim == 4]
    if len(found) == 1:
        return found[0]
    if found:
        where = ", ".join(
            records.shown(prefix) if prefix else "one without a prefix" for _, prefix in found[:_NUM_NAMED]
        )
        raise UsageError(f"{path} holds {len(found)} encoders ({where}); save one of them alone")
    names = ", ".join(records.shown(name) for name in list(tensors)[:_NUM_NAMED])
    raise UsageError(
        f"{path} holds no known vision transformer: {len(tensors)} tensors such as {names or 'none'}; "
        f"expected a name that ends in {' or '.join(scheme.sign for scheme in SCHEMES)}"
    )


def _prefixes(names: Iterable[str], sign: str) -> list[str]:
    """The prefixes of names that are `sign`, or end in it after a dot."""
    return [name.removesuffix(sign) for name in names if name == sign or name.endswith(f".{sign}")]


def _of_decoder(name: str, prefix: str, *, encoder: str) -> str:
    """The name inside the decoder; empty if it is not one of its tensors.

    All names under its prefix are, unless the encoder shares that prefix.
    """
    inner = name.removeprefix(prefix) if name.startswith(prefix) else ""
    alone = not encoder.startswith(prefix)
    return inner if alone or inner == "mask_token" or inner.startswith(_OF_DECODER) else ""


def _apply(renames: Renames, name: str) -> str:
    for pattern, instead in renames:
        name = re.sub(pattern, instead, name)
    return name


def _renamed(path: Path, tensors: Mapping[str, Tensor], rename: Callable[[str], str]) -> dict[str, Tensor]:
    renamed: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        new = rename(name)
        if new in renamed:
            raise MAEError(f"{path} holds two tensors for {records.shown(new)}; get another file")
        renamed[new] = tensor
    return renamed


def _fused(path: Path, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Concatenate separate queries, keys and values, in this order."""
    fused = {name: tensor for name, tensor in tensors.items() if not re.search(r"\.attn\.[qkv]\.(weight|bias)$", name)}
    for name in tensors:
        if not (found := re.fullmatch(r"(.+\.attn)\.q\.(weight|bias)", name)):
            continue
        attention, kind = found.groups()
        parts = [tensors.get(f"{attention}.{letter}.{kind}") for letter in "qkv"]
        there = [part for part in parts if part is not None]
        if len(there) < len(parts) or len({part.shape for part in there}) > 1:
            raise MAEError(
                f"{path}: the {kind} of queries, keys and values of {attention} are incomplete or differ in shape; "
                "download the file again"
            )
        fused[f"{attention}.qkv.{kind}"] = torch.cat(there)
    return fused
