"""`mae reconstruct MODEL IMAGE...`."""

from pathlib import Path
from typing import Annotated

import tyro

from mae.cli.early import check_use
from mae.config import Device
from mae.errors import UsageError
from mae.options import shown


def run(args: list[str]) -> int:
    """Draw the pictures and say where they are."""
    return tyro.cli(reconstruct, args=args, prog="mae reconstruct", config=(tyro.conf.FlagCreatePairsOff,))


def reconstruct(
    model: Annotated[str, tyro.conf.Positional],
    images: Annotated[tuple[Path, ...], tyro.conf.Positional],
    out: Annotated[Path | None, shown("reconstruction.png; with --animation reconstruction.gif", "FILE")] = None,
    mask_ratio: Annotated[tuple[float, ...], shown("the model's own", "SHARE ...")] = (),
    mask: Annotated[Path | None, shown("drawn by --seed", "FILE")] = None,
    inpaint: bool = False,
    animation: bool = False,
    rgb: tuple[str, ...] = (),
    seed: int = 0,
    device: Device = "auto",
) -> int:
    """Draw what a model makes of the masked patches of images, a row an image.

    Args:
        model: a run folder, one of its checkpoints or a .safetensors file; with --animation a run folder.
        images: image files; they are resized and cropped to the model's size as evaluation does.
        out: a new PNG, or GIF.
        mask_ratio: share of patches masked; of several, a row each.
        mask: a black and white picture of what to mask, white = masked, in the size of the images.
        inpaint: fill the mask as a hole: what stands under it is not used, and the filled picture is written too.
        animation: a GIF with a frame for each checkpoint that the run kept, see --checkpoint-keep-every of 'mae
            pretrain'.
        rgb: names of the channels shown as red, green and blue, or of one shown as grey.
        seed: decides the masks.
        device: where to compute; auto: CUDA, else Apple's MPS, else the CPU.
    """
    if animation and (inpaint or len(mask_ratio) > 1):
        raise UsageError("--animation shows one mask and its truth; leave out --inpaint and give one --mask-ratio")

    check_use(model)

    from rich.console import Console

    from mae.evaluation.extractors.extractor import show_loaded
    from mae.evaluation.pictures import reconstruct as pictures
    from mae.text import visible

    if animation:
        ratio = mask_ratio[0] if mask_ratio else None
        target = out or Path("reconstruction.gif")
        frames = len(pictures.kept_checkpoints(model))
        Console().print(
            f"{frames} checkpoints, {frames} frames; --checkpoint-keep-every of 'mae pretrain' keeps more",
            highlight=False,
        )
        written: tuple[Path, ...] = (
            pictures.animate(model, images, out=target, mask_ratio=ratio, mask=mask, rgb=rgb, seed=seed, device=device),
        )
    else:
        drawn = pictures.reconstruct(
            model,
            images,
            mask_ratio=mask_ratio or None,
            mask=mask,
            inpaint=inpaint,
            rgb=rgb,
            seed=seed,
            out=out or Path("reconstruction.png"),
            device=device,
        )
        show_loaded(Console(), drawn.loaded)
        written = drawn.written
    for path in written:
        Console().print(f"Look at {visible(str(path))}", soft_wrap=True, highlight=False, markup=False)
    return 0
