"""COCO's labels: a JSON file for each part."""

import re
from codecs import BOM_UTF8
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os.path import isfile  # which takes a name that no file can have for none
from pathlib import Path
from typing import Annotated

import numpy as np
from pydantic import Field, TypeAdapter, ValidationError

from mae.data.annotations.objects import Objects, Polygons, RunLengths, objects_of
from mae.data.annotations.parts import PARTS, below, first
from mae.data.annotations.written import MOST_PIXELS, Written, WrittenPart, check_any, check_inside, left_out
from mae.data.decode.limits import MAX_SIDE
from mae.data.sources.folder import open_files
from mae.errors import MAEError, UsageError

_MOST_BYTES = 1 << 30
"""COCO's own labels have 450 MB; as objects they take several times as much memory."""
_OTHERS = ("captions", "person_keypoints", "panoptic", "stuff", "image_info")
"""Beginnings of the names of COCO's files of other labels."""
_TRIED = 8
"""Images that are looked for to find their folder."""
_Pixels = Annotated[float, Field(ge=-MOST_PIXELS, le=MOST_PIXELS, allow_inf_nan=False)]
_Side = Annotated[int, Field(ge=0, le=1 << 20)]
_MaskSide = Annotated[int, Field(ge=1, le=MAX_SIDE)]


@dataclass(frozen=True, slots=True)
class _Mask:
    size: tuple[_MaskSide, _MaskSide]
    counts: str | list[int]


@dataclass(frozen=True, slots=True)
class _Annotation:
    image_id: int | str
    category_id: int
    bbox: tuple[_Pixels, _Pixels, _Pixels, _Pixels]
    segmentation: list[list[_Pixels]] | _Mask | None = None
    iscrowd: int = 0


@dataclass(frozen=True, slots=True)
class _Image:
    id: int | str
    file_name: str
    width: _Side | None = None
    height: _Side | None = None


@dataclass(frozen=True, slots=True)
class _Category:
    id: int
    name: str
    supercategory: str | None = None


@dataclass(frozen=True, slots=True)
class _File:
    images: list[_Image]
    annotations: list[_Annotation]
    categories: list[_Category]


def read(root: Path, *, name: str) -> Written | None:
    """The labels of a folder with `annotations/instances_train*.json`, with a JSON file in `train/`, or with one alone.

    Images are looked for in the folders that the files' names tell, in `images/` and beside the file. Classes are the
    categories by rising id, without a super-category that Roboflow lists among them.

    Raises:
        UsageError: several files of unknown parts, or images that are not there.
        MAEError: a file that is no such JSON, or lists an image twice.
    """
    paths = _files(root, name)
    if not paths:
        return None
    files = {part: _read(path) for part, path in paths.items()}
    categories = _categories(list(files.values()), name)
    parts, missing = {}, 0
    for part, file in files.items():
        names = [check_inside(image.file_name, name=str(paths[part])) for image in file.images]
        source, rows = open_files(_folder(root, paths[part], names), names)
        missing += len(names) - len(rows)
        objects = _objects(file, list(categories), path=paths[part])
        _check_listed_once(file, names, path=paths[part])
        parts[part] = WrittenPart(
            source=check_any(source, listed=len(names), part=part, name=name),
            objects=[objects[row] for row in rows],
            sizes=np.array([[file.images[row].width or 0, file.images[row].height or 0] for row in rows]),
        )
    remarks = left_out(missing, "listed but not there")
    return Written(kind="COCO", parts=parts, class_names=tuple(categories.values()), remarks=remarks)


def _files(root: Path, name: str) -> dict[str, Path]:
    """The file of each part."""
    there = below(root)
    inner = {part: _json_in(folder) for part, names in PARTS if (folder := first(there, names)) is not None}
    if len(inner.get("train", [])) == 1:
        return _one_each(inner, name)
    paths = [*(_json_in(there["annotations"]) if "annotations" in there else []), *_json_in(root)]
    words = {path: re.split("[^a-z]+", path.stem.lower()) for path in paths}
    by_word = {part: [[path for path in paths if word in words[path]] for word in names] for part, names in PARTS}
    told = {part: next(filter(None, found), []) for part, found in by_word.items()}  # of val and test the former
    if told["train"] or not paths:
        return _one_each(told, name)
    if len(paths) > 1:
        shown = ", ".join(path.name for path in paths[:5])
        raise UsageError(f"{name} holds {shown}; expected one JSON file, or names with train and val in them")
    return {"train": paths[0]}


def _one_each(paths: Mapping[str, Sequence[Path]], name: str) -> dict[str, Path]:
    """The file of each part that has one; of several it cannot be known which is meant."""
    for part, of in paths.items():
        if len(of) > 1:
            shown = ", ".join(path.name for path in of[:5])
            raise UsageError(f"{name} holds {shown} for the {part} part; expected one JSON file: merge or remove some")
    return {part: of[0] for part, of in paths.items() if of}


def _json_in(folder: Path) -> list[Path]:
    paths = sorted(path for path in folder.iterdir() if path.suffix.lower() == ".json")
    return [path for path in paths if not path.name.startswith((".", *_OTHERS))]


def _read(path: Path) -> _File:
    try:
        if path.is_file() and path.stat().st_size <= _MOST_BYTES:
            return TypeAdapter(_File).validate_json(path.read_bytes().removeprefix(BOM_UTF8))
    except OSError as error:
        raise MAEError(f"{path} cannot be read: {error.strerror}") from error
    except ValidationError as error:
        # Of the forms that a mask may have, the one that was meant is wrong furthest inside.
        found = max(error.errors(include_url=False, include_context=False), key=lambda each: len(each["loc"]))
        where = ".".join(str(part) for part in found["loc"] if not str(part).startswith(("_", "list[")))
        raise MAEError(f"{path} is no JSON of COCO's labels: {where} {found['msg'].lower()}") from error
    raise MAEError(f"{path} is no file of at most {_MOST_BYTES >> 20:,} MiB")


def _categories(files: Sequence[_File], name: str) -> dict[int, str]:
    """Names of classes by id, in the order of ids."""
    used = {annotation.category_id for file in files for annotation in file.annotations}
    above = {category.supercategory for file in files for category in file.categories}
    found: dict[int, str] = {}
    for category in (category for file in files for category in file.categories):
        if category.id not in used and category.name in above and category.supercategory in (None, "none"):
            continue
        if found.setdefault(category.id, category.name) != category.name:
            raise UsageError(f"{name}: category {category.id} is {found[category.id]!r} and {category.name!r}")
    return dict(sorted(found.items()))


def _folder(root: Path, path: Path, names: Sequence[str]) -> Path:
    """Where the images are: the folder that has the most of the first few."""
    told = path.stem.removeprefix("instances_")
    part = [word for _, words in PARTS for word in words if word in re.split("[^a-z]+", path.stem.lower())]
    folders = [path.parent, *(base / inner for inner in (told, *part) for base in (root, root / "images"))]
    folders += [root / "images", root]
    return max(folders, key=lambda folder: sum(isfile(folder / name) for name in names[:_TRIED]))


def _objects(file: _File, ids: list[int], *, path: Path) -> list[Objects]:
    """The objects of each image."""
    numbers = {category: number for number, category in enumerate(ids)}
    of: dict[int | str, list[_Annotation]] = {image.id: [] for image in file.images}
    if len(of) < len(file.images):
        twice = Counter(image.id for image in file.images).most_common(1)[0][0]
        raise MAEError(f"{path}: several of its images have the id {twice!r}; expected one of its own for each")
    for row, annotation in enumerate(file.annotations):
        if annotation.image_id not in of:
            raise MAEError(
                f"{path}: annotation {row} is of image {annotation.image_id!r}, which is not among its images"
            )
        of[annotation.image_id].append(annotation)
    return [_objects_of(of[image.id], numbers, path) for image in file.images]


def _check_listed_once(file: _File, names: Sequence[str], *, path: Path) -> None:
    """Refuse an image of two ids: it would become two images, each with a part of its objects."""
    ids: dict[str, int | str] = {}
    for image, name in zip(file.images, names, strict=True):
        if (first := ids.setdefault(name, image.id)) != image.id:
            raise MAEError(
                f"{path}: the images of the ids {first!r} and {image.id!r} are both {name!r}; expected it once: "
                "give its annotations one of the ids, and remove the other image"
            )


def _objects_of(found: Sequence[_Annotation], numbers: dict[int, int], path: Path) -> Objects:
    boxes = [[x, y, x + width, y + height] for x, y, width, height in (each.bbox for each in found)]
    outlined = all(each.segmentation for each in found)
    return objects_of(
        boxes,
        [numbers.get(each.category_id, -1) for each in found],
        [each.iscrowd != 0 for each in found],
        [_outline(each, path) for each in found] if outlined else None,
    )


def _outline(annotation: _Annotation, path: Path) -> Polygons | RunLengths:
    where, segmentation = f"{path}, image {annotation.image_id!r}", annotation.segmentation
    if isinstance(segmentation, _Mask):
        counts = segmentation.counts
        try:
            numbers = np.array(_uncompressed(counts) if isinstance(counts, str) else counts, dtype=np.int64)
            return RunLengths(height=segmentation.size[0], width=segmentation.size[1], counts=numbers)
        except (MAEError, OverflowError, ValueError) as error:
            raise MAEError(f"{where}: {error}") from error
    if any(len(part) < 6 or len(part) % 2 for part in segmentation or ()):
        raise MAEError(f"{where} has a polygon of other than 6, 8, … numbers; expected x and y of each corner")
    return tuple(np.array(part, dtype=np.float32).reshape(-1, 2) for part in segmentation or ())


def _uncompressed(text: str) -> list[int]:
    """The runs in COCO's compressed text.

    A character is 48 and six bits: five of the number, the lowest first, and whether more follow; the number's sign is
    its highest bit. From the fourth run on the difference to the run two before is written.

    Raises:
        ValueError: no such text.
    """
    counts: list[int] = []
    number = shift = 0
    for letter in text:
        bits = ord(letter) - 48
        if not 0 <= bits < 64 or shift > 60:
            raise ValueError("a mask's counts are no compressed run lengths")
        number |= (bits & 31) << shift
        shift += 5
        if bits & 32:
            continue
        if bits & 16:
            number -= 1 << shift
        counts.append(number + (counts[-2] if len(counts) > 2 else 0))
        number = shift = 0
    if shift:
        raise ValueError("a mask's counts end in the middle of a number")
    return counts
