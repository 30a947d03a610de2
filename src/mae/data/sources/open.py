"""Opening a source by its name on the command line: a path, a URL, or the name of a known data set."""

import os
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from mae.data.remote.fetch import open_remote
from mae.data.remote.storage import MANIFEST, LocalStorage, Storage
from mae.data.remote.urls import is_url
from mae.data.sources import builtin
from mae.data.sources import memory as arrays
from mae.data.sources.folder import FileSource, count_of, open_folder, open_list
from mae.data.sources.huggingface import PREFIX, RowSource, absolute_rows, open_rows
from mae.data.sources.labels import LabelledData as LabelledData
from mae.data.sources.labels import LabelledSplit as LabelledSplit
from mae.data.sources.labels import check_classes, check_divisible, check_parts, hold_out
from mae.data.sources.names import KNOWN as KNOWN
from mae.data.sources.names import check_exists
from mae.data.sources.pack import PackSource, open_pack
from mae.data.sources.pack_format import WORKING
from mae.data.sources.source import TEST, TRAIN
from mae.data.sources.source import Source as Source
from mae.data.sources.webdataset import TarSource, expand_braces, is_compressed, open_tars, tars_below
from mae.data.sources.zip import ZipSource, open_zip
from mae.errors import UsageError
from mae.text import visible

Files = FileSource | ZipSource | PackSource | TarSource | RowSource
"""Sources whose images have names, with directories that may give splits and classes."""

WITH_SPLITS = tuple(known for known in KNOWN if known != "imagenet")
"""Sets of `KNOWN` whose splits come apart; all other sources are the user's own files."""


def open_source(spec: str, *, data_root: Path) -> Source:
    """The images to pre-train on.

    A folder or zip with a `train` directory gives that split only, and so do the known data sets, so that their test
    split stays unseen.

    Args:
        spec: a folder of images or tars, a pack or its URL, a `.txt` list of paths, a `.zip`, a `.tar` or a pattern of
            several, a Hugging Face set after `hf:`, or one of `KNOWN`.
        data_root: where known data sets are, or are downloaded to.

    Raises:
        UsageError: nothing of that name, or no images there.
        MAEError: a known data set that cannot be downloaded.
    """
    if spec == "builtin:photos":
        return builtin.photo_tiles()
    if spec == "builtin:digits":
        return builtin.digits()[0]
    if spec == "cifar10":
        return arrays.cifar10(data_root, train=True)[0]
    if spec == "stl10":
        return arrays.stl10(data_root, part="unlabeled")[0]
    return _training_split(_open_files(spec, data_root))


def open_all(spec: str, *, data_root: Path) -> Source:
    """Every image of the user's own files, in `train` or not; of one of `WITH_SPLITS` what `open_source` gives.

    Args:
        spec: see `open_source`.
        data_root: see `open_source`.

    Raises:
        UsageError: as `open_source`.
        MAEError: as `open_source`.
    """
    return open_source(spec, data_root=data_root) if spec in WITH_SPLITS else _open_files(spec, data_root)


def open_whole(spec: str, *, data_root: Path) -> Source | LabelledData:
    """All images, including the splits that `open_source` leaves out; what `mae pack` packs.

    Args:
        spec: see `open_source`.
        data_root: see `open_source`.

    Returns:
        Both labelled splits of `cifar10` and `builtin:digits`; else one source.

    Raises:
        UsageError: as `open_source`.
        MAEError: as `open_source`.
    """
    if spec in ("cifar10", "builtin:digits"):
        return _known(spec, data_root)
    return open_all(spec, data_root=data_root)


def open_labelled(spec: str, *, data_root: Path, test: str | None = None) -> LabelledData:
    """Labelled images for evaluation, split into training and test images.

    In a folder or zip the class is the first directory, below `train/` and `test/` (or `val/`, `validation/`) where
    these exist; where they do not, a fifth of each class is held out by a hash of the names. In a list it is the first
    one in which paths differ.

    Args:
        spec: a folder, a list, a zip or one of `KNOWN`; with `test` one that holds files, all of which are for
            training, or those of its `train/` where it has one.
        data_root: where known data sets are, or are downloaded to.
        test: another folder, list or zip, all of which is for testing, or its `test/` (`val/`, `validation/`) where it
            has one.

    Raises:
        UsageError: as `open_source`; no class directories, fewer than two classes, or different ones in the splits; a
            class of one image where some must be held out.
        MAEError: a known data set that cannot be downloaded.
    """
    if test is not None:
        for known in (spec, test):
            if known in WITH_SPLITS:
                raise UsageError(f"{known} has its own test split; give it alone, or two folders, lists or zips")
        return _two_splits(_open_files(spec, data_root), _open_files(test, data_root))
    if spec in WITH_SPLITS:
        return _known(spec, data_root)
    source = _open_files(spec, data_root)
    if all(_inside(source, tops).any() for tops in (TRAIN, TEST)):
        return _two_splits(source, source)
    return _held_out(source)


def open_held_out(spec: str, *, data_root: Path) -> Source:
    """Images for evaluation without labels: the test split where there is one, else all.

    Raises:
        UsageError: as `open_source`.
        MAEError: a known data set that cannot be downloaded.
    """
    if spec in WITH_SPLITS:
        return open_labelled(spec, data_root=data_root).test.source
    source = _open_files(spec, data_root)
    inside = np.flatnonzero(_inside(source, TEST))
    return source.take(inside, f"test split, {count_of(len(inside), 'file')}") if len(inside) else source


def absolute_source(spec: str) -> str:
    """A source's name made independent of the working folder; names of known sets are kept."""
    if not spec or spec in KNOWN or is_url(spec):
        return spec
    return absolute_rows(spec) if spec.startswith(PREFIX) else str(Path(spec).resolve())


def _known(spec: str, data_root: Path) -> LabelledData:
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
    if spec == "cifar10":
        parts = [arrays.cifar10(data_root, train=train) for train in (True, False)]
    else:
        parts = [arrays.stl10(data_root, part=part) for part in ("train", "test")]
    train, test = (_split(source, labels) for source, labels, _ in parts)
    return LabelledData(train=train, test=test, class_names=parts[0][2], note=_note(train, test))


def _split(source: Source, labels: np.ndarray) -> LabelledSplit:
    return LabelledSplit(source=source, labels=torch.from_numpy(labels.astype(np.int64)))


def _note(train: LabelledSplit, test: LabelledSplit) -> str:
    return f"{len(train.source):,} training and {count_of(len(test.source), 'test image')}"


def _open_files(spec: str, data_root: Path) -> Files:
    if spec.startswith(PREFIX):
        return open_rows(spec)
    if is_url(spec):
        storage = open_remote(spec)
        return open_pack(storage, storage.place)  # not as typed, which may hold a password
    path = data_root / "imagenet" if spec == "imagenet" else Path(spec)
    try:
        return _opened(spec, path)
    except OSError as error:  # a name that is too long, a file that may not be read
        raise UsageError(f"{spec} cannot be opened: {error.strerror or error}") from error


def stored(spec: str) -> Storage:
    """The storage that holds a pack's files.

    Raises:
        UsageError: nothing of that name.
    """
    if is_url(spec):
        return open_remote(spec)
    check_exists(spec, data_root=Path("data"))
    if not Path(spec).is_dir():
        raise UsageError(f"{spec} is a file; expected the folder of a pack")
    return LocalStorage(root=Path(spec))


def _opened(spec: str, path: Path) -> Files:
    if (path / MANIFEST).is_file():
        return open_pack(LocalStorage(root=path), spec)
    if (path / WORKING).is_dir():
        raise UsageError(f"{spec} is an unfinished pack; rerun the same 'mae pack' command, which resumes it")
    if path.is_dir():
        return _opened_folder(spec, path)
    if not path.exists() and "{" in spec:
        return open_tars(expand_braces(spec), name=spec)
    check_exists(spec, data_root=path.parent)  # of imagenet: the path is in there
    # Opening a pipe would wait for someone to write into it.
    if path.is_file() and path.suffix.lower() == ".zip":
        return open_zip(path, name=spec)
    if path.is_file() and path.suffix.lower() == ".txt":
        return open_list(path, name=spec)
    if path.is_file() and (path.suffix.lower() == ".tar" or is_compressed(path.name)):
        return open_tars([path], name=spec)
    raise UsageError(
        f"{spec} is a file, not a source of images; expected a folder, a .zip, a .tar, a .txt list of paths, "
        f"or one of {', '.join(KNOWN)}"
    )


def _opened_folder(spec: str, path: Path) -> Files:
    try:
        return open_folder(path, name=spec)
    except UsageError:
        if tars := tars_below(path):
            return open_tars(tars, name=spec)
        raise


def directories_of(source: Files) -> list[list[str]]:
    """Each item's directories from the top, with its class where the source records one beside the image.

    Raises:
        UsageError: a class that cannot be read.
    """
    if isinstance(source, RowSource):
        return source.directories()
    directories = _folders_of(source)
    classes = source.classes() if isinstance(source, TarSource) else None
    if classes is None:
        return directories
    parts = [above[:1] if above and above[0].lower() in (*TRAIN, *TEST) else [] for above in directories]
    return [[*part, each] for part, each in zip(parts, classes, strict=True)]


def _folders_of(source: Files) -> list[list[str]]:
    """The directories in each item's name, without those that hold all others, see `_num_outer`."""
    first = _num_outer(source)
    return [name.split("/")[first:-1] for name in source.names]


def _num_outer(source: Files) -> int:
    """How many folders hold all others: one that a zip or tar was made of, or those above all of a list.

    Where a list's images all lie in one folder, it is their class, and does not count.
    """
    if isinstance(source, FileSource) and source.listed:
        first, last = min(source.names), max(source.names)
        common = os.path.commonprefix([first, last]).count("/")
        return common - int(common > 0 and common == first.count("/") == last.count("/"))
    if not isinstance(source, ZipSource | TarSource):
        return 0
    tops = {_part(name, 0) for name in source.names}
    return int(len(tops) == 1 and not tops & {"", *TRAIN})


def _part(name: str, number: int) -> str:
    """The folder of that number in a name, from the top; empty where there is none."""
    parts = name.split("/", number + 1)
    return parts[number] if len(parts) > number + 1 else ""


def _inside(source: Files, tops: tuple[str, ...]) -> np.ndarray:
    """Whether each item belongs to one of the splits `tops`; reads no class."""
    if isinstance(source, RowSource):
        return source.within(tops)
    first = _num_outer(source)
    # One at a time: lists of all folders would take several hundred bytes an image.
    return np.fromiter((_part(name, first).lower() in tops for name in source.names), bool, len(source))


def _training_split(source: Files) -> Source:
    inside = _inside(source, TRAIN)
    if not inside.any():
        return _with_hint(source)
    if inside.all():
        return source
    if isinstance(source, RowSource):
        return source.take(np.flatnonzero(inside), f"train split, {source.note}")
    others = Counter(above[0] + "/" if above else "top level" for above in _folders_of(source))
    left_out = ", ".join(
        f"{top} ({count_of(n, 'file')})" for top, n in sorted(others.items()) if top.lower() != "train/"
    )
    kept = np.flatnonzero(inside)
    return source.take(kept, f"train/ only, {count_of(len(kept), 'file')}; left out: {left_out}")


def _with_hint(source: Files) -> Source:
    """Says where a folder is that holds train/, since test images beside that are trained on too."""
    outer = {_part(name, 0) for name in source.names if _part(name, 1).lower() in TRAIN}
    if not isinstance(source, FileSource) or len(outer) != 1:
        return source
    folder = visible(str(source.root / outer.pop()))
    return replace(source, note=f"{source.note}; to leave test images out give {folder}, which holds train/")


def _classified(source: Files, tops: tuple[str, ...]) -> tuple[np.ndarray, list[str]]:
    """Numbers and classes of the files below the top folders `tops`, or of all files where these do not exist."""
    directories = directories_of(source)
    inside = _inside(source, tops)  # by folders alone: a class recorded elsewhere may be called train
    if inside.any():
        directories = [above[1:] for above in directories]
    used = np.flatnonzero(inside) if inside.any() else np.arange(len(source))
    flat = [int(index) for index in used if not directories[index]]
    if flat:
        wanted = "a ClassLabel column" if isinstance(source, RowSource) else "class/image.jpg"
        some = f"{len(flat):,} of {len(used):,} images outside class folders"
        lacks = "no class folders" if len(flat) == len(used) else some
        raise UsageError(f"{source.name} has {lacks}: {source.item_name(flat[0])} is in none; expected {wanted}")
    return used, [directories[index][0] for index in used]


def _two_splits(source: Files, test_source: Files) -> LabelledData:
    (used, classes), (test_used, test_classes) = _classified(source, TRAIN), _classified(test_source, TEST)
    class_names = sorted(set(classes))
    check_classes(class_names, name=source.name)
    check_parts(class_names, test_classes, name=test_source.name)
    train = _files_split(source, used, _numbered(classes, class_names), "train")
    test = _files_split(test_source, test_used, _numbered(test_classes, class_names), "test")
    return LabelledData(train=train, test=test, class_names=tuple(class_names), note=_note(train, test))


def _held_out(source: Files) -> LabelledData:
    used, classes = _classified(source, TRAIN)
    class_names = sorted(set(classes))
    check_classes(class_names, name=source.name)
    check_divisible(classes, name=source.name)
    labels = _numbered(classes, class_names)
    testing = hold_out(source.names.take(used), labels)
    train = _files_split(source, used[~testing], labels[~testing], "train")
    test = _files_split(source, used[testing], labels[testing], "test")
    note = f"{_note(train, test)}; no test split: a fifth of each class is held out by name"
    return LabelledData(train=train, test=test, class_names=tuple(class_names), note=note)


def _numbered(classes: list[str], class_names: list[str]) -> np.ndarray:
    number = {name: position for position, name in enumerate(class_names)}
    return np.array([number[name] for name in classes])


def _files_split(source: Files, used: np.ndarray, labels: np.ndarray, name: str) -> LabelledSplit:
    return _split(source.take(used, f"{name} split, {count_of(len(used), 'file')}"), labels)
