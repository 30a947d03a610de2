"""Opening a source by what the user typed: a folder, a list, a zip, or the name of a known data set."""

import difflib
from collections import Counter
from pathlib import Path

import numpy as np
import torch

from mae.data import arrays, builtin
from mae.data.base import LabelledData as LabelledData
from mae.data.base import LabelledSplit as LabelledSplit
from mae.data.base import Names, check_classes, hold_out
from mae.data.base import Source as Source
from mae.data.files import FileSource, ZipSource, open_folder, open_list, open_zip
from mae.errors import UsageError

KNOWN = ("cifar10", "stl10", "imagenet", "builtin:photos", "builtin:digits")
_TRAIN = ("train",)
_TEST = ("test", "val", "validation")


def open_source(spec: str, *, data_root: Path) -> Source:
    """The images to pre-train on.

    A folder or zip with a `train` directory gives that part alone, and so do the known data sets, so that their
    test part stays unseen.

    Args:
        spec: a folder, a `.txt` list of paths, a `.zip`, or one of `KNOWN`.
        data_root: where known data sets lie or are downloaded to.

    Raises:
        UsageError: nothing of that name, or no images there.
        MAEError: a known data set that cannot be had.
    """
    if spec == "builtin:photos":
        return builtin.photo_tiles()
    if spec == "builtin:digits":
        return builtin.digits()[0]
    if spec == "cifar10":
        return arrays.cifar10(data_root, train=True)[0]
    if spec == "stl10":
        return arrays.stl10(data_root, part="unlabeled")[0]
    return _training_part(_open_files(spec, data_root))


def open_labelled(spec: str, *, data_root: Path) -> LabelledData:
    """Labelled images for evaluation, divided into training and test part.

    In a folder or zip the class is the first directory, below `train/` and `test/` (or `val/`, `validation/`)
    where these exist; where they do not, a fifth of each class is held out by a hash of the names.

    Raises:
        UsageError: as `open_source`; no class directories, fewer than two classes, or a test class never trained.
        MAEError: a known data set that cannot be had.
    """
    if spec == "builtin:photos":
        squares, test_squares = builtin.labelled_photo_tiles()
        train, test = _split(squares, squares.labels()), _split(test_squares, test_squares.labels())
        note = f"{squares.note}; test: {test_squares.note}"
        return LabelledData(train=train, test=test, class_names=squares.photo_names, note=note)
    if spec == "builtin:digits":
        digits, test_digits, labels, test_labels = builtin.digits()
        names = tuple(str(digit) for digit in range(10))
        train, test = _split(digits, labels), _split(test_digits, test_labels)
        return LabelledData(train=train, test=test, class_names=names, note=_note(train, test))
    if spec in ("cifar10", "stl10"):
        return _downloaded(spec, data_root)
    return _labelled_files(_open_files(spec, data_root))


def _downloaded(spec: str, data_root: Path) -> LabelledData:
    if spec == "cifar10":
        parts = [arrays.cifar10(data_root, train=train) for train in (True, False)]
    else:
        parts = [arrays.stl10(data_root, part=part) for part in ("train", "test")]
    train, test = (_split(source, labels) for source, labels, _ in parts)
    return LabelledData(train=train, test=test, class_names=parts[0][2], note=_note(train, test))


def _split(source: Source, labels: np.ndarray) -> LabelledSplit:
    return LabelledSplit(source=source, labels=torch.from_numpy(labels.astype(np.int64)))


def _note(train: LabelledSplit, test: LabelledSplit) -> str:
    return f"{len(train.source):,} training and {len(test.source):,} test images"


def _open_files(spec: str, data_root: Path) -> FileSource | ZipSource:
    path = data_root / "imagenet" if spec == "imagenet" else Path(spec)
    if path.is_dir():
        return open_folder(path, name=spec)
    if not path.exists():
        raise UsageError(_missing(spec, path))
    if path.suffix.lower() == ".zip":
        return open_zip(path, name=spec)
    if path.suffix.lower() == ".txt":
        return open_list(path, name=spec)
    raise UsageError(
        f"{spec} is a file, not a source of images; expected a folder, a .zip, a .txt list of paths, "
        f"or one of {', '.join(KNOWN)}"
    )


def _missing(spec: str, path: Path) -> str:
    if spec == "imagenet":
        return f"imagenet is expected in {path}, which does not exist; put its train/ folder there"
    neighbours = [str(path.parent / entry.name) for entry in path.parent.iterdir()] if path.parent.is_dir() else []
    near = difflib.get_close_matches(spec, [*KNOWN, *sorted(neighbours)], n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}?" if near else f"expected a path or one of {', '.join(KNOWN)}"
    return f"{spec} does not exist; {hint}"


def _directories(source: FileSource | ZipSource) -> list[list[str]]:
    """Each item's directories from the top; a zip's one common top folder is looked through."""
    parts = [name.split("/") for name in source.names]
    tops = {part[0] for part in parts}
    wrapped = isinstance(source, ZipSource) and len(tops) == 1 and all(len(part) > 1 for part in parts)
    if wrapped and not tops & {*_TRAIN}:
        parts = [part[1:] for part in parts]
    return [part[:-1] for part in parts]


def _within(directories: list[list[str]], tops: tuple[str, ...]) -> np.ndarray:
    return np.array([bool(above) and above[0].lower() in tops for above in directories])


def _training_part(source: FileSource | ZipSource) -> Source:
    directories = _directories(source)
    inside = _within(directories, _TRAIN)
    if not inside.any() or inside.all():
        return source
    others = Counter(above[0] + "/" if above else "top level" for above in directories)
    left_out = ", ".join(f"{top} ({n:,} files)" for top, n in sorted(others.items()) if top.lower() != "train/")
    kept = np.flatnonzero(inside)
    return source.take(kept, f"train/ only, {len(kept):,} files; left out: {left_out}")


def _labelled_files(source: FileSource | ZipSource) -> LabelledData:
    directories = _directories(source)
    in_train, in_test = _within(directories, _TRAIN), _within(directories, _TEST)
    if in_train.any():
        directories = [above[1:] for above in directories]
        used = np.flatnonzero(in_train | in_test)
    else:
        in_test = np.zeros_like(in_test)
        used = np.arange(len(source))
    flat = [int(index) for index in used if not directories[index]]
    if flat:
        raise UsageError(
            f"{source.name} has no class folders: {source.item_name(flat[0])} lies in none; expected class/image.jpg"
        )
    class_of = {int(index): directories[index][0] for index in used}
    return _divided(source, class_of, in_test)


def _divided(source: FileSource | ZipSource, class_of: dict[int, str], in_test: np.ndarray) -> LabelledData:
    used = np.array(list(class_of))
    class_names = sorted({class_of[int(index)] for index in used if not in_test[index]})
    check_classes(class_names, name=source.name)
    unknown = sorted(set(class_of.values()) - set(class_names))
    if unknown:
        raise UsageError(f"{source.name}: the test class {unknown[0]!r} is not among the training classes")
    number = {name: position for position, name in enumerate(class_names)}
    labels = np.array([number[class_of[int(index)]] for index in used])
    testing, origin = in_test[used], ""
    if not testing.any():
        names: Names = source.names.take(used)
        testing, origin = hold_out(names, labels), "; no test part there: a fifth of each class was held out by name"
    train, test = (
        _split(source.take(used[part], f"{label} part, {part.sum():,} files"), labels[part])
        for part, label in ((~testing, "train"), (testing, "test"))
    )
    return LabelledData(train=train, test=test, class_names=tuple(class_names), note=_note(train, test) + origin)
