"""`mae neighbours MODEL SOURCE --out PNG`."""

from pathlib import Path
from typing import Annotated

import tyro

from mae.cli.early import check_use
from mae.config import Device
from mae.errors import UsageError
from mae.options import shown


def run(args: list[str]) -> int:
    """Draw the sheet and say where it is."""
    return tyro.cli(neighbours, args=args, prog="mae neighbours")


def neighbours(
    model: Annotated[str, tyro.conf.Positional],
    source: Annotated[str, tyro.conf.Positional],
    out: Path = Path("neighbours.png"),
    queries: Annotated[tuple[str, ...], shown("--count of them, drawn", "NAME ...")] = (),
    count: Annotated[int | None, shown("8", "N")] = None,
    k: int = 8,
    feature: str = "mean",
    data_root: Path = Path("data"),
    device: Device = "auto",
    seed: int = 0,
) -> int:
    """Draw the images that a model finds nearest to some others, as one sheet.

    Args:
        model: a run folder, one of its checkpoints, a .safetensors file, timm:NAME or hf:NAME_OR_PATH.
        source: a folder, a list file, a .zip or the name of a known set.
        out: a new .png, or a .csv with a row a neighbour, its rank and similarities.
        queries: names of the images to start from, or ends of their paths.
        count: how many images are drawn to start from, where --queries names none.
        k: neighbours of each.
        feature: what is compared: cls, mean or pooled, as the model has them; learned, of the run's pooled_probe.
        data_root: where sets known by name are kept.
        device: where to compute; auto: CUDA, else Apple's MPS, else the CPU.
        seed: decides which images are drawn.
    """
    check_use(model, source, data_root=data_root)
    if queries and count is not None:
        raise UsageError("--queries names the images to start from, and --count draws some; give one of the two")

    from rich.console import Console

    from mae.evaluation.pictures import nearest
    from mae.text import visible

    drawn = nearest.neighbours(
        model,
        source,
        out=out,
        queries=queries or (8 if count is None else count),
        k=k,
        feature=feature,
        data_root=data_root,
        device=device,
        seed=seed,
    )
    Console().print(f"Look at {visible(str(drawn))}", soft_wrap=True, highlight=False, markup=False)
    return 0
