"""`mae predict MODEL SOURCE`."""

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Annotated

import tyro

from mae.cli.early import check_use
from mae.config import Device
from mae.options import shown


def run(args: list[str]) -> int:
    """Write what a model says of images to a file or a folder and say where it is."""
    return tyro.cli(predict, args=args, prog="mae predict")


def predict(
    model: Annotated[str, tyro.conf.Positional],
    source: Annotated[str, tyro.conf.Positional],
    out: Annotated[Path | None, shown("predictions.csv; for pixels and objects the folder predictions", "PATH")] = None,
    sheet: Annotated[Path | None, shown("none", "FILE.png")] = None,
    top: Annotated[int | None, shown("5", "INT")] = None,
    data_root: Path = Path("data"),
    device: Device = "auto",
) -> int:
    """Tell the classes of images or of their pixels, or find objects, by a model that mae has trained for that.

    Args:
        model: its file, or the folder of a run that holds one.
        source: a folder, a list file, a .zip or the name of a known set; of one with a test part that part.
        out: a new .csv or .json: each image's name, its class, and the most probable classes with probabilities. Of a
            segmenter a new folder: for each image a PNG of its size with numbers of classes, classes.txt, and maps.csv,
            which tells whose each is; of a detector one with a picture of each image with boxes, and COCO's json.
        sheet: draw the surest and the least sure images of each predicted class too; of a segmenter some maps.
        top: classes in a row at the most, by a model that tells the classes of images.
        data_root: where sets known by name are kept.
        device: where to compute; auto: CUDA, else Apple's MPS, else the CPU.
    """
    check_use(model, source, data_root=data_root)

    from mae.errors import UsageError
    from mae.evaluation.pictures.predict import classifiers_in
    from mae.evaluation.pictures.predict_maps import find_segmenter
    from mae.evaluation.pictures.predicted_objects import find_detector

    segmenter, detector = find_segmenter(Path(model)), find_detector(Path(model))
    kinds = [segmenter, detector, *classifiers_in(Path(model))[:1]]
    if len(several := [str(file) for file in kinds if file is not None]) > 1:
        raise UsageError(f"{model} holds models of several kinds; name one, such as {' or '.join(several)}")
    other = segmenter or detector
    folder = _folder(out, other)
    if top is not None and other is not None:
        what = "tells the classes of pixels" if other == segmenter else "finds objects"
        raise UsageError(f"--top is of the classes of whole images, and {other} {what}; leave it out")
    if segmenter is not None:
        lines = _predict_maps(segmenter, source, out=folder, sheet=sheet, data_root=data_root, device=device)
    elif detector is None:
        table = out or Path("predictions.csv")
        lines = _predict_classes(model, source, out=table, sheet=sheet, top=top, data_root=data_root, device=device)
    elif sheet is not None:
        raise UsageError(f"--sheet is of classes, and {detector} finds objects, drawn in --out; leave it out")
    else:
        lines = _find_objects(detector, source, out=folder, data_root=data_root, device=device)
    _tell([*lines, *([f"Look at {sheet}"] if sheet is not None else [])])
    return 0


def _folder(out: Path | None, file: Path | None) -> Path:
    """Where a model that writes a folder writes it."""
    from mae.errors import UsageError

    folder = out or Path("predictions")
    if file is not None and folder.suffix.lower() in (".csv", ".json"):
        raise UsageError(
            f"--out is {folder}, and of {file} a folder is written; give its name, such as {folder.with_suffix('')}"
        )
    return folder


def _predict_maps(
    file: Path, source: str, *, out: Path, sheet: Path | None, data_root: Path, device: Device
) -> list[str]:
    from mae.data.sources.folder import count_of
    from mae.evaluation.pictures.predict_maps import TABLE, predict_maps

    lines: list[str] = []
    with _stage(f"Telling the classes of the pixels of {source}"):
        maps = predict_maps(file, source, out=out, sheet=sheet, data_root=data_root, device=device, tell=lines.append)
    return [
        *lines,
        count_of(maps.images, "image"),
        *maps.unreadable.values(),
        f"Maps of classes in {out}, named in {TABLE}",
    ]


def _find_objects(file: Path, source: str, *, out: Path, data_root: Path, device: Device) -> list[str]:
    from mae.data.sources.folder import count_of
    from mae.evaluation.pictures.predicted_objects import FILE, find_objects

    lines: list[str] = []
    with _stage(f"Finding objects in {source}"):
        objects = find_objects(file, source, out=out, data_root=data_root, device=device, tell=lines.append)
    count = sum(len(of.scores) for of in objects.values())
    return [*lines, f"{count_of(len(objects), 'image')}, {count_of(count, 'object')}: pictures and {FILE} in {out}"]


def _predict_classes(
    model: str, source: str, *, out: Path, sheet: Path | None, top: int | None, data_root: Path, device: Device
) -> list[str]:
    from collections import Counter

    from mae.data.sources.folder import count_of
    from mae.evaluation.pictures.predict import TOP
    from mae.evaluation.pictures.predict import predict as predict_classes

    top = TOP if top is None else top
    with _stage(f"Naming the classes of {source}"):
        found = predict_classes(model, source, out=out, sheet=sheet, top=top, data_root=data_root, device=device)
    told = [f"{count:,} {name}" for name, count in Counter(found.classes).most_common()]
    lines = [f"{count_of(len(found.names), 'image')}: {', '.join(told[:8])}{', ...' if len(told) > 8 else ''}"]
    if found.unreadable:
        lines.append(f"{count_of(len(found.unreadable), 'file')} cannot be read; see the end of {out}")
    return [*lines, f"Classes in {out}"]


def _stage(what: str) -> AbstractContextManager[None]:
    from rich.console import Console

    from mae.report.terminal.console import stage

    return stage(Console(), what)


def _tell(lines: list[str]) -> None:
    from rich.console import Console

    from mae.text import visible

    console = Console()
    for line in lines:
        console.print(visible(line), soft_wrap=True, highlight=False, markup=False)
