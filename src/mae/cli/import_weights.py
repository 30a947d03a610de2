"""`mae import FILE|DIR|NAME --out MODEL`."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from mae.config import Size
from mae.options import shown

_TOLD = "what is told beside the weights"


@dataclass(frozen=True, kw_only=True)
class _Told:
    """What the weights do not say."""

    num_heads: Annotated[int | None, shown(f"{_TOLD}, or is usual", "HEADS")] = None
    """Attention heads of the encoder."""
    decoder_num_heads: Annotated[int | None, shown(f"{_TOLD}, or is usual", "HEADS")] = None
    """Attention heads of the decoder."""
    trained_size: Annotated[Size | None, shown(f"{_TOLD}, or a square", "SIDE|HxW")] = None
    """Height and width of the images it was trained on."""
    norm_pix_loss: Annotated[bool | None, shown(f"{_TOLD}, or fits photographs", "{True,False}")] = None
    """Whether the decoder predicts standardised patches, or plain pixels."""
    norm_eps: Annotated[float | None, shown(f"{_TOLD}, or 1e-6", "EPS")] = None
    """Added to the variance in every layer norm."""
    rows_first: Annotated[bool | None, shown("as the layout has it", "{True,False}")] = None
    """Whether its positions count rows first."""


@dataclass(frozen=True, kw_only=True)
class _Wanted:
    """What the model is to be."""

    img_size: Annotated[Size | None, shown("what it was trained on", "SIDE|HxW")] = None
    """Height and width of its images: positions are made for them."""
    in_chans: Annotated[int | None, shown("what it was trained on", "C")] = None
    """Channels of its images; the decoder is left behind."""
    stem: Annotated[Literal["mean", "repeat"] | None, shown("none: needed with --in-chans", "{mean,repeat}")] = None
    """Weights of each new channel: the mean of the old ones', or theirs in turn."""
    mean: Annotated[tuple[float, ...] | None, shown(_TOLD, "SHARE")] = None
    """Mean of each channel of its images, values from 0 to 1."""
    std: Annotated[tuple[float, ...] | None, shown(_TOLD, "SHARE")] = None
    """Deviation of each channel."""
    licence: Annotated[str | None, shown(_TOLD, "TEXT")] = None
    """Terms the weights come under."""


def run(args: list[str]) -> int:
    """Write others' weights as a model of this package and say what they are."""
    return tyro.cli(bring, args=args, prog="mae import")


def bring(
    weights: Annotated[Path, tyro.conf.Positional],
    out: Path,
    told: Annotated[_Told, tyro.conf.OmitArgPrefixes] = _Told(),
    wanted: Annotated[_Wanted, tyro.conf.OmitArgPrefixes] = _Wanted(),
    photographs: bool = True,
    allow_partial: Annotated[float | None, shown("all of it", "SHARE")] = None,
) -> int:
    """Write weights of the official MAE, timm, Hugging Face, mmpretrain or lightly as a model of this package.

    They are told by their content. The encoder is compared with the library they come from where it is installed, and a
    decoder must predict photographs.

    Args:
        weights: a file of safetensors or of torch.save, a folder that save_pretrained or timm wrote, or a name of
            'mae list weights', which is fetched.
        out: a new file that ends in .safetensors, or a new folder.
        told: what the weights do not say.
        wanted: what the model is to be.
        photographs: try the decoder on photographs; not for a model of images that are nothing like them.
        allow_partial: share of the encoder that is enough; what is missing is fresh.
    """
    from rich.console import Console

    from mae.evaluation.extractors import show_loaded
    from mae.interop.catalogue import terms
    from mae.interop.official import Told
    from mae.interop.opening import Wanted, bring_in
    from mae.report.canvas import visible

    _, report = bring_in(
        weights,
        out,
        told=Told(**asdict(told)),
        wanted=Wanted(**asdict(wanted)),
        allow_partial=allow_partial,
        see_photographs=photographs,
    )
    console = Console()
    show_loaded(console, report.line())
    if licence := wanted.licence or report.origin.get("licence"):
        console.print(visible(f"Licence {terms(licence)}"), soft_wrap=True, highlight=False, markup=False)
    console.print(f"Model in {visible(str(out))}", soft_wrap=True, highlight=False, markup=False)
    return 0
