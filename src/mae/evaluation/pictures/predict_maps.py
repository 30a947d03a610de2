"""The classes that a trained segmenter gives to the pixels of images, as files."""

import csv
import io
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path, PurePosixPath

import torch
from jaxtyping import UInt8
from PIL import Image
from torch import Tensor

from mae.credentials import concealed
from mae.data.dataset.images import ImageSet
from mae.data.decode.limits import UnreadableImage
from mae.errors import MAEError, UsageError
from mae.evaluation.common.dense import resized_map
from mae.evaluation.common.finetuning import SEGMENTER_FILE
from mae.evaluation.pictures.predict import images_for, name_within, only_file, write_names
from mae.evaluation.pictures.segmentation import draw_segmentation, spread
from mae.models.file import is_segmenter, load_with_report
from mae.models.inference import undisturbed
from mae.models.preprocess import preprocessing_of
from mae.models.segmenter import Segmenter
from mae.models.sliding import map_of_classes
from mae.records import check_new, short_name, whole_folder, write_whole
from mae.text import visible
from mae.training.device import choose_device

_DRAWN = 8
CLASSES, TABLE = "classes.txt", "maps.csv"
"""The names of the classes, and which map is whose; in the folder of the maps."""


@dataclass(frozen=True, kw_only=True)
class WrittenMaps:
    """What was written.

    Attributes:
        images: how many.
        unreadable: what is wrong with each image that could not be read, or that has no map, by its name.
    """

    images: int
    unreadable: Mapping[str, str]


def find_segmenter(path: Path) -> Path | None:
    """The file of a segmenter: itself, or the only one in a folder; None where there is none."""
    return only_file(path, SEGMENTER_FILE, is_segmenter)


def predict_maps(
    model: Path,
    source: str,
    *,
    out: Path,
    sheet: Path | None,
    data_root: Path,
    device: str,
    tell: Callable[[str], object],
) -> WrittenMaps:
    """Write the map of classes of every image as a PNG of its size, the names of the classes, and which map is whose.

    Args:
        model: the file of a segmenter.
        source: images, see `mae.embed`; of those with a test part that part.
        out: a new folder: maps in the folders of their images, `classes.txt`, and `maps.csv` with a row an image.
        sheet: a new PNG of some images and their maps; None: none is drawn.
        data_root: where sets known by name are kept.
        device: `auto`, `cpu`, `cuda` or `mps`.
        tell: is given what is unusual about the values of the images, if anything is.

    Raises:
        UsageError: no images, values in another unit than the model expects, another suffix than .png, or a file or
            folder that is there already.
        MAEError: no image can be read, a damaged file, or no place to write; nothing is left then.
    """
    check_new(out)
    if sheet is not None:
        check_new(sheet)
        if sheet.suffix != ".png":
            raise UsageError(f"{sheet} cannot be written; end its name with .png")
    segmenter = load_with_report(model)[0]
    assert isinstance(segmenter, Segmenter)
    segmenter.to(choose_device(device))
    images = images_for(concealed(source), data_root, preprocessing_of(segmenter.config), tell=tell)
    shown = spread(len(images), _DRAWN).tolist()
    drawn: dict[int, Tensor] = {}
    maps: dict[str, str] = {}
    unreadable: dict[str, str] = {}
    with whole_folder(out) as folder, undisturbed(segmenter):
        place = None if sheet is None else _staged(sheet, out, folder)
        for number in range(len(images)):
            name = images.item_name(number)
            try:
                found = _map_of(images, number, segmenter)
            except UnreadableImage as error:
                unreadable[name] = str(error)
                continue
            paths = _paths(name_within(name, source), number)
            path = next(path for path in paths if folder / path != place and not (folder / path).exists())
            maps[path] = name
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(found.numpy()).save(folder / path)
            if shown and number >= shown[0]:  # it, or the next one that can be read
                shown = [later for later in shown if later > number]
                drawn[number] = resized_map(found.numpy(), preprocessing_of(segmenter.config).img_size)
        if not maps:
            raise MAEError(f"no image can be read: {next(iter(unreadable.values()), 'there is none')}")
        write_whole(folder / CLASSES, "".join(f"{visible(name)}\n" for name in _class_names(segmenter)))
        write_names(folder / TABLE, _as_csv(maps, unreadable))
        if place is not None:
            _draw(images, drawn, segmenter, title=f"Classes of {source}", path=place)
    return WrittenMaps(images=len(maps), unreadable=unreadable)


def _staged(path: Path, out: Path, folder: Path) -> Path:
    """Where a file is written until the folder that stands for `out` becomes it."""
    whole, outer = path.resolve(), out.resolve()
    return folder / whole.relative_to(outer) if whole.is_relative_to(outer) else path


def _map_of(images: ImageSet, number: int, segmenter: Segmenter) -> UInt8[Tensor, "h w"]:
    """The class of each pixel of an image; raises `UnreadableImage`, of another shape than can be told too."""
    image, device = images.get(number), next(segmenter.parameters()).device
    try:
        return map_of_classes(image, preprocessing_of(segmenter.config), segmenter, device=device)
    except MAEError as error:
        raise UnreadableImage(f"{images.item_name(number)} is {error}") from error


def _paths(name: str, number: int) -> Iterator[str]:
    """Where the map of an image lies, and where else if another map does."""
    path = PurePosixPath(name)
    folders, stem = [short_name(part) for part in path.parts[:-1] if part not in ("/", "..")], short_name(path.stem)
    yield "/".join([*folders, f"{stem}.png"])
    yield from ("/".join([*folders, f"{stem}-{each}.png"]) for each in count(number))


def _class_names(segmenter: Segmenter) -> tuple[str, ...]:
    return segmenter.class_names or tuple(f"class {number}" for number in range(segmenter.num_classes))


def _as_csv(maps: Mapping[str, str], unreadable: Mapping[str, str]) -> str:
    """A row an image; images without a map at the end."""
    lines = io.StringIO()
    rows = csv.writer(lines, lineterminator="\n")
    rows.writerow(["map", "image", "problem"])
    rows.writerows([path, name, ""] for path, name in maps.items())
    rows.writerows(["", name, problem] for name, problem in unreadable.items())
    return lines.getvalue()


def _draw(images: ImageSet, drawn: Mapping[int, Tensor], segmenter: Segmenter, *, title: str, path: Path) -> None:
    """Some images and their maps, by the images' numbers."""
    rows = [int((images.readable == number).nonzero()[0, 0]) for number in drawn]
    draw_segmentation(
        images,
        replace(preprocessing_of(segmenter.config), crop_share=None),
        torch.tensor(rows),
        None,
        {"classes": torch.stack(list(drawn.values()))},
        class_names=_class_names(segmenter),
        title=title,
        path=path,
    )
