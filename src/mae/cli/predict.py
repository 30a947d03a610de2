"""`mae predict MODEL SOURCE`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from mae.cli.early import check_use
from mae.config import Device
from mae.options import shown

if TYPE_CHECKING:
    from rich.console import Console


def run(args: list[str]) -> int:
    """Write what a model says of images to a file or a folder and say where it is."""
    return tyro.cli(predict, args=args, prog="mae predict")


def predict(
    model: Annotated[str, tyro.conf.Positional],
    source: Annotated[str, tyro.conf.Positional],
    out: Annotated[Path | None, shown("predictions.csv; for pixels and objects the folder predictions", "PATH")] = None,
    sheet: Annotated[Path | None, shown("none", "FILE.png")] = None,
    top: int = 5,
    data_root: Path = Path("data"),
    device: Device = "auto",
) -> int:
    """Tell the classes of images or of their pixels, or find objects, by a model that mae has trained for that.

    Args:
        model: its file, or the folder of a run that holds one.
        source: a folder, a list file, a .zip or the name of a known set; of one with a test part that part.
        out: a new .csv or .json: each image's name, its class, and the most probable classes with probabilities. Of a
            segmenter a new folder: for each image a PNG of its size with numbers of classes, and classes.txt; of a
            detector one with a picture of each image with boxes, and COCO's json.
        sheet: draw the surest and the least sure images of each predicted class too; of a segmenter some maps.
        top: classes in a row at the most.
        data_root: where sets known by name are kept.
        device: where to compute; auto: CUDA, else Apple's MPS, else the CPU.
    """
    check_use(model, source, data_root=data_root)

    from collections import Counter

    from rich.console import Console

    from mae.errors import UsageError
    from mae.evaluation.pictures import predict as prediction
    from mae.evaluation.pictures import predict_maps, predicted_objects
    from mae.report.terminal.console import stage

    console = Console()
    where = out or Path("predictions.csv")
    folder = out or Path("predictions")
    segmenter, detector = (find(Path(model)) for find in (predict_maps.find_segmenter, predicted_objects.find_detector))
    kinds = [segmenter, detector, *prediction.classifiers_in(Path(model))[:1]]
    if len(several := [str(file) for file in kinds if file is not None]) > 1:
        raise UsageError(f"{model} holds models of several kinds; name one, such as {' or '.join(several)}")
    if segmenter is not None:
        with stage(console, f"Telling the classes of the pixels of {source}"):
            maps = predict_maps.predict_maps(
                segmenter, source, out=folder, sheet=sheet, data_root=data_root, device=device
            )
        lines = [f"{maps.images:,} images", *maps.unreadable, f"Maps of classes in {folder}"]
        _tell(console, [*lines, *([f"Look at {sheet}"] if sheet is not None else [])])
        return 0
    if detector is not None:
        if sheet is not None:
            raise UsageError(f"--sheet is of classes, and {detector} finds objects, drawn in --out; leave it out")
        unreadable: list[str] = []
        with stage(console, f"Finding objects in {source}"):
            objects = predicted_objects.find_objects(
                detector, source, out=folder, data_root=data_root, device=device, unreadable=unreadable.append
            )
        count = sum(len(of.scores) for of in objects.values())
        said = f"{len(objects):,} images, {count:,} objects: pictures and {predicted_objects.FILE} in {folder}"
        _tell(console, [*unreadable, said])
        return 0
    with stage(console, f"Naming the classes of {source}"):
        found = prediction.predict(
            model, source, out=where, sheet=sheet, top=top, data_root=data_root, device=device, quiet=True
        )
    told = [f"{count:,} {name}" for name, count in Counter(found.classes).most_common()]
    lines = [f"{len(found.names):,} images: {', '.join(told[:8])}{', ...' if len(told) > 8 else ''}"]
    if found.unreadable:
        lines.append(f"{len(found.unreadable):,} files cannot be read; they stand at the end of {where}")
    lines += [f"Classes in {where}", *([f"Look at {sheet}"] if sheet is not None else [])]
    _tell(console, lines)
    return 0


def _tell(console: "Console", lines: list[str]) -> None:
    from mae.text import visible

    for line in lines:
        console.print(visible(line), soft_wrap=True, highlight=False, markup=False)
