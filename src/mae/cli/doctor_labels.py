"""`mae doctor labels FOLDER`."""

import json as jsons
import sys
import time
from pathlib import Path
from typing import Annotated

import tyro

from mae.errors import MAEError, UsageError
from mae.options import shown
from mae.records import check_new


def run(args: list[str]) -> int:
    """Check labels and draw some of them; the exit code is 1 where training would be spoilt."""
    return tyro.cli(labels, args=args, prog="mae doctor labels", config=(tyro.conf.FlagCreatePairsOff,))


def labels(
    folder: Annotated[Path, tyro.conf.Positional],
    out: Annotated[Path, shown("labels.png", "FILE")] = Path("labels.png"),
    ignore: Annotated[tuple[int, ...], shown("255 alone", "NUMBER ...")] = (),
    json: bool = False,
) -> int:
    """Look for silent faults in labels, and draw eight labelled images.

    Args:
        folder: images with boxes or outlines (COCO, YOLO, Pascal VOC), or images/ with masks/.
        out: a new PNG.
        ignore: numbers in masks that do not count, beside 255.
        json: print one JSON object instead of lines.
    """
    check_new(out)
    if out.suffix.lower() != ".png":
        raise UsageError(f"--out is {out}; expected a name that ends in .png")

    from rich.console import Console

    from mae.report.terminal.console import side_console, stage
    from mae.text import visible

    told = side_console()
    with stage(told, "Loading PyTorch"):
        from mae.data.inspect.labels import inspect_labels
        from mae.evaluation.pictures.labels import draw_labels
        from mae.report.terminal.diagnosis import Diagnosis, show_diagnosis

    began = time.monotonic()
    with stage(told, f"Reading the images and labels of {folder}"):
        findings, data = inspect_labels(folder, ignore=ignore)
    found = Diagnosis(findings=tuple(findings), seconds=time.monotonic() - began)
    look = "No picture is drawn: put the faults right first"
    if data is not None:
        try:
            draw_labels(data.train, title=f"Labels of {folder}", path=out)
            look = f"Look at {out}"
        except MAEError as error:  # what is found is told all the same
            look = f"No picture is drawn: {error}"
    if json:
        sys.stdout.write(jsons.dumps(found.to_json()) + "\n")
        return 1 if found.fatal else 0
    console = Console()
    show_diagnosis(console, found, everything=True)
    console.print(visible(look), soft_wrap=True, highlight=False, markup=False)
    return 1 if found.fatal else 0
