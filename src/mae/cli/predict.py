"""`mae predict MODEL SOURCE`."""

from pathlib import Path
from typing import Annotated

import tyro

from mae.cli.early import check_use
from mae.config import Device
from mae.options import shown


def run(args: list[str]) -> int:
    """Write the classes of images to a file and say where it is."""
    return tyro.cli(predict, args=args, prog="mae predict")


def predict(
    model: Annotated[str, tyro.conf.Positional],
    source: Annotated[str, tyro.conf.Positional],
    out: Annotated[Path | None, shown("predictions.csv; the folder predictions for objects", "PATH")] = None,
    sheet: Annotated[Path | None, shown("none", "FILE.png")] = None,
    top: int = 5,
    data_root: Path = Path("data"),
    device: Device = "auto",
) -> int:
    """Name the classes of images by a classifier, or find objects in them by a detector, that mae trained.

    Args:
        model: its file, or the folder of a run that holds one.
        source: a folder, a list file, a .zip or the name of a known set; of one with a test part that part.
        out: a new .csv or .json: each image's name, its class, and the most probable classes with probabilities; of
            a detector a new folder: a picture of each image with boxes, and COCO's json.
        sheet: draw the surest and the least sure images of each predicted class too.
        top: classes in a row at the most.
        data_root: where sets known by name are kept.
        device: where to compute; auto: CUDA, else Apple's MPS, else the CPU.
    """
    check_use(model, source, data_root=data_root)

    from collections import Counter

    from rich.console import Console

    from mae.evaluation.pictures import predict as prediction
    from mae.evaluation.pictures import predicted_objects
    from mae.models.file import is_detector
    from mae.report.terminal.console import stage
    from mae.text import visible

    console = Console()
    if is_detector(Path(model)):
        folder = out or Path("predictions")
        with stage(console, f"Finding objects in {source}"):
            objects = predicted_objects.find_objects(model, source, out=folder, data_root=data_root, device=device)
        count = sum(len(of.scores) for of in objects.values())
        line = f"{len(objects):,} images, {count:,} objects: pictures and {predicted_objects.FILE} in {folder}"
        console.print(visible(line), soft_wrap=True, highlight=False, markup=False)
        return 0
    out = out or Path("predictions.csv")
    with stage(console, f"Naming the classes of {source}"):
        found = prediction.predict(
            model, source, out=out, sheet=sheet, top=top, data_root=data_root, device=device, quiet=True
        )
    told = [f"{count:,} {name}" for name, count in Counter(found.classes).most_common()]
    lines = [f"{len(found.names):,} images: {', '.join(told[:8])}{', ...' if len(told) > 8 else ''}"]
    if found.unreadable:
        lines.append(f"{len(found.unreadable):,} files cannot be read; they stand at the end of {out}")
    lines += [f"Classes in {out}", *([f"Look at {sheet}"] if sheet is not None else [])]
    for line in lines:
        console.print(visible(line), soft_wrap=True, highlight=False, markup=False)
    return 0
