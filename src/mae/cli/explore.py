"""`mae explore RUN`."""

from pathlib import Path
from typing import Annotated, Literal

import tyro

from mae.cli.early import check_use
from mae.config import Device
from mae.options import shown


def run(args: list[str]) -> int:
    """Write the page and say where it is."""
    return tyro.cli(explore, args=args, prog="mae explore")


def explore(
    run: Annotated[str, tyro.conf.Positional],
    data: Annotated[str | None, shown("the run's images", "SOURCE")] = None,
    out: Annotated[Path | None, shown("explore.html in the run's folder", "FILE")] = None,
    images: int = 2000,
    map: Literal["pca", "umap"] = "pca",
    pictures: Annotated[Path | None, shown("none", "FOLDER")] = None,
    list: Annotated[Path | None, shown("none", "FILE")] = None,
    data_root: Path = Path("data"),
    device: Device = "auto",
) -> int:
    """Look into a run: a page with a map of its images, what is alike to the model, odd images and duplicates.

    Args:
        run: a run folder, one of its checkpoints or a .safetensors file.
        data: a folder, a list file, a .zip or the name of a known set; with classes the map has their colours.
        out: a new .html.
        images: how many images are looked at, drawn by chance, the same ones each time.
        map: pca, two principal components; umap keeps neighbours together and needs openmae[umap].
        pictures: a folder for the pictures as files.
        list: a new .csv with a row for each odd image and each pair of duplicates.
        data_root: where sets known by name are kept.
        device: where to compute; auto: CUDA, else Apple's MPS, else the CPU.
    """
    check_use(run, *([] if data is None else [data]), data_root=data_root)

    from rich.console import Console

    from mae.exploration.run import explore as write
    from mae.text import visible

    page = write(
        run,
        data=data,
        out=out,
        images=images,
        map=map,
        pictures=pictures,
        list=list,
        data_root=data_root,
        device=device,
    )
    Console().print(f"Look at {visible(str(page))}", soft_wrap=True, highlight=False, markup=False)
    return 0
