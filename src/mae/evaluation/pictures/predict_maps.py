"""The classes that a trained segmenter gives to the pixels of images, as files."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path, PurePosixPath

import torch
from PIL import Image

from mae.credentials import concealed
from mae.data.decode.limits import UnreadableImage
from mae.errors import MAEError, UsageError
from mae.evaluation.common.dense import resized_map
from mae.evaluation.common.finetuning import SEGMENTER_FILE
from mae.evaluation.pictures.predict import images_for, only_file
from mae.evaluation.pictures.segmentation import draw_segmentation, spread
from mae.models.file import is_segmenter, load_with_report
from mae.models.inference import undisturbed
from mae.models.preprocess import preprocessing_of
from mae.models.segmenter import Segmenter
from mae.models.sliding import map_of_classes
from mae.records import check_new, safe_name, write_whole
from mae.text import visible
from mae.training.device import choose_device

_DRAWN = 8
CLASSES = "classes.txt"


@dataclass(frozen=True, kw_only=True)
class WrittenMaps:
    """What was written.

    Attributes:
        images: how many.
        unreadable: what is wrong with each image that could not be read, or that has no map.
    """

    images: int
    unreadable: tuple[str, ...]


def find_segmenter(path: Path) -> Path | None:
    """The file of a segmenter: itself, or the only one in a folder; None where there is none."""
    return only_file(path, SEGMENTER_FILE, is_segmenter)


def predict_maps(
    model: Path, source: str, *, out: Path, sheet: Path | None, data_root: Path, device: str
) -> WrittenMaps:
    """Write the map of classes of every image as a PNG of its size, and the names of the classes.

    Args:
        model: the file of a segmenter.
        source: images, see `mae.embed`; of those with a test part that part.
        out: a new folder.
        sheet: a new PNG of some images and their maps; None: none is drawn.
        data_root: where sets known by name are kept.
        device: `auto`, `cpu`, `cuda` or `mps`.

    Raises:
        UsageError: no images, another suffix than .png, or a file or folder that is there already.
        MAEError: no image can be read, or a damaged file.
    """
    check_new(out)
    if sheet is not None:
        check_new(sheet)
        if sheet.suffix != ".png":
            raise UsageError(f"{sheet} cannot be written; end its name with .png")
    segmenter = load_with_report(model)[0]
    assert isinstance(segmenter, Segmenter)
    where = choose_device(device)
    wanted = preprocessing_of(segmenter.config)
    images = images_for(concealed(source), data_root, wanted)
    segmenter.to(where)
    shown = set(spread(len(images), _DRAWN).tolist())
    drawn: dict[int, torch.Tensor] = {}
    names: set[str] = set()
    unreadable = []
    with undisturbed(segmenter):
        for number in range(len(images)):
            try:
                image = images.get(number)
            except UnreadableImage as error:
                unreadable.append(str(error))
                continue
            try:
                found = map_of_classes(image, wanted, segmenter, device=where)
            except MAEError as error:  # another shape than can be told
                unreadable.append(f"{images.item_name(number)} is {error}")
                continue
            stem = safe_name(PurePosixPath(images.item_name(number)).stem)
            name = next(name for name in _numbered(stem, number) if name not in names)
            names.add(name)
            out.mkdir(parents=True, exist_ok=True)
            Image.fromarray(found.numpy()).save(out / f"{name}.png")
            if number in shown:
                drawn[number] = resized_map(found.numpy(), wanted.img_size)
    if not names:
        raise MAEError(f"no image can be read: {next(iter(unreadable), 'there is none')}")
    class_names = segmenter.class_names or tuple(f"class {number}" for number in range(segmenter.num_classes))
    write_whole(out / CLASSES, "".join(f"{visible(name)}\n" for name in class_names))
    if sheet is not None:
        rows = [int((images.readable == number).nonzero()[0, 0]) for number in drawn]
        draw_segmentation(
            images,
            replace(wanted, crop_share=None),
            torch.tensor(rows),
            None,
            {"classes": torch.stack(list(drawn.values()))},
            class_names=class_names,
            title=f"Classes of {source}",
            path=sheet,
        )
    return WrittenMaps(images=len(names), unreadable=tuple(unreadable))


def _numbered(stem: str, number: int) -> Iterator[str]:
    """A name and what may stand for it where it is taken."""
    yield stem
    yield from (f"{stem}-{each}" for each in count(number))
