"""Features of a whole source: computed once, stored beside the run, read memory-mapped by every protocol."""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from tokenize import TokenError
from typing import IO

import numpy as np
import psutil
import torch
from jaxtyping import Int64
from numpy.lib.format import dtype_to_descr, write_array_header_2_0
from rich.console import Console
from rich.progress import track
from torch import Tensor

from mae.data.content import content_digests
from mae.data.images import ImageSet, load_images
from mae.data.loaders import evaluation_batches, normalise
from mae.data.sources import Source
from mae.errors import MAEError, UsageError
from mae.evaluation.extractors import PATCHES, Extractor, Preprocessing, Reading, preprocessing_text
from mae.records import read_json, write_json

BATCH_SIZE = 128
"""Images that an extractor is given at a time."""

_FORMAT = 1
_ASIDE = ".writing-"


@dataclass(frozen=True, kw_only=True, eq=False)
class FeatureSet:
    """What an extractor makes of a source.

    Attributes:
        arrays: named features, `[n, D]` float32, and `patches` `[n, N, D]` float16 where they were asked for;
            memory-mapped: writing to them changes nothing on the disk.
        numbers: which images of the source the rows are of, in its order; an unreadable one has no row.
    """

    arrays: Mapping[str, Tensor]
    numbers: Int64[Tensor, " n"]


class Opened:
    """A source whose images are decoded at most once, and only when somebody asks for them.

    Args:
        source: where the images are.
        max_unreadable: share of the files that may be unreadable.
    """

    def __init__(self, source: Source, *, max_unreadable: float = 0.01) -> None:
        self.source = source
        self._max_unreadable = max_unreadable
        self._images: dict[Reading, ImageSet] = {}

    @cached_property
    def version(self) -> str:
        """See `Source.version`; told once, since of a million names it takes seconds."""
        return self.source.version()

    def images(self, reading: Reading) -> ImageSet:
        """The images with these channels.

        Raises:
            UsageError: they have no channel of a name.
            MAEError: too many unreadable files.
        """
        if reading not in self._images:
            in_chans, channels, no_data = reading
            self._images[reading] = load_images(
                self.source,
                in_chans=in_chans,
                channels=channels,
                no_data=no_data,
                max_unreadable=self._max_unreadable,
            )
        return self._images[reading]


class FeatureStore:
    """Stored arrays by a key of all that decides them; what is not there is computed.

    Args:
        folder: where they are kept, a folder for each key.
        device: where extractors compute.
        console: where progress is shown.
    """

    def __init__(self, folder: Path, *, device: torch.device, console: Console) -> None:
        self.folder = folder
        self.device = device
        self.console = console
        # What cannot be known again by its weights is kept for the life of this store alone.
        self._passing: dict[int, tuple[Extractor, TemporaryDirectory[str]]] = {}

    def features(self, extractor: Extractor, opened: Opened, *, patches: bool = False) -> FeatureSet:
        """An extractor's features of every readable image; patch tokens come alone, since they are large.

        Raises:
            MAEError: too many unreadable files, features that are not finite, or a disk that is full.
        """
        digests, numbers = self.digests(opened, extractor.preprocessing.reading)
        key = {
            "kind": PATCHES if patches else "pooled",
            "extractor": str(extractor.identity),
            "preprocessing": preprocessing_text(extractor.preprocessing),
            "images": hashlib.sha256(torch.stack([digests, numbers]).numpy().data).hexdigest()[:16],
        }
        root = self.folder
        if extractor.identity is None:
            if id(extractor) not in self._passing:
                self._passing[id(extractor)] = (extractor, TemporaryDirectory(prefix="mae-features-"))
            root = Path(self._passing[id(extractor)][1].name)
        compute = partial(self._extract, extractor, opened, only_patches=patches)
        return FeatureSet(arrays=_stored(root, key, compute), numbers=numbers)

    def images(self, opened: Opened, reading: Reading) -> ImageSet:
        """The images of a source, each of which was tried once: those that are `readable` really are.

        Raises:
            MAEError: too many unreadable files.
        """
        _, numbers = self.digests(opened, reading)
        images = opened.images(reading)
        images.readable = numbers
        return images

    def digests(self, opened: Opened, reading: Reading) -> tuple[Int64[Tensor, " n"], Int64[Tensor, " n"]]:
        """`content_digests` of every readable image, and their numbers in the source."""

        def compute(folder: Path) -> None:
            images = opened.images(reading)
            digests, numbers = content_digests(images, images.readable)
            np.save(folder / "digests.npy", digests.numpy())
            np.save(folder / "numbers.npy", numbers.numpy())

        key = {"kind": "content", "data": opened.version, "reading": repr(reading)}
        arrays = _stored(self.folder, key, compute)
        return arrays["digests"], arrays["numbers"]

    def _extract(self, extractor: Extractor, opened: Opened, folder: Path, *, only_patches: bool) -> None:
        images = self.images(opened, extractor.preprocessing.reading)
        count = len(images.readable)
        batches = normalised_batches(images, extractor.preprocessing, device=self.device)
        total = -(-count // BATCH_SIZE)
        what = f"{'patch tokens' if only_patches else 'features'} of {opened.source.name}: {extractor.name}"
        if not self.console.is_terminal:  # no bar there, and this can take long
            self.console.print(f"computing {what}, {count:,} images", highlight=False, markup=False, soft_wrap=True)
        shown = track(
            batches, description=what, total=total, console=self.console, disable=not self.console.is_terminal
        )
        # Written row by row, since a mapped file that meets a full disk ends the process without a word.
        files: dict[str, IO[bytes]] = {}
        shapes: dict[str, tuple[int, ...]] = {}
        with ExitStack() as stack:
            for batch in shown:
                named = extractor.named(batch)
                for name in _wanted(named, only_patches, extractor.name):
                    if name not in files:
                        files[name] = stack.enter_context((folder / f"{name}.npy").open("wb"))
                        shapes[name] = (count, *named[name].shape[1:])
                    values = _checked(named[name], (len(batch), *shapes[name][1:]), name, extractor.name)
                    if files[name].tell() == 0:
                        write_header(files[name], values.dtype, shapes[name])
                    files[name].write(values.data)


def _stored(root: Path, key: Mapping[str, str], compute: Callable[[Path], None]) -> dict[str, Tensor]:
    """The arrays of a key; a folder is there whole, under its name, or not at all."""
    told = {"format": _FORMAT, **key}
    folder = root / hashlib.sha256(json.dumps(told).encode()).hexdigest()[:16]
    if (found := _read(folder)) is not None:
        return found
    aside = root / f"{_ASIDE}{folder.name}-{os.getpid()}"  # another process may be at the same
    try:
        for leftover in root.glob(f"{_ASIDE}{folder.name}-*"):
            if leftover == aside or not psutil.pid_exists(int(leftover.name.rpartition("-")[2])):
                shutil.rmtree(leftover)
        aside.mkdir(parents=True)
        compute(aside)
        arrays = sorted(path.stem for path in aside.glob("*.npy"))
        write_json(aside / "key.json", {**told, "arrays": arrays})
        if (found := _read(folder)) is not None:  # the other one was faster
            return found
        shutil.rmtree(folder, ignore_errors=True)
        aside.rename(folder)
    except OSError as error:
        raise MAEError(f"could not store features in {folder}: {error}; free space there") from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    written = _read(folder)
    assert written is not None
    return written


def write_header(file: IO[bytes], dtype: np.dtype, shape: tuple[int, ...]) -> None:
    """Begin a `.npy` file whose rows are written after it, for arrays that memory cannot hold."""
    write_array_header_2_0(file, {"descr": dtype_to_descr(dtype), "fortran_order": False, "shape": shape})


def normalised_batches(
    images: ImageSet, preprocessing: Preprocessing, *, device: torch.device, numbers: Tensor | None = None
) -> Iterator[Tensor]:
    """Central crops as an extractor wants them, in order, on the device; the last batch may be smaller.

    Args:
        images: where they come from.
        preprocessing: how they are cropped and normalised.
        device: where they go.
        numbers: which images; None: every readable one.
    """
    mean, std = (torch.tensor(values, device=device) for values in (preprocessing.mean, preprocessing.std))
    crops = evaluation_batches(
        images,
        img_size=preprocessing.img_size,
        batch_size=BATCH_SIZE,
        crop_share=preprocessing.crop_share,
        interpolation=preprocessing.interpolation,
        numbers=numbers,
    )
    for batch in crops:
        yield normalise(batch.to(device), mean, std)


def _wanted(named: Collection[str], only_patches: bool, extractor: str) -> list[str]:
    if only_patches and PATCHES not in named:
        raise UsageError(f"{extractor} gives no patch tokens, only {', '.join(named)}; this protocol needs them")
    wanted = [name for name in named if (name == PATCHES) == only_patches]
    if not wanted:
        raise UsageError(f"{extractor} gives no feature of the whole image, only patch tokens; give a mean of them too")
    return wanted


def _checked(values: Tensor, shape: tuple[int, ...], name: str, extractor: str) -> np.ndarray:
    """The values as they are stored, in one piece."""
    if values.shape != shape or values.ndim != (3 if name == PATCHES else 2):
        raise UsageError(
            f"{extractor} gives {name} of shape {list(values.shape)} for {shape[0]} images; expected "
            f"{'[images, patches, width]' if name == PATCHES else '[images, width]'}, each image's the same"
        )
    if not bool(values.isfinite().all()):
        raise MAEError(f"{extractor}: its features hold values that are not finite; the model is broken")
    kept = values.half() if name == PATCHES else values.float()
    if not bool(kept.isfinite().all()):
        raise MAEError(f"{extractor}: its patch tokens hold values over 65504, too large to be stored in 16 bits")
    return np.ascontiguousarray(kept.cpu().numpy())


def _read(folder: Path) -> dict[str, Tensor] | None:
    """The arrays of a stored folder, memory-mapped; None where there is none, or a file is damaged."""
    if not (folder / "key.json").is_file():
        return None
    try:
        names = read_json(folder / "key.json")["arrays"]
        if any(Path(name).name != name for name in names):  # leads out of the folder
            return None
        # "c": what is written to the tensor stays in memory
        return {
            name: torch.from_numpy(np.load(folder / f"{name}.npy", mmap_mode="c", allow_pickle=False)) for name in names
        }
    # numpy reads a header as Python's own literals, and its tokenizer has errors of its own.
    except (OSError, ValueError, TypeError, EOFError, KeyError, SyntaxError, TokenError):
        return None
