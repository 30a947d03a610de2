"""Pascal VOC's labels: an XML file for each image."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import nan
from pathlib import Path, PurePosixPath
from typing import TypeAlias
from xml.etree import ElementTree

import numpy as np

from mae.data.annotations.objects import Objects, objects_of
from mae.data.annotations.parts import PARTS, below, check_one_each, first
from mae.data.annotations.written import MOST_PIXELS, Written, WrittenPart, check_any, left_out, read_text
from mae.data.sources.folder import is_image, open_files, walk
from mae.errors import MAEError, UsageError

_IMAGES = ("jpegimages", "images", "image")
_LISTS = (("trainval", "test"), ("train", "val"), ("train", "test"))
"""Names of the lists of both parts; the first two that there are count, so that of VOC 2007 no image is wasted."""
_MOST_BYTES = 16 << 20
_CORNERS = ("xmin", "ymin", "xmax", "ymax")


@dataclass(frozen=True, kw_only=True)
class _Labels:
    """What one file says: the image's width and height, 0 where it does not, and the objects."""

    size: tuple[int, int]
    names: list[str]
    boxes: list[list[float]]
    difficult: list[bool]

    def objects(self, numbers: dict[str, int]) -> Objects:
        return objects_of(self.boxes, [numbers[name] for name in self.names], self.difficult)


def read(root: Path, *, name: str) -> Written | None:
    """The labels of a folder with `Annotations/` beside `JPEGImages/`, or with XML files beside images; None: no such.

    Which images are in which part is listed in `ImageSets/Main/`, in `trainval.txt` and `test.txt`, else in `train.txt`
    and `val.txt`; or there are folders `train/` and `val/`. VOC counts pixels from 1, and its corners lie in the box;
    here pixels are counted from 0, and right and bottom edges lie behind the last pixel. So 1 is taken off the left
    and the top, while the right and the bottom stay as they are.

    Raises:
        UsageError: a part without labels or whose labelled images are not there, or two images that are called alike
            but for the ending.
        MAEError: a file that is no such XML.
    """
    found, lists = _found(root)
    pairs = {
        part: [(image, xml) for image, xml in each if image is not None and xml is not None]
        for part, each in found.items()
    }
    if not any(pairs.values()):
        return None
    _check_labelled(found, pairs, name)
    labels = {part: [_labels(xml) for _, xml in labelled] for part, labelled in pairs.items()}
    class_names = sorted({label for read in labels.values() for each in read for label in each.names})
    numbers = {label: number for number, label in enumerate(class_names)}
    parts = {}
    for part, each in labels.items():
        source, rows = open_files(root, [image for image, _ in pairs[part]])
        parts[part] = WrittenPart(
            source=check_any(source, listed=len(found[part]), part=part, name=name),
            objects=[each[row].objects(numbers) for row in rows],
            sizes=np.array([each[row].size for row in rows], dtype=np.int64),
        )
    images = [image for each in found.values() for image, _ in each]
    missing = images.count(None)
    without = len(images) - missing - sum(map(len, pairs.values()))
    remarks = (
        *lists,
        *left_out(without, "without labels"),
        *left_out(missing, "listed or labelled but not there"),
    )
    return Written(kind="Pascal VOC", parts=parts, class_names=tuple(class_names), remarks=remarks)


_Pair: TypeAlias = tuple[str | None, Path | None]
"""An image, by its path below the folder, and its labels; None for what is not there."""


def _check_labelled(found: Mapping[str, list[_Pair]], pairs: Mapping[str, object], name: str) -> None:
    """Refuse a part with images and without labels."""
    for part, each in found.items():
        images = [image for image, _ in each if image is not None]
        if images and not pairs[part]:
            raise UsageError(
                f"{name}: none of the {part} part's images has labels; expected {PurePosixPath(images[0]).stem}.xml "
                f"for {images[0]}"
            )


def _found(root: Path) -> tuple[dict[str, list[_Pair]], list[str]]:
    """The images of each part with their labels, and a line on the lists that tell the parts."""
    there = below(root)
    images, labels = first(there, _IMAGES), there.get("annotations")
    if images is not None and labels is not None:
        whole, lists = _paired(root, images, labels), _lists(there)
        if lists is None:
            return {"train": list(whole.values())}, []
        lines = {part: read_text(path, max_bytes=_MOST_BYTES).splitlines() for part, path in lists.items()}
        listed = {part: [_listed(line, whole) for line in of if line.strip()] for part, of in lines.items()}
        told = " and ".join(path.name for path in lists.values())
        parts = {part: [whole.get(stem, (None, None)) for stem in dict.fromkeys(of)] for part, of in listed.items()}
        return parts, [f"parts as listed in {told}"]
    folders = {part: folder for part, names in PARTS if (folder := first(there, names)) is not None}
    parts = {part: list(_paired(root, folder, folder).values()) for part, folder in folders.items()}
    if "train" not in parts:
        parts = {"train": list(_paired(root, root, root).values())}
    return parts, []


def _listed(line: str, there: Mapping[str, _Pair]) -> str:
    """The image that a line of a list names: without its ending, and what VOC's lists of a class add behind it."""
    ways = (line.strip(), line.split()[0], _stem(line.strip()), _stem(line.split()[0]))
    return next((way for way in ways if way in there), ways[0])


def _paired(root: Path, images: Path, labels: Path) -> dict[str, _Pair]:
    """The images of a folder with their labels, by their paths in it without the ending.

    Raises:
        UsageError: labels that may be of either of two images.
    """
    xml = {_stem(path): labels / path for path, _, _ in walk(labels) if path.lower().endswith(".xml")}
    paths = sorted(path for path, _, _ in walk(images) if is_image(path)) if xml else []
    check_one_each(images, ((path, str(xml[_stem(path)])) for path in paths if _stem(path) in xml))
    alone: dict[str, _Pair] = {stem: (None, path) for stem, path in xml.items()}
    return alone | {_stem(path): ((images / path).relative_to(root).as_posix(), xml.get(_stem(path))) for path in paths}


def _stem(path: str) -> str:
    return str(PurePosixPath(path).with_suffix(""))


def _lists(there: dict[str, Path]) -> dict[str, Path] | None:
    """The lists of the images of both parts."""
    folder = below(there["imagesets"]).get("main") if "imagesets" in there else None
    pairs = [[folder / f"{name}.txt" for name in names] for names in _LISTS] if folder else []
    found = next((pair for pair in pairs if all(path.is_file() for path in pair)), None)
    return None if found is None else dict(zip(("train", "test"), found, strict=True))


def _labels(path: Path) -> _Labels:
    """The content of one file.

    Raises:
        MAEError: it is no such XML, or declares a document type, whose entities may be made to fill any memory.
    """
    text = read_text(path, max_bytes=_MOST_BYTES)
    try:
        root = ElementTree.fromstring(text, parser=ElementTree.XMLParser(target=_NoDoctype()))
    except (ElementTree.ParseError, ValueError) as error:
        raise MAEError(f"{path} is no XML of Pascal VOC: {error}") from error
    objects = root.findall("object")
    size = (_number(root, f"size/{side}", path, default=0.0) for side in ("width", "height"))
    width, height = map(int, size)
    return _Labels(
        size=(width, height),
        names=[_text(each, "name", path) for each in objects],
        boxes=[_box(each, path) for each in objects],
        difficult=[_number(each, "difficult", path, default=0.0) != 0 for each in objects],
    )


class _NoDoctype(ElementTree.TreeBuilder):
    def doctype(self, name: str, pubid: str | None, system: str | None) -> None:
        """Called before anything that the document type declares is used."""
        raise ValueError("it declares a document type; expected elements alone")


def _box(element: ElementTree.Element, path: Path) -> list[float]:
    left, top, right, bottom = (_number(element, f"bndbox/{corner}", path) for corner in _CORNERS)
    return [left - 1, top - 1, right, bottom]


def _text(element: ElementTree.Element, tag: str, path: Path) -> str:
    text = (element.findtext(tag) or "").strip()
    if not text:
        raise MAEError(f"{path} has an <{element.tag}> without <{tag}>; expected Pascal VOC's elements")
    return text


def _number(element: ElementTree.Element, tag: str, path: Path, *, default: float | None = None) -> float:
    if default is not None and not (element.findtext(tag) or "").strip():
        return default
    text = _text(element, tag, path)
    try:
        number = float(text)
    except ValueError:
        number = nan
    if not abs(number) <= MOST_PIXELS:
        raise MAEError(f"{path} has {text:.40} as <{tag}>; expected a number of pixels")
    return number
