"""`mae embed MODEL SOURCE --out FILE`."""

import os
from pathlib import Path
from typing import Annotated

import tyro

from mae.cli.early import check_use
from mae.config import Device
from mae.options import shown


def run(args: list[str]) -> int:
    """Write features to a file and say where they are."""

    def embed(
        model: Annotated[str, tyro.conf.Positional],
        source: Annotated[str, tyro.conf.Positional],
        out: Path,
        features: Annotated[tuple[str, ...], shown("all but patches", "FEATURE ...")] = (),
        pool: Annotated[str | None, shown("none", "learned|FILE")] = None,
        data_root: Path = Path("data"),
        device: Device = "auto",
        gpus: Annotated[int | None, shown("one", "N")] = None,
    ) -> int:
        """Write a model's features of images to a file, a row an image with its name, height and width.

        Args:
            model: a run folder, one of its checkpoints, a .safetensors file, timm:NAME or hf:NAME_OR_PATH.
            source: a folder, a list file, a .zip or the name of a known set.
            out: a new file that ends in .parquet, .csv, .npz or .safetensors.
            features: cls, mean, pooled or patches, as the model has them.
            pool: write the vector that 'mae evaluate pooled_probe' learned to make of patch tokens: learned, the
                run's, or that of the probe's file.
            data_root: where sets known by name are kept.
            device: where to compute; auto: CUDA, else Apple's MPS, else the CPU.
            gpus: compute on so many GPUs of this machine, a process each; with --device cpu so many processes.
        """
        check_use(model, source, data_root=data_root)
        if gpus is not None:
            from mae.cli.launch import launch

            return launch(gpus, device=device, command=["embed", *args])

        from rich.console import Console

        from mae.evaluation.pictures import embed as embedding
        from mae.text import visible

        written = embedding.embed(
            model, source, out=out, features=features, pool=pool, data_root=data_root, device=device
        )
        console = Console(quiet=os.environ.get("RANK", "0") != "0")
        console.print(f"Features in {visible(str(written))}", soft_wrap=True, highlight=False, markup=False)
        return 0

    return tyro.cli(embed, args=args, prog="mae embed")
