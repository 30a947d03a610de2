"""`mae import FILE|DIR|NAME --out MODEL`."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from mae.config import Size
from mae.options import shown

_STORED = "from the files beside the weights"


@dataclass(frozen=True, kw_only=True)
class _Metadata:
    """What the weights themselves do not say."""

    num_heads: Annotated[int | None, shown(f"{_STORED}, else the usual number", "HEADS")] = None
    """Attention heads of the encoder."""
    decoder_num_heads: Annotated[int | None, shown(f"{_STORED}, else the usual number", "HEADS")] = None
    """Attention heads of the decoder."""
    trained_size: Annotated[Size | None, shown(f"{_STORED}, else square", "SIDE|HxW")] = None
    """Height and width of the training images."""
    norm_pix_loss: Annotated[bool | None, shown(f"{_STORED}, else what fits photos", "{True,False}")] = None
    """Whether the decoder predicts per-patch normalised pixels."""
    norm_eps: Annotated[float | None, shown(f"{_STORED}, else 1e-6", "EPS")] = None
    """Epsilon of every layer norm."""
    rows_first: Annotated[bool | None, shown("as the source library does", "{True,False}")] = None
    """Whether the position embedding encodes rows before columns."""


@dataclass(frozen=True, kw_only=True)
class _Overrides:
    """What to change in the model."""

    img_size: Annotated[Size | None, shown("the training size", "SIDE|HxW")] = None
    """Height and width of its images; the position embedding is adapted."""
    in_chans: Annotated[int | None, shown("as trained", "C")] = None
    """Channels of its images; the decoder is dropped."""
    stem: Annotated[Literal["mean", "repeat"] | None, shown("none: required with --in-chans", "{mean,repeat}")] = None
    """Patch-embedding weights of each new channel: the mean over the old channels, or the old ones in turn."""
    mean: Annotated[tuple[float, ...] | None, shown(_STORED, "MEAN")] = None
    """Mean of each channel of its images, values in [0, 1]."""
    std: Annotated[tuple[float, ...] | None, shown(_STORED, "STD")] = None
    """Std of each channel."""
    licence: Annotated[str | None, shown(_STORED, "TEXT")] = None
    """Licence of the weights."""


def run(args: list[str]) -> int:
    """Convert weights of another library to a model of this package."""
    return tyro.cli(import_weights, args=args, prog="mae import")


def import_weights(
    weights: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="WEIGHTS")],
    out: Path,
    metadata: Annotated[_Metadata, tyro.conf.OmitArgPrefixes] = _Metadata(),
    overrides: Annotated[_Overrides, tyro.conf.OmitArgPrefixes] = _Overrides(),
    photo_check: bool = True,
    allow_partial: Annotated[float | None, shown("all of it", "SHARE")] = None,
) -> int:
    """Convert weights of the official MAE, timm, Hugging Face, mmpretrain or lightly to a model of this package.

    The format is recognised by content. The encoder's outputs are compared with those of the source library if it is
    installed, and a decoder must predict photos.

    Args:
        weights: a file of safetensors or torch.save, a folder that save_pretrained or timm wrote, or a name from
            'mae list weights', which is downloaded.
        out: a new file that ends in .safetensors, or a new folder.
        metadata: what the weights themselves do not say.
        overrides: what to change in the model.
        photo_check: check that the decoder predicts photos; turn off for a model of very different images.
        allow_partial: sufficient share of the encoder's values; missing ones are initialised.
    """
    from rich.console import Console

    from mae.evaluation.extractors.extractor import show_loaded
    from mae.interop.imports.catalogue import terms
    from mae.interop.imports.convert import WeightMetadata
    from mae.interop.imports.open import ImportOverrides, import_model
    from mae.text import visible

    _, report = import_model(
        weights,
        out,
        metadata=WeightMetadata(**asdict(metadata)),
        overrides=ImportOverrides(**asdict(overrides)),
        allow_partial=allow_partial,
        photo_check=photo_check,
    )
    console = Console()
    show_loaded(console, report.line())
    if licence := overrides.licence or report.origin.get("licence"):
        console.print(visible(f"Licence {terms(licence)}"), soft_wrap=True, highlight=False, markup=False)
    console.print(f"Model in {visible(str(out))}", soft_wrap=True, highlight=False, markup=False)
    return 0
