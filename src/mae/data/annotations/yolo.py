"""YOLO's labels: a text file for each image, a line an object, in shares of the image's sides."""

from collections.abc import Sequence
from functools import cache
from os import listdir
from os.path import exists, isdir, isfile  # which take a name that no file can have for none
from pathlib import Path, PurePosixPath

import numpy as np

from mae.data.annotations.objects import Objects, objects_of
from mae.data.annotations.parts import PARTS, below, first
from mae.data.annotations.plain_yaml import Value, read_plain_yaml
from mae.data.annotations.written import Written, WrittenPart, check_any, check_inside, left_out, read_text
from mae.data.sources.folder import count_of, is_image, is_visible, open_files, walk
from mae.errors import MAEError, UsageError

_MOST_BYTES = 16 << 20
_MOST_SHARE = 1e4
"""Beyond any mistake that takes pixels for shares."""
_MOST_CLASSES = 10_000
_CLASSES = "classes.txt"


def read(root: Path, *, name: str) -> Written | None:
    """The labels of a folder with `labels/` beside `images/`, told by the YAML file of the data or not; None: no such.

    A line is a class from 0, then the middle, width and height of a box, or the x and y of each corner of a polygon,
    whose box is around its corners. Where the YAML file tells the shape of keypoints (`kpt_shape`), these stand behind
    a box and are passed over. An image without a file, or with an empty one, shows no objects; one that is listed twice
    counts once. Labels without an image are left out.

    Raises:
        UsageError: images that are not where the YAML file says, or none with labels.
        MAEError: a line that is none of these.
    """
    told = _told(root)
    images = {part: [*dict.fromkeys(paths)] for part, paths in _images(root, told, name).items()}
    names = None if told is None else _names(told, name)
    keypoints = told is not None and "kpt_shape" in told
    labels = {part: _labels_of(root, paths) for part, paths in images.items()}
    if not any(isfile(path) for paths in labels.values() for path in paths):
        if told is None:
            return None
        raise UsageError(f"{name}: no image has labels; expected labels/1.txt for images/1.jpg")
    listed = next((each / _CLASSES for each in (root, _beside_images(root)) if (each / _CLASSES).is_file()), None)
    if names is None and listed is not None:
        names = read_text(listed, max_bytes=_MOST_BYTES).split("\n")
        names = [label.strip() for label in names if label.strip()]
    parts, without, missing = {}, 0, 0
    for part, paths in images.items():
        source, rows = open_files(root, paths)
        missing += len(paths) - len(rows)
        files = [labels[part][row] for row in rows]
        without += sum(not isfile(path) for path in files)
        parts[part] = WrittenPart(
            source=check_any(source, listed=len(paths), part=part, name=name),
            objects=[_objects(path, None if names is None else len(names), keypoints=keypoints) for path in files],
            sizes=np.zeros((len(rows), 2), dtype=np.int64),
        )
    remarks = left_out(missing, "listed but not there")
    remarks += left_out(_count_alone(root, images, labels), "without an image", of="label file")
    remarks += (f"{count_of(without, 'image')} without a file of labels",) if without else ()
    if names is None:
        remarks = (*remarks, "classes called by their numbers, as neither a YAML file nor classes.txt names them")
        most = max((int(each.classes.max(initial=-1)) for part in parts.values() for each in part.objects), default=-1)
        names = [f"class {number}" for number in range(most + 1)]
    return Written(kind="YOLO", parts=parts, class_names=tuple(names), normalised=True, remarks=remarks)


def _told(root: Path) -> dict[str, Value] | None:
    """The keys of the YAML file that names the classes."""
    for path in sorted(path for path in root.iterdir() if path.suffix.lower() in (".yaml", ".yml")):
        keys = read_plain_yaml(read_text(path, max_bytes=1 << 20))
        if "names" in keys:
            return keys
    return None


def _names(told: dict[str, Value], name: str) -> list[str]:
    value = told["names"]
    if isinstance(value, dict) and set(value) == {str(number) for number in range(len(value))}:
        value = [value[str(number)] for number in range(len(value))]
    if not isinstance(value, list) or not value or "" in value:
        raise UsageError(
            f"{name}: the YAML file's names are {value!r:.200}; expected a list, or a mapping from 0, 1, …"
        )
    if (count := told.get("nc", "")) != str(len(value)) and str(count).isdecimal():
        raise UsageError(
            f"{name}: the YAML file tells {count} classes (nc) and names {len(value)}; correct one of them"
        )
    return value


def _images(root: Path, told: dict[str, Value] | None, name: str) -> dict[str, list[str]]:
    """The paths of the images of each part, below the folder."""
    if told is not None:
        places = {"train": told.get("train"), "test": told.get("val") or told.get("test")}
        given = {part: value for part, value in places.items() if isinstance(value, str | list) and value}
        if "train" in given:
            return {part: _at(root, value, told.get("path"), name) for part, value in given.items()}
    there = below(root)
    if "images" in there:
        inner = below(there["images"])
        folders = {part: folder for part, names in PARTS if (folder := first(inner, names)) is not None}
        folders = folders if "train" in folders else {"train": there["images"]}
    else:
        outer = {part: below(folder) for part, names in PARTS if (folder := first(there, names)) is not None}
        folders = {part: inner["images"] for part, inner in outer.items() if "images" in inner}
    return {part: _below(root, folder) for part, folder in folders.items()}


def _at(root: Path, value: Value, base: Value | None, name: str) -> list[str]:
    """The images at the places that the YAML file names.

    Exports write `../train/images` for a folder beside the file, and a `path` on the machine where it was made: a place
    is looked for in the folder itself, and `..` in front is taken off.
    """
    paths: list[str] = []
    for place in [value] if isinstance(value, str) else value:
        parts, based = _steps(place), [*(_steps(base)[-1:] if isinstance(base, str) else []), *_steps(place)]
        found = next((path for each in (parts, based) if exists(path := root.joinpath(*each))), None)
        if found is None or not parts:
            raise UsageError(
                f"{name}: the YAML file names {place:.200}, which is not in the folder; write its path there"
            )
        if found.is_dir():
            paths += _below(root, found)
        else:
            lines = read_text(found, max_bytes=_MOST_BYTES).splitlines()
            paths += [check_inside(line.strip(), name=str(found)) for line in lines if line.strip()]
    return paths


def _steps(path: str) -> list[str]:
    """The folders of a path, none of which leads up."""
    return [part for part in path.replace("\\", "/").split("/") if part not in ("", ".", "..")]


def _below(root: Path, folder: Path) -> list[str]:
    return sorted((folder / path).relative_to(root).as_posix() for path, _, _ in walk(folder) if is_image(path))


def _labels_of(root: Path, images: Sequence[str]) -> list[Path]:
    """The file of each image's labels: in `labels/` instead of the last folder `images/`, else beside the image."""
    beside_images = cache(_beside_images)  # one look at each folder

    def labels_of(image: str) -> Path:
        path = PurePosixPath(image).with_suffix(".txt")
        for at in reversed(range(len(path.parts) - 1)):
            if path.parts[at].lower() == "images":
                return beside_images(root.joinpath(*path.parts[:at])).joinpath(*path.parts[at + 1 :])
        return root / path

    return [labels_of(image) for image in images]


def _beside_images(folder: Path) -> Path:
    """The folder of labels in one that holds `images/`; in capitals too, as `Images/` may be."""
    return (below(folder) if isdir(folder) else {}).get("labels", folder / "labels")


def _count_alone(root: Path, images: dict[str, list[str]], labels: dict[str, list[Path]]) -> int:
    """How many files in the folders of labels have no image; texts beside images may be others, and do not count."""
    pairs = [(root / image, file) for part, of in images.items() for image, file in zip(of, labels[part], strict=True)]
    used = {file for _, file in pairs}
    alone = 0
    for folder, of in {file.parent: image.parent for image, file in pairs}.items():
        if folder == of or not isdir(folder):
            continue
        there = {Path(name).stem for name in (listdir(of) if isdir(of) else ()) if is_image(name)}
        files = [folder / name for name in listdir(folder) if name.endswith(".txt") and name != _CLASSES]
        alone += sum(file not in used and file.stem not in there and is_visible(file.name) for file in files)
    return alone


def _objects(path: Path, most: int | None, *, keypoints: bool) -> Objects:
    """The objects in one file, of classes below `most`; others are -1."""
    lines = read_text(path, max_bytes=_MOST_BYTES).splitlines() if isfile(path) else []
    boxes, classes, outlines = [], [], []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        # Behind a class and a box; they would be taken for corners.
        words = line.split()[:5] if keypoints else line.split()
        label, values = _parsed(words, where=f"{path}, line {number}")
        classes.append(label if most is None or label < most else -1)
        if len(values) == 4:
            middle, size = values[:2], values[2:]
            boxes.append([*(middle - size / 2), *(middle + size / 2)])
            continue
        corners = values.reshape(-1, 2)
        boxes.append([*corners.min(axis=0), *corners.max(axis=0)])
        outlines.append((corners.astype(np.float32),))
    all_outlined = len(outlines) == len(boxes)
    return objects_of(boxes, classes, [False] * len(boxes), outlines if all_outlined else None)


def _parsed(words: list[str], *, where: str) -> tuple[int, np.ndarray]:
    try:
        label, values = float(words[0]), [float(word) for word in words[1:]]
    except ValueError:
        label, values = -1.0, []
    if not (label.is_integer() and 0 <= label < _MOST_CLASSES):
        raise MAEError(
            f"{where}: {' '.join(words)!r:.100}; expected the number of a class from 0, then shares of the sides"
        )
    if len(values) != 4 and (len(values) < 6 or len(values) % 2):
        raise MAEError(
            f"{where} has {len(values)} numbers after the class; expected 4 of a box or 6, 8, … of a polygon"
        )
    if not all(abs(value) <= _MOST_SHARE for value in values):
        raise MAEError(f"{where}: {' '.join(words)!r:.100}; expected shares of the image's sides, 0 to 1")
    return int(label), np.array(values)
